"""Sources of rows. `source` defines the interface; each kind reads in order, and continues from a position.

`lines` and `sequential` (compressed files, pipes) read JSON lines, `tables` Parquet and Arrow, `indexed` Megatron's
files, `stream` streams, `generator` functions. To add a kind, add a module here, and in `lazyshard_producer.opening` a
case of `source_kind` and an entry of `_OPENERS`: a kind without an entry is opened as a table.
"""
