"""The decoder. Model code knows one device; sharding, compilation and recomputation are applied from outside."""
