"""An option of a run: from one table of them flags, TOML keys, help and example are made.

The flag of an option is its name with dashes, its TOML key the name itself, in the table that is named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lazyshard_producer.configuration.option_kinds import Kind


@dataclass(frozen=True, slots=True)
class Option:
    """An option.

    Attributes:
        name: its TOML key.
        table: the TOML table it belongs to: "" for the top of the file, "source" for each ``[[source]]``.
        kind: how its value is written.
        metavar: what stands for the value in the help.
        help: what it does, in a sentence or two; ends with its default where it has one.
        example: a value in TOML, for the example file.
        repeat: whether its flag may be given several times.
    """

    name: str
    table: str
    kind: Kind
    metavar: str
    help: str
    example: str
    repeat: bool = False

    @property
    def flag(self) -> str:
        """What it is called on the command line."""
        return "--" + self.name.replace("_", "-")


PANELS: Final = {
    "source": "Sources",
    "": "Stream",
    "rows": "Rows",
    "encoding": "Encoding: rows hold what the trainer needs",
    "limits": "Limits: how far ahead of training, and what is deleted",
}
"""Headings of the help, by table."""
