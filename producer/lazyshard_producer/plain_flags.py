"""Flags in a command's help without a type behind them: `--json`, not `--json <bool>` as recent releases of typer show.

The command `lazyshard` has the same, `lazyshard.cli.command`: neither program imports the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperGroup


class PlainFlags(TyperGroup):
    """The group of a program's commands: what takes no value shows none, in the help of each too."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the program's own arguments and options, --help among them."""
        return _plain(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command by its name, None where there is none of that name."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _plain(command.get_params(ctx))
        return command


def _plain(params: Iterable[Any]) -> list[Any]:
    shown = list(params)
    for one in shown:
        if getattr(one, "is_flag", False) and one.metavar is None:
            one.metavar = ""
    return shown
