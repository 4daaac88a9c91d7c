"""Sources of rows: `source` says what one is; each kind reads in order, and goes on from a position.

`lines` and `sequential` (compressed, pipes) read JSON lines, `tables` Parquet and Arrow, `indexed` Megatron's files,
`stream` streams, `generator` functions.
"""
