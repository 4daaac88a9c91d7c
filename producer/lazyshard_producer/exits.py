"""The exit codes of the command, and which error leads to which."""

from __future__ import annotations

from typing import Final

from lazyshard.errors import (
    FileUnreadable,
    LazyShardError,
    ProducerFenced,
    ProducerLocked,
    RowInvalid,
    StoreRefused,
    StoreUnavailable,
    StreamMissing,
    WriterFailed,
)
from lazyshard.memory import is_short
from lazyshard_producer.errors import ExtraMissing, SettingInvalid, SourceRefused, WorkerFailed

FINISHED: Final = 0
NO_EXTRA: Final = 1
USAGE: Final = 2
BAD_ROW: Final = 3
SOURCE_REFUSED: Final = 4
STREAM_REFUSED: Final = 5
OTHER_PRODUCER: Final = 6
FILESYSTEM: Final = 7
WORKER_FAILED: Final = 8
UNEXPECTED: Final = 70
"""EX_SOFTWARE of sysexits.h."""
OUT_OF_MEMORY: Final = 71
"""EX_OSERR of sysexits.h."""
INTERRUPTED: Final = 130
"""128 + SIGINT, as shells have it."""

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
    (
        STREAM_REFUSED,
        "stream does not fit, is damaged, or ended without new rows",
        "use another --out",
    ),
    (OTHER_PRODUCER, "another producer has the stream", "stop one of the two"),
    (FILESYSTEM, "filesystem or store failed: full, read-only, no permission", "make room, run again"),
    (WORKER_FAILED, "a worker process has died: out of memory, or killed", "run again with fewer --workers"),
    (UNEXPECTED, "unexpected error", "run again with --debug, report it"),
    (OUT_OF_MEMORY, "not enough memory; no row was skipped for it", "raise the limit, run again"),
    (INTERRUPTED, "interrupted (SIGINT, Ctrl-C)", "run the same command again to go on"),
)
"""Each code with what it means and what to do. `lazyshard_producer.cli` and docs/producer.md repeat it."""

_CODES: Final[tuple[tuple[type[Exception], int], ...]] = (
    (ExtraMissing, NO_EXTRA),
    (SettingInvalid, USAGE),
    (RowInvalid, BAD_ROW),
    (SourceRefused, SOURCE_REFUSED),
    (ProducerLocked, OTHER_PRODUCER),
    (ProducerFenced, OTHER_PRODUCER),
    (WriterFailed, FILESYSTEM),
    (FileUnreadable, FILESYSTEM),
    (StreamMissing, FILESYSTEM),
    (StoreRefused, FILESYSTEM),
    (StoreUnavailable, FILESYSTEM),
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
