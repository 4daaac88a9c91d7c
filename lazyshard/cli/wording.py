"""What the command says, and where: results on stdout, errors on stderr, a line each."""

from __future__ import annotations

import contextlib
import sys
from typing import Final, TextIO

NAME: Final = "lazyshard"


def one_line(text: str) -> str:
    """Returns a text with control characters escaped: a file name may hold a line end, a message must not."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def count(number: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> count(1, "row"), count(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def chunk_range(first: int, stop: int) -> str:
    """Returns the chunks of the half-open range [first, stop), at least one.

    >>> chunk_range(3, 4), chunk_range(0, 1200)
    ('chunk 3', 'chunks 0 to 1,199')
    """
    return f"chunk {first:,}" if stop == first + 1 else f"chunks {first:,} to {stop - 1:,}"


def say(text: str) -> None:
    """Prints a result."""
    _print(text, sys.stdout)


def complain(text: str) -> None:
    """Prints an error."""
    _print(f"{NAME}: error: {text}", sys.stderr)


def explain(text: str) -> None:
    """Prints a line that belongs to an error."""
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    # What was done stays done when nobody listens any more.
    with contextlib.suppress(OSError, ValueError):
        print(one_line(text), file=stream, flush=True)
