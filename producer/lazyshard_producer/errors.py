"""Errors of the producer command, and its exit codes. All extend lazyshard's root and a builtin, and carry fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from lazyshard.errors import (
    AccessRefused,
    ConfigInvalid,
    LazyShardError,
    ProducerFenced,
    RowInvalid,
    StoreUnavailable,
    StreamMissing,
    WriterFailed,
)
from lazyshard.lazy import FunctionMissing, named_function
from lazyshard.memory import is_short


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

TABLE: Final = (
    (
        FINISHED,
        "the stream has ended, now or before; or SIGTERM came",
        "nothing; after SIGTERM the same command goes on",
    ),
    (NO_EXTRA, "a package that is needed is not installed", "pip install 'lazyshard[producer]'"),
    (USAGE, "usage: a setting is missing or cannot be, or a port is taken", "see --help"),
    (BAD_ROW, "a bad row, more than --max-bad-rows of them, or no others", "mend the line named, run again"),
    (SOURCE_REFUSED, "a source is missing, unreadable, or not what it was", "put it back, run again"),
    (STREAM_REFUSED, "stream does not fit, is damaged, or ended without new rows", "use another --out"),
    (OTHER_PRODUCER, "another producer has the stream", "stop one of the two"),
    (FILESYSTEM, "filesystem or store failed: full, read-only, no permission", "make room, run again"),
    (WORKER_FAILED, "a worker process has died: out of memory, or killed", "run again with fewer --workers"),
    (UNEXPECTED, "unexpected error", "run again with --debug, report it"),
    (OUT_OF_MEMORY, "not enough memory; no row was skipped for it", "raise the limit, run again"),
    (INTERRUPTED, "interrupted (SIGINT, Ctrl-C)", "run the same command again to go on"),
)
"""Each code with what it means and what to do. `lazyshard_producer.cli` repeats it, and docs/troubleshooting.md."""

_CODES: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], int], ...]] = (
    (ExtraMissing, NO_EXTRA),
    ((SettingInvalid, ConfigInvalid), USAGE),
    (RowInvalid, BAD_ROW),
    (SourceRefused, SOURCE_REFUSED),
    (ProducerFenced, OTHER_PRODUCER),
    ((WriterFailed, AccessRefused, StreamMissing, StoreUnavailable), FILESYSTEM),
    (WorkerFailed, WORKER_FAILED),
    (LazyShardError, STREAM_REFUSED),
    (OSError, FILESYSTEM),
)
"""The first that fits counts: many of lazyshard's errors are OSErrors as well."""


def exit_code(error: BaseException) -> int:
    """Returns the exit code for an error that ends the command."""
    if is_short(error):
        return OUT_OF_MEMORY
    return next((code for kind, code in _CODES if isinstance(error, kind)), UNEXPECTED)
