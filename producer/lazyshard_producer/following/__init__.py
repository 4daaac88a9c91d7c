"""A directory into which other programs write, as a source of rows that may never end.

- `directory`: the source, and the positions it tells; `journal`: how far each file was read, kept
- `files`: whose turn it is; `reading`: one file; `listing`: which files there are, and when to look again
"""
