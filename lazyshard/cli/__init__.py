"""The command `lazyshard`: a module for each subcommand, of its name.

What a subcommand shows is in the module of the same name with `_view`, where that is much; `output` and `exits` are
shared. `main` is the entry point, which needs neither typer nor rich; `command` puts the subcommands together.
"""
