"""Detectors of trouble in telemetry: the meta-state monitor, what it has to beat, and how they are compared."""
