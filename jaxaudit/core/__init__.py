"""What a lane is made of: learners, taps, perturbations, remedies, and the program of a grid."""
