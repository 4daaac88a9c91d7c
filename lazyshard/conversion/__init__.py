"""Indexed data sets of Megatron, `.bin` and `.idx`, read and written.

- `exporting` with `exporting_rows`, `indexed_*`: indexed data sets of Megatron
"""
