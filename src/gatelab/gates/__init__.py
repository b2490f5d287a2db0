"""The design space of attention gates: specifications, the one module that gates, and its float64 oracle."""
