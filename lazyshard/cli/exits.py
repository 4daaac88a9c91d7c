"""The exit codes of the command, and which error leads to which. The table for users is in `lazyshard.cli.main`."""

from __future__ import annotations

from typing import Final

from lazyshard import errors
from lazyshard.memory import is_short

# 4: `verify-filesystem` could not try it; the producer's 4 is a source
DONE, NO_EXTRA, USAGE, REFUSED, UNTRIED, STREAM_DAMAGED = range(6)
# `doctor` found something that is not as it should be; `verify-filesystem`: it works with limits
MISSING = LIMITED = 1
# 9: `audit` found nothing, but cannot check what the states count; 8 is the producer's.
FILESYSTEM, NOT_PROVEN = 7, 9
# EX_SOFTWARE and EX_OSERR of sysexits.h; 128 + SIGINT, as shells have it.
UNEXPECTED, OUT_OF_MEMORY, INTERRUPTED = 70, 71, 130

_CODES: Final[tuple[tuple[tuple[type[Exception], ...], int], ...]] = (
    ((errors.RowInvalid, errors.StreamInvalid, errors.ConfigInvalid), REFUSED),
    ((errors.AccessRefused, errors.StoreUnavailable), FILESYSTEM),
    ((errors.LazyShardError,), STREAM_DAMAGED),
    ((OSError,), FILESYSTEM),
)
"""The first that fits counts: many of lazyshard's errors are OSErrors as well."""


def exit_code(error: BaseException) -> int:
    """Returns the exit code for an error that ends the command."""
    if is_short(error):
        return OUT_OF_MEMORY
    # Ours say what to install; what Python itself raises where there is no such module is a kind of it.
    if type(error) is ImportError:
        return NO_EXTRA
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), UNEXPECTED)
