"""A directory into which other programs write, as a source of rows that may never end: `directory`.

`journal` keeps how far each file was read; `files` says whose turn it is, `reading` reads one, `listing` finds them.
"""
