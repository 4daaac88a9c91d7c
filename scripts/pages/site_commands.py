"""Generates the reference pages of the commands from the commands: arguments, options and exit codes."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any, Final

import typer.main
from rich.text import Text

APPLICATIONS: Final = {
    "lazyshard": ("lazyshard.cli.command", "lazyshard.cli.main"),
    "lazyshard-producer": ("lazyshard_producer.command", "lazyshard_producer.cli"),
}
"""Of each command the module that has its typer application as `app`, and the one whose docstring lists exit codes."""

_HEADINGS: Final = ("Example", "Examples", "Exit codes")


def page(name: str) -> str:
    """Returns the page of a command, as Markdown: a section for each of its subcommands.

    Args:
        name: a key of `APPLICATIONS`.
    """
    module, entry = (importlib.import_module(found) for found in APPLICATIONS[name])
    root = typer.main.get_command(module.app)
    commands: dict[str, Any] = getattr(root, "commands", {})
    parts = [f"# The command `{name}`", _words(root.help), *_parameters(root)]
    parts += [f"`{name} COMMAND --help` shows the same in a terminal.", "## Exit codes", _exit_codes(entry)]
    for command in sorted(commands):
        made = commands[command]
        parts += [f"## {name} {command}", f"```\n{_usage(name, command, made)}\n```", _words(made.help)]
        parts += [*_parameters(made), _epilog(made.epilog)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _exit_codes(module: Any) -> str:
    """Returns the table of exit codes in the docstring of a module."""
    rows = ["| code | meaning | what to do |", "|---|---|---|"]
    for line in (inspect.getdoc(module) or "").splitlines():
        if re.match(r" {4} *\d+ ", line):
            rows.append("| " + " | ".join(_literal(_cell(part)) for part in re.split(r" {2,}", line.strip())) + " |")
    return "\n".join(rows)


def _usage(name: str, command: str, made: Any) -> str:
    arguments = [parameter for parameter in made.params if parameter.param_type_name == "argument"]
    words = [_argument(one) if one.required else f"[{_argument(one)}]" for one in arguments]
    return " ".join([name, command, *words, "[OPTIONS]"])


def _argument(parameter: Any) -> str:
    """Returns the name of an argument, with three dots if it may be repeated."""
    word = str(parameter.metavar or parameter.name.upper()).replace("[", "").replace("]", "").rstrip(".")
    return word + ("..." if parameter.nargs == -1 else "")


def _parameters(made: Any) -> list[str]:
    """Returns the table of arguments and options."""
    rows = ["| argument or option | what it does | default |", "|---|---|---|"]
    for parameter in made.params:
        if getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "argument":
            names = f"`{_argument(parameter)}`"
        else:
            taken = "" if parameter.is_flag else f" {parameter.metavar or _kind(parameter)}"
            names = ", ".join(f"`{option}`" for option in (*parameter.opts[:-1], parameter.opts[-1] + taken))
            names += "".join(f", `{option}`" for option in parameter.secondary_opts)
        rows.append(f"| {names} | {_cell(_words(parameter.help))} | {_cell(_default(parameter))} |")
    return ["\n".join(rows)] if len(rows) > 2 else []


def _kind(parameter: Any) -> str:
    """Returns the type of an option without a metavar: TEXT, INTEGER, or its choices."""
    return str(getattr(parameter, "display_type", None) or parameter.type.name).upper()


def _default(parameter: Any) -> str:
    if parameter.required:
        return "(required)"
    shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    if isinstance(shown, bool) or not isinstance(shown, (str, int, float)):
        return ""
    return f"`{shown}`"


def _epilog(markup: str | None) -> str:
    """Returns the epilog, mostly examples and exit codes, line by line as in a terminal."""
    if not markup:
        return ""
    lines = [" ".join(block.split()) for block in re.split(r"\n\s*\n", _plain(markup))]
    return "```\n" + "\n".join(f"\n{line}" if line in _HEADINGS else line for line in lines).strip() + "\n```"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _words(markup: str | None) -> str:
    """Returns help in rich's markup as Markdown paragraphs, with brackets and emphasis characters kept literal."""
    if not markup:
        return ""
    paragraphs = [" ".join(block.split()) for block in re.split(r"\n\s*\n", _plain(markup))]
    return "\n\n".join(map(_literal, paragraphs))


def _literal(text: str) -> str:
    """Returns Markdown that shows a text literally, except for code between backticks."""
    return "`".join(
        part if number % 2 else re.sub(r"([<>*_\[\]])", r"\\\1", part) for number, part in enumerate(text.split("`"))
    )


def _plain(markup: str) -> str:
    return Text.from_markup(inspect.cleandoc(markup)).plain.replace("\b", "")
