"""Metrics and statistics of telemetry: datasets, tables, and reading a stored run."""
