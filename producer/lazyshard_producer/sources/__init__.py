"""Sources of rows. `source` defines the interface; each kind reads in order, and continues from a position.

`lines` and `sequential` (compressed files, pipes) read JSON lines, `tables` Parquet and Arrow, `indexed` Megatron's
files, `stream` streams, `generator` functions. To add a kind, add a module here and a line in
`lazyshard_producer.opening`.
"""
