"""The command `lazyshard-producer`: reads sources and publishes them as a stream.

- `cli`: `main`, the exit codes; `command`: the options, in typer's terms
- `settings`: what a run is to do; `run`: one run from start to end; `loop`: its rows; `ended`: streams that are done
- `source`: what a source of rows is; `jsonl`: JSON lines; `source_file`: opening, kinds, fingerprints; `sequence`: one
  source after another; `position`: where each source stands, as kept in the seals; `duplicates`: keys named twice
- `pace`: rate limit; `stop`: signals; `progress`: what is shown while it runs; `wording`: what is said
- `errors`, `exits`: what goes wrong, and the exit code of each

Importing this package imports nothing else: `main` answers Ctrl-C before the first slow import.
"""
