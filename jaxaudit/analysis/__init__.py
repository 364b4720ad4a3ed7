"""Metrics and statistics of telemetry, labelled datasets and tables of them, and the reader of stored runs."""
