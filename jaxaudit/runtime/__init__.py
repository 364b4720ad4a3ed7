"""Access to files, processes and devices, errors, and registries, which know nothing of audits."""
