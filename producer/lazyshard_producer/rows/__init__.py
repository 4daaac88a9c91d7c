"""Rows on their way from the sources to the stream, each with the position after it: `pipeline` puts it together.

`reader` orders sources and tells positions; `recipe` and `encoding` make rows of each row, `sequences` of many;
`refusals` are rows that are none.
"""
