"""What the command says, in words. Text only, nothing is printed here."""

from __future__ import annotations

from typing import Final

from lazyshard.errors import LazyShardError, redact
from lazyshard.format.records import printable
from lazyshard.memory import is_short

NAME: Final = "lazyshard-producer"


def one_line(text: str) -> str:
    """Returns a text without credentials, and with control characters escaped: file names may hold line ends."""
    return printable(redact(text))


def explain(error: Exception) -> str:
    """Returns what to say of an error."""
    if is_short(error):
        again = "give it more, or fewer --workers and a smaller --max-row-bytes, and run the same command again"
        return f"not enough memory: {error or 'the system has no more'}; {again}: no row was refused or skipped for it"
    if isinstance(error, LazyShardError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        again = "fix that, and run the same command again to go on: nothing half published is left"
        return f"{where}{error.strerror or error}; {again}"
    hint = "this should not happen; run the same command again with --debug for the traceback, and report it"
    return f"unexpected {type(error).__name__}: {error}; {hint}"


def count(number: int, noun: str) -> str:
    """Returns a number with its noun: 1 row, 2,000 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def holding(samples: int, chunks: int) -> str:
    """Returns what a stream holds."""
    return f"{count(samples, 'sample')} in {count(chunks, 'chunk')}"
