"""What is computed from telemetry: metrics, statistics, datasets, tables, and reading a stored run."""
