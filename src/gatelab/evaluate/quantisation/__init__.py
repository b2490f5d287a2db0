"""What a decoder loses when its weights and activations are rounded to few levels, simulated in its own arithmetic."""
