"""Streams out of other programs' files, other chunks, and Megatron's `.bin` and `.idx`.

- `adoption` with `adoption_*`: a stream out of other programs' chunk files
- `rechunking` with `rechunking_*`: the rows of a stream in other chunks
- `exporting` with `exporting_rows`, `indexed_*`: indexed data sets of Megatron
"""
