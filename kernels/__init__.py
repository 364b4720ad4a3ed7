"""Numerical primitives on plain arrays, each with a float64 reference and a test against it."""
