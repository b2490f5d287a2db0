"""From text to batches: corpora, tokenizers, token shards, loaders and a synthetic task."""
