"""The command `lazyshard-producer`: takes rows from sources, makes rows of them, and publishes them as a stream.

`cli` answers Ctrl-C before the first slow import, so importing this package imports nothing else. `run` puts the parts
together: `configuration`, `sources` and `following`, `rows`, `limits` (limits, deletion), `shipping` (object stores).
"""
