"""Compiles and trains a grid: the engine, the loop over chunks, memory, and the choice of the execution."""
