"""The command `lazyshard`: a module for each subcommand, of its name; `output` and `exits` are shared.

`main` is the entry point, which needs neither typer nor rich; `command` puts the subcommands together.
"""
