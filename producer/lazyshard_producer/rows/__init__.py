"""Rows on their way from the sources to the stream, each with the position after it.

- `mixing`: the order of sources; `reader`: batches of rows and their positions; `pipeline`: from settings to a reader
- `making`: rows made of rows; `recipe`, `encoding`: of each; `sequences`: of many
- `refusals`: rows that are none
"""
