"""Files, processes, devices: what knows nothing of audits, and errors and registries."""
