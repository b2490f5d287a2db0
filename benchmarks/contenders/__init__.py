"""What takes part in the benchmarks: a module for each model, with one function ``prepare``; see ``lane.py``."""
