"""Compiles and trains a grid: the engine, its schedule of phases, and the room it needs."""
