"""Sources of rows: `source` says what one is; each kind reads in order, and continues from a position.

`lines` and `sequential` (compressed, pipes) read JSON lines, `tables` Parquet and Arrow, `indexed` Megatron's files,
`stream` streams, `generator` functions. `lazyshard_producer.opening` knows the kinds: a new one is a module here, and a
line there.
"""
