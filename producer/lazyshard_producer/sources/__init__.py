"""Sources of rows: where each kind reads, in order, and how it goes on from a position.

- `source`: what a source is; `files`: opening files, knowing them again
- `lines`: plain JSON lines; `compressed`, with `decompression`: .gz and .zst; `standard_input`: and pipes
- `arrow`, with `tables`, `arrow_rows`: Parquet, Arrow and Hugging Face `datasets`; `indexed`: Megatron's
- `stream`: streams, native and foreign; `generator`: Python
"""
