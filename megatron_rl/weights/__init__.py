"""Weights by the families' declarations: read, held, gathered, exported, and moved into the engine."""
