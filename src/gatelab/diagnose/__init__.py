"""Measuring a decoder from outside: attention sinks, massive activations, gates. Pure functions and one pass."""
