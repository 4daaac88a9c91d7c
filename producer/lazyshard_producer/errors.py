"""Errors of the producer command, its exit codes, and its words. All errors extend lazyshard's root and a builtin.

   code  meaning                                                       what to do
      0  the stream has ended, now or before; or SIGTERM came          nothing; after SIGTERM the same command continues
      1  a package that is needed is not installed                     pip install 'lazyshard[producer]'
      2  usage: a setting is missing or cannot be, or a port is taken  see --help
      3  a bad row, more than --max-bad-rows of them, or no others     fix the line named, run again
      4  a source is missing, unreadable, or not what it was           put it back, run again
      5  stream does not fit, is damaged, or ended without new rows    use another --out
      6  another producer has the stream                               stop one of the two
      7  filesystem or store failed: full, read-only, no permission    make room, run again
      8  a worker process has died: out of memory, or killed           run again with fewer --workers
     70  unexpected error                                              run again with --debug, report it
     71  not enough memory; no row was skipped for it                  raise the limit, run again
    130  interrupted (SIGINT, Ctrl-C)                                  run the same command again to continue

The help of the command shows what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from lazyshard import errors
from lazyshard.errors import LazyShardError, redact
from lazyshard.format.records import printable
from lazyshard.lazy import FunctionMissing, named_function
from lazyshard.memory import is_short

NAME: Final = "lazyshard-producer"


class SettingInvalid(LazyShardError, ValueError):
    """An option of the command that cannot be."""

    option: str | None = None


class Problem(NamedTuple):
    """What cannot be about a setting, as the user calls it: what was expected and found, and what would do."""

    option: str
    text: str


class SettingsInvalid(SettingInvalid):
    """Settings that cannot be, or not together. Its `problems` are all of them, not the first one only."""

    problems: tuple[Problem, ...] = ()


class ExtraMissing(LazyShardError, ImportError):
    """A package that is needed for what was asked is not installed."""

    package: str | None = None
    extra: str | None = None


class SourceRefused(LazyShardError, ValueError):
    """A source that cannot be read, is of a kind that is not read, or is not what it was when it was published."""

    file: str | None = None
    expected: str | None = None
    actual: str | None = None


class WorkerFailed(LazyShardError, RuntimeError):
    """A worker process has ended in the middle of its work."""


def load_function(name: str, option: str) -> Callable[..., Any]:
    """Returns the function of the user's that is called `MODULE:FUNCTION`; SettingInvalid: there is none."""
    try:
        return named_function(name)
    except FunctionMissing as cause:
        raise SettingInvalid(f"{option}: {name}: {cause}", option=option) from cause.__cause__


FINISHED, NO_EXTRA, USAGE, BAD_ROW, SOURCE_REFUSED, STREAM_REFUSED, OTHER_PRODUCER, FILESYSTEM, WORKER_FAILED = range(9)
# EX_SOFTWARE and EX_OSERR of sysexits.h; 128 + SIGINT, as shells have it.
UNEXPECTED, OUT_OF_MEMORY, INTERRUPTED = 70, 71, 130

CODES: Final = {int(code): text for code, text in re.findall(r"^ +(\d+)  (.*?)  ", __doc__ or "", re.MULTILINE)}
"""What each code means, as the docstring of this module says it; for the help."""

_KINDS: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], int], ...]] = (
    (ExtraMissing, NO_EXTRA),
    ((SettingInvalid, errors.ConfigInvalid), USAGE),
    (errors.RowInvalid, BAD_ROW),
    (SourceRefused, SOURCE_REFUSED),
    (errors.ProducerFenced, OTHER_PRODUCER),
    ((errors.WriterFailed, errors.AccessRefused, errors.StreamMissing, errors.StoreUnavailable), FILESYSTEM),
    (WorkerFailed, WORKER_FAILED),
    (LazyShardError, STREAM_REFUSED),
    (OSError, FILESYSTEM),
)
"""The first that fits counts: many of lazyshard's errors are OSErrors as well."""


def exit_code(error: BaseException) -> int:
    """Returns the exit code for an error that ends the command."""
    if is_short(error):
        return OUT_OF_MEMORY
    return next((code for kind, code in _KINDS if isinstance(error, kind)), UNEXPECTED)


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
        again = "fix that, and run the same command again to continue: nothing half published is left"
        return f"{where}{error.strerror or error}; {again}"
    hint = "this should not happen; run the same command again with --debug for the traceback, and report it"
    return f"unexpected {type(error).__name__}: {error}; {hint}"


def count(number: int, noun: str) -> str:
    """Returns a number with its noun: 1 row, 2,000 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def holding(samples: int, chunks: int) -> str:
    """Returns what a stream holds."""
    return f"{count(samples, 'sample')} in {count(chunks, 'chunk')}"
