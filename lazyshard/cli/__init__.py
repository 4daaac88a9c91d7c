"""The command `lazyshard`: each subcommand has a module of the same name; they share `output` and `exits`.

`main` is the entry point and needs neither typer nor rich; `command` registers the subcommands.
"""
