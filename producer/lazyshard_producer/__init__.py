"""The command `lazyshard-producer`: reads rows from sources, transforms them, and publishes them as a stream.

`cli` handles Ctrl-C before the first slow import, so importing this package imports nothing else. `run` connects the
parts: `configuration`, `sources` and `following`, `rows`, `limits` (limits, deletion), `shipping` (object stores).
"""
