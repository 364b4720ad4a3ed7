"""What knows nothing of audits: errors, files, processes, devices, names."""
