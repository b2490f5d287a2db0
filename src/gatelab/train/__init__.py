"""Training: one readable loop, and what it needs to be exact, resumable and examined."""
