"""Stability margins: the magnitude of a perturbation at which half of the seeds collapse."""
