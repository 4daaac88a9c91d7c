"""What is wrong in a configuration: where, on which line, and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final, NamedTuple

__all__ = ["Mistake", "nearest"]

_MEANT: Final = {
    "drop_last": "dataloader.at_end",
    "shuffle": "shuffle_window",
    "source": "path",
    "directory": "path",
    "filter": "filter_fn",
    "filter_kwargs": "with_indices",
    "workers": "num_workers",
    "on_bad_sample": "max_error_count",
    "max_bad_samples": "max_error_count",
}
"""Keys of other libraries, and of ours elsewhere, and what they are here."""


class Mistake(NamedTuple):
    """One mistake in a configuration.

    Attributes:
        path: of the key or value, such as ``datasets[1].weight``; empty for the whole.
        line: in the file, from 1; None where that is not known, as in a dict.
        text: what was expected and what was found.
    """

    path: str
    line: int | None
    text: str

    def __str__(self) -> str:
        """Returns all three.

        >>> str(Mistake("datasets[1].weight", 12, "expected a number above 0, found -1"))
        'datasets[1].weight (line 12): expected a number above 0, found -1'
        """
        line = "" if self.line is None else f"line {self.line}"
        where = f"{self.path} ({line})" if self.path and line else self.path or line
        return f"{where}: {self.text}" if where else self.text


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns in words which key may have been meant.

    >>> nearest("wieght", ["path", "weight"]), nearest("colour", ["path", "weight"])
    ('is weight meant?', 'known are path, weight')
    """
    known = list(known)
    plain = name.replace("-", "_").lower()
    close = [plain] if plain in known else difflib.get_close_matches(plain, known, 1)
    if not close and plain in _MEANT:
        close = [_MEANT[plain]]
    return f"is {close[0]} meant?" if close else f"known are {', '.join(known)}"
