"""What the command says, and where: results on stdout, errors on stderr, a line each."""

from __future__ import annotations

import contextlib
import sys
from typing import Final

from lazyshard.errors import redact

NAME: Final = "lazyshard"


def one_line(text: str) -> str:
    """Returns a text with control characters escaped: a file name may hold a line end, a message must not."""
    if text.isprintable():
        return text
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
    """Prints a result.

    Raises:
        OSError: standard output takes nothing, as on a full disk. That nobody reads it any more is no error.
    """
    # What was done stays done when nobody listens any more.
    with contextlib.suppress(BrokenPipeError, ValueError):
        print(one_line(text), file=sys.stdout, flush=True)


def complain(text: str) -> None:
    """Prints an error."""
    explain(f"{NAME}: error: {text}")


def explain(text: str) -> None:
    """Prints a line that belongs to an error, if it still goes anywhere."""
    with contextlib.suppress(OSError, ValueError):
        print(one_line(redact(text)), file=sys.stderr, flush=True)


def drop_what_nobody_reads() -> None:
    """Lets go of an output that takes nothing any more.

    Python flushes both once more as it ends, and where that fails makes the exit code 120, whatever it was.
    """
    for name in ("stdout", "stderr"):
        try:
            if getattr(sys, name) is not None:
                getattr(sys, name).flush()
        except (OSError, ValueError):
            setattr(sys, name, None)
