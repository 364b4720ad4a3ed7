"""Telemetry of dialogue learners: statistics as pure functions of arrays, by subject, and the table of channels."""
