"""The command `lazyshard-producer`: takes rows from sources, makes rows of them, and publishes them as a stream.

- `cli`, `command`, `check`: the commands; `errors`: with exit codes; `stop`: signals; `wording`: what is said
- `run`: one run from start to end; `loop`: its rows; `out_directory`: where it publishes, and streams that are done
- `configuration`: flags and TOML to settings
- `sources` and `following`: where rows come from; `opening`: which kind a path is; `user_functions`
- `rows`: mixing, transforms, refusals; `position`: where a run stands, as kept in the seals
- `holding`: limits and retention; `shipping`: where a run publishes, object stores
- `display`: what is seen; `ray`: a sink for Ray Data

Importing this package imports nothing else: `main` answers Ctrl-C before the first slow import.
"""
