"""Reads Megatron's IndexedDataset for the producer; `lazyshard export` writes one with megatron-core."""
