"""Longer contexts than trained at: extending them, streaming beyond them, pruning their cache."""
