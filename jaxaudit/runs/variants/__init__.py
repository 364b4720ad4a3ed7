"""Comparison of training variants: how much stability each one gains, and what it costs."""
