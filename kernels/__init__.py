"""Numerical primitives: functions of plain arrays, each with a float64 reference and a test against it."""
