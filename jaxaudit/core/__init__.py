"""Learners, taps, perturbations, remedies and grids, and the program that trains them."""
