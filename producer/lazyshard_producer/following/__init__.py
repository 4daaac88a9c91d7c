"""A directory into which other programs write, as a source of rows that may never end.

- `directory`: the source, and when to look again; `files`: whose turn it is; `reading`: one file; `listing`: which
  files there are, and which are read to their end
- `journal`: how far each file was read, kept; `ledger`: positions told, and gone on from
"""
