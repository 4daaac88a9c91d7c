"""Processing of rows between the sources and the stream, each with the position after it.

`reader` orders the sources and makes positions; `recipe` and `encoding` transform each row, `sequences` many rows
together; `refusals` handles bad rows; `pipeline` connects them.
"""
