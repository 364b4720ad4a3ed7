"""A grid's programs, compiled and advanced in memory: the engine, its schedule of phases, and the room it needs."""
