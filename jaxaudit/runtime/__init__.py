"""Files, processes, devices: access to them, errors and registries, without knowledge of audits."""
