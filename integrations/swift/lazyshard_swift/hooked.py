"""What was extended in this process and what failed, and the one warning about it.

ms-swift goes on unharmed whatever fails here: an extension that raises has undone its own changes, and what it raised
is kept with the record. Whoever depends on an extension asks `failures` and says so in its own words.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Final

from lazyshard_swift import points, versions

WARNED: Final = "LAZYSHARD_SWIFT_WARNED"
"""Environment variable that is set once the warning was given, for the processes that are started from here on."""

REFUSING: Final = ("lazyshard_swift.launcher", "lazyshard_swift.arguments")
"""Extensions that refuse the flag where ms-swift is too old for it; nothing else of such an ms-swift is touched."""

_RANKS: Final = ("RANK", "NODE_RANK", "GROUP_RANK")
"""Environment variables that are 0 or unset in the one process that warns. RANK alone would not do: it is unset in the
launcher of every machine."""


@dataclass(frozen=True)
class Outcome:
    """What became of one module of ms-swift.

    Attributes:
        module: its name.
        extension: the name of the module that extends it.
        ok: whether it was extended, or needs not be.
        reason: the error where it was not, "" otherwise.
    """

    module: str
    extension: str
    ok: bool
    reason: str = ""


_outcomes: Final[dict[str, Outcome]] = {}
_lock: Final = threading.Lock()


def outcomes() -> tuple[Outcome, ...]:
    """Returns what became of the modules that were imported so far, of each the last time."""
    return tuple(_outcomes.values())


def failures() -> tuple[Outcome, ...]:
    """Returns those of `outcomes` that were not extended."""
    return tuple(outcome for outcome in outcomes() if not outcome.ok)


def extend(module: ModuleType, extension: str) -> None:
    """Calls the extension's `extend(module)`, records how it went, and warns if need be; raises nothing.

    An ms-swift that is too old is told so by the extensions that refuse the flag, and goes on in silence without it.

    Args:
        module: the module of ms-swift, whose code has just run.
        extension: the name of the module that extends it.
    """
    too_old = versions.is_too_old(_installed())
    if too_old and extension not in REFUSING:
        return
    try:
        importlib.import_module(extension).extend(module)
        outcome = Outcome(module.__name__, extension, True)
    except Exception as error:
        outcome = Outcome(module.__name__, extension, False, _reason(error, module))
    _outcomes[module.__name__] = outcome
    if not outcome.ok or not (too_old or versions.is_supported(_installed() or "")):
        warn_once()


def warn_once() -> None:
    """Says which ms-swift is installed, which are supported and what could not be hooked: once in the whole job.

    That is: in the process whose rank is 0 or not set, and in none of those that it starts.
    """
    with _lock:
        if os.environ.get(WARNED) or any(os.environ.get(name) not in (None, "", "0") for name in _RANKS):
            return
        os.environ[WARNED] = "1"
    logger = logging.getLogger("lazyshard")
    if logger.hasHandlers():
        logger.warning("%s", _warning())
    else:
        # Whether or not anybody listens.
        with contextlib.suppress(OSError, ValueError):
            print(f"lazyshard: warning: {_warning()}", file=sys.stderr, flush=True)


def _reason(error: Exception, module: ModuleType) -> str:
    if isinstance(error, AttributeError) and error.obj is module:
        # Python would say that it is partially initialized, most likely due to a circular import.
        return f"AttributeError: it has no {error.name}"
    return f"{type(error).__name__}: {error}"


@functools.cache
def _installed() -> str | None:
    return versions.installed()


def _warning() -> str:
    """Returns the text, on one line."""
    version = versions.installed() or "of an unknown version"
    missing = [*_missing(), *(f"{failed.module} ({failed.extension}: {failed.reason})" for failed in failures())]
    text = (
        f"ms-swift {version} is installed, lazyshard is made for {versions.SUPPORTED}. "
        + (f"Could not be hooked: {'; '.join(missing)}. " if missing else "All hook points are there. ")
        + "Runs without --sharded_lazy are not affected. `lazyshard doctor swift` shows the details."
    )
    return " ".join(text.split())


def _missing() -> list[str]:
    folder = versions.folder()
    if folder is None:
        return []
    found = points.check(points.POINTS, folder)
    return [f"{checked.point.title} ({checked.problem})" for checked in found if checked.problem is not None]
