"""Numerical primitives: functions of arrays, each with a float64 reference and a test against it."""
