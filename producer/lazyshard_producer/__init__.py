"""The command `lazyshard-producer`: takes rows from sources, makes rows of them, and publishes them as a stream.

- `cli`, `command`, `help_texts`: the command line; `tasks`, `check`: the commands; `exits`: exit codes
- `run`: one run from start to end; `out_directory`: where it publishes; `loop` with
  `loop_interfaces`: its rows; `pace`: rate limit; `ended`: streams that are done; `stop`: signals
- `configuration`: flags and TOML to settings
- `sources` and `following`: where rows come from; `opening`: which kind a path is; `user_functions`
- `rows`: mixing, transforms, refusals; `position`: where a run stands, as kept in the seals
- `holding`: limits and retention
- `display`, `watching`, `plain_flags`, `wording`: what is seen and said
- `ray`: a sink for Ray Data

Importing this package imports nothing else: `main` answers Ctrl-C before the first slow import.
"""
