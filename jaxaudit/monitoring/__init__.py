"""Monitors and detectors: charts and state-space models of telemetry, calibrated, and what they are compared with."""
