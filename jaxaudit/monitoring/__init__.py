"""Monitors of telemetry: state-space models and control charts, their calibration, and detectors compared with them."""
