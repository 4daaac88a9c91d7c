"""Sources of rows: where each kind reads, in order, and how it goes on from a position.

- `source`: what a source is; opening files, and knowing them again
- `lines`: plain JSON lines; `sequential`, with `decompression`: .gz, .zst, pipes and standard input
- `tables`, with `arrow_rows`: Parquet, Arrow and Hugging Face `datasets`; `indexed`: Megatron's
- `stream`: streams, native and foreign; `generator`: Python
"""
