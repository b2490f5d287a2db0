"""What is applied to a decoder and its process from outside: ranks, sharding, recomputation, compilation."""
