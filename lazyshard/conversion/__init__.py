"""Megatron's IndexedDataset, read for the producer; `lazyshard export` writes one, by megatron-core."""
