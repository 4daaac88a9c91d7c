"""A directory into which other programs write, as a source of rows that may never end: `directory`.

`journal` keeps how far each file was read and in which order, `reading` reads one file, `listing` finds them.
"""
