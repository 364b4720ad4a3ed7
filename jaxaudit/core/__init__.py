"""Learners, taps and grids: what an audit is made of, and the program that trains it."""
