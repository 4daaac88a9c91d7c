"""A directory into which other programs write, as a source of rows that may never end.

- `directory`: the source; `names`, `listing`, `watch`: which files there are, and when to look again
- `files`: whose turn it is; `plain`, `packed`, with `reading`, `piece`: reading them; `finished`, `finished_watch`:
  those that are read
- `state`, `journal`, `ledger`, `resume`: how far each file was read, kept, and gone on from
"""
