"""The exit codes of the command, and the code of each error. The table for users is in `lazyshard.cli.main`."""

from __future__ import annotations

from typing import Final

from lazyshard import errors
from lazyshard.memory import is_short

# 4: `verify-filesystem` could not run its tests; the producer's 4 is a failed source.
DONE, NO_EXTRA, USAGE, REFUSED, UNTRIED, STREAM_DAMAGED = range(6)
# A check of `doctor` failed; `verify-filesystem`: the filesystem works with limits.
MISSING = LIMITED = 1
# 9: `audit` found no problem, but cannot check the states' count of samples; the producer uses 8.
FILESYSTEM, NOT_PROVEN = 7, 9
# EX_SOFTWARE and EX_OSERR of sysexits.h; 128 + SIGINT, as in shells.
UNEXPECTED, OUT_OF_MEMORY, INTERRUPTED = 70, 71, 130

_CODES: Final[tuple[tuple[tuple[type[Exception], ...], int], ...]] = (
    ((errors.RowInvalid, errors.StreamInvalid, errors.ConfigInvalid), REFUSED),
    ((errors.AccessRefused, errors.StoreUnavailable), FILESYSTEM),
    ((errors.LazyShardError,), STREAM_DAMAGED),
    ((OSError,), FILESYSTEM),
)
"""The first match counts, as many of lazyshard's errors are OSErrors as well."""


def exit_code(error: BaseException) -> int:
    """Returns the exit code for an error that ends the command."""
    if is_short(error):
        return OUT_OF_MEMORY
    # lazyshard raises ImportError with what to install; Python itself raises its subclass ModuleNotFoundError.
    if type(error) is ImportError:
        return NO_EXTRA
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), UNEXPECTED)
