"""Errors of the producer command, its exit codes, and its wording. All errors extend lazyshard's root and a builtin.

   code  meaning                                                       what to do
      0  the stream has ended, or SIGTERM stopped the run              nothing; after SIGTERM the same command continues
      1  a required package is not installed                           pip install 'lazyshard[producer]'
      2  usage: a setting is missing or invalid, or a port is in use   see --help
      3  a bad row, more than --max-bad-rows of them, or no good row   fix the named line, run again
      4  a source is missing, unreadable, or has changed               restore it, run again
      5  stream does not match, is damaged, or ended without new rows  use another --out
      6  another producer has the stream                               stop one of the two
      7  filesystem or store failed: full, read-only, no permission    make room, run again
      8  a worker process died: out of memory, or killed               run again with fewer --workers
     70  unexpected error                                              run again with --debug, report it
     71  not enough memory; no row was skipped                         raise the limit, run again
    130  interrupted (SIGINT, Ctrl-C)                                  run the same command again to continue

The help of the command shows the meanings.
"""

from __future__ import annotations

import importlib
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
    """An option of the command is invalid."""

    option: str | None = None


class Problem(NamedTuple):
    """A setting, by the name that the user wrote, and its error: what was expected and found, and a remedy."""

    option: str
    text: str


class SettingsInvalid(SettingInvalid):
    """Settings are invalid or conflict. `problems` lists all errors, not only the first."""

    problems: tuple[Problem, ...] = ()


class ExtraMissing(LazyShardError, ImportError):
    """A package that the given options require is not installed."""

    package: str | None = None
    extra: str | None = None


class SourceRefused(LazyShardError, ValueError):
    """A source is unreadable, is of an unsupported kind, or has changed since its rows were published."""


class WorkerFailed(LazyShardError, RuntimeError):
    """A worker process ended before its work was done."""


def load_function(name: str, option: str) -> Callable[..., Any]:
    """Returns the user's function `MODULE:FUNCTION`. Raises SettingInvalid if there is none."""
    try:
        return named_function(name)
    except FunctionMissing as cause:
        raise SettingInvalid(f"{option}: {name}: {cause}", option=option) from cause.__cause__


def load_extra(what: str, module: str, extra: str | None) -> Any:
    """Imports an optional module by its full name; `what` needs it. Raises ExtraMissing."""
    name = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        missing = isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] == name
        found = "it is not installed" if missing else f"importing it failed: {cause}"
        package = name.replace("_", "-")
        install = package if extra is None else f"'lazyshard[{extra}]'"
        message = f"{what} needs {package}, and {found}: pip install {install}"
        raise ExtraMissing(message, package=package, extra=extra) from cause


FINISHED, NO_EXTRA, USAGE, BAD_ROW, SOURCE_REFUSED, STREAM_REFUSED, OTHER_PRODUCER, FILESYSTEM, WORKER_FAILED = range(9)
# EX_SOFTWARE and EX_OSERR of sysexits.h; 128 + SIGINT, as in shells.
UNEXPECTED, OUT_OF_MEMORY, INTERRUPTED = 70, 71, 130

CODES: Final = {int(code): text for code, text in re.findall(r"^ +(\d+)  (.*?)  ", __doc__ or "", re.MULTILINE)}
"""The meaning of each code, taken from the docstring of this module, for the help."""

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
"""The first match counts: many of lazyshard's errors are OSErrors as well."""


def exit_code(error: BaseException) -> int:
    """Returns the exit code for an error that ends the command."""
    if is_short(error):
        return OUT_OF_MEMORY
    return next((code for kind, code in _KINDS if isinstance(error, kind)), UNEXPECTED)


def one_line(text: str) -> str:
    """Returns a text without credentials and with control characters escaped: file names may contain newlines."""
    return printable(redact(text))


def explain(error: Exception) -> str:
    """Returns the message for an error."""
    if is_short(error):
        again = "raise the limit, or use fewer --workers and a smaller --max-row-bytes, and run the same command again"
        return f"not enough memory: {error or 'the system has no more'}; {again}: no row was refused or skipped"
    if isinstance(error, LazyShardError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        again = "fix this, and run the same command again to continue: no partly published data is left"
        return f"{where}{error.strerror or error}; {again}"
    hint = "this should not happen; run the same command again with --debug for the traceback, and report it"
    return f"unexpected {type(error).__name__}: {error}; {hint}"


def count(number: int, noun: str) -> str:
    """Returns a number and a noun: 1 row, 2,000 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def holding(samples: int, chunks: int) -> str:
    """Returns how many samples and chunks a stream holds, as text."""
    return f"{count(samples, 'sample')} in {count(chunks, 'chunk')}"
