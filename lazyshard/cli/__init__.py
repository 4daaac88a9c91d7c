"""The command `lazyshard`.

- `main`: its entry point and the table of exit codes; imports neither typer nor rich, which may be missing
- `command`: the subcommands together, and what becomes of errors; `exits`: error -> exit code
- `adopt`: the subcommand of this name
- `progress`, `wording`: what is shown and said
"""
