"""Reading a text longer than what a model remembers: window caches, with the first tokens kept or not."""
