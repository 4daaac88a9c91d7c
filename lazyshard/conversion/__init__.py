"""Megatron's IndexedDataset: `exporting` writes an ended stream as one, `indexed` reads one, for the producer."""
