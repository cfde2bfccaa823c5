"""Interrupt each side effect of a real grid, and cut its power: crash points and loss of unflushed writes."""
