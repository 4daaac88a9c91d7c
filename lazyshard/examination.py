"""What an examination of an installation finds: the results that `lazyshard doctor` prints.

A package that has something to examine names a function without arguments in the entry-point group `GROUP`; it returns
its findings in the order in which they are to be read. A function `applies` beside it may tell whether there is
anything to examine; where there is not, only who asks for it has it examined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["GROUP", "Examine", "Finding"]

GROUP: Final = "lazyshard.doctor"  # The entry-point group; an entry's name is what is given to the command


@dataclass(frozen=True)
class Finding:
    """A thing that was looked at, under a heading; those of a section are together. `ok` is None without a verdict."""

    section: str
    subject: str
    answer: str
    ok: bool | None = None


Examine = Callable[[], Sequence[Finding]]  # What an entry of the group is
