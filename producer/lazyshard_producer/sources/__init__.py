"""Sources of rows: where each kind reads, in order, and how it goes on from a position.

- `source`: what a source is; `source_file`, `regular_file`: opening files, knowing them again
- `jsonl`, `lines`: JSON lines; `compressed`, `decompression`, `read_ahead`, `digested_text`: .gz and .zst;
  `standard_input`: and pipes
- `parquet`, `arrow`, `huggingface`, with `tables`, `table_files`, `arrow_*`: tables
- `stream`: streams, native and foreign
- `generator`, `function_rows`: Python
- `allocator`: memory for blocks of text
"""
