"""The meta-state: models that follow a run's telemetry and say what they expect of its next step."""
