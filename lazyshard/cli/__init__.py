"""The command `lazyshard`.

A module for each subcommand, of its name; what it shows is in the module of the same name with `_view`, where that is
much. They share `options`, `output`, `exits` and `shortening`. `main` is the entry point, with the table of exit codes:
it needs neither typer nor rich, which may be missing. `command` puts the subcommands together.
"""
