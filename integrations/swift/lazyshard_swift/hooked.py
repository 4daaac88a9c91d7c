"""What was extended in this process and what failed, the one warning about it, and how functions are wrapped.

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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, TypeAlias

from lazyshard_swift import ms_swift

WARNED: Final = "LAZYSHARD_SWIFT_WARNED"
"""Environment variable that is set once the warning was given, for the processes that are started from here on."""

LAUNCHER: Final = "swift.cli.main"
"""The module of the commands `swift` and `megatron`."""

_RANKS: Final = ("RANK", "NODE_RANK", "GROUP_RANK")
"""Environment variables that are 0 or unset in the one process that warns. RANK alone would not do: it is unset in the
launcher of every machine."""


@dataclass(frozen=True)
class ModuleOutcome:
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


_outcomes: Final[dict[str, ModuleOutcome]] = {}
_lock: Final = threading.Lock()


def outcomes() -> tuple[ModuleOutcome, ...]:
    """Returns what became of the modules that were imported so far, of each the last time."""
    return tuple(_outcomes.values())


def failures() -> tuple[ModuleOutcome, ...]:
    """Returns those of `outcomes` that were not extended."""
    return tuple(outcome for outcome in outcomes() if not outcome.ok)


def extend(module: ModuleType, extension: str) -> None:
    """Calls the extension's `extend(module)`, records how it went, and warns if need be; raises nothing.

    Of an ms-swift that is too old only the launcher is extended, which refuses the flag; without it a run goes on in
    silence.

    Args:
        module: the module of ms-swift, whose code has just run.
        extension: the name of the module that extends it.
    """
    too_old = ms_swift.is_too_old(_installed())
    if too_old and module.__name__ != LAUNCHER:
        return
    try:
        importlib.import_module(extension).extend(module)
        outcome = ModuleOutcome(module.__name__, extension, True)
    except Exception as error:
        outcome = ModuleOutcome(module.__name__, extension, False, _reason(error, module))
    _outcomes[module.__name__] = outcome
    if not outcome.ok or not (too_old or ms_swift.is_supported(_installed() or "")):
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
    return ms_swift.version()


def _warning() -> str:
    """Returns the text, on one line."""
    version = ms_swift.version() or "of an unknown version"
    missing = [*_missing(), *(f"{failed.module} ({failed.extension}: {failed.reason})" for failed in failures())]
    text = (
        f"ms-swift {version} is installed, lazyshard is made for {ms_swift.SUPPORTED}. "
        + (f"Could not be hooked: {'; '.join(missing)}. " if missing else "All hook points are there. ")
        + "Runs without --sharded_lazy are not affected. `lazyshard doctor swift` shows the details."
    )
    return " ".join(text.split())


def _missing() -> list[str]:
    folder = ms_swift.folder()
    if folder is None:
        return []
    found = ms_swift.check_points(ms_swift.POINTS, folder)
    return [f"{checked.point.title} ({checked.problem})" for checked in found if checked.problem is not None]


Maker: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes ms-swift's function and returns what stands in its place."""


def within(context: Callable[[Any], AbstractContextManager[None]]) -> Maker:
    """Returns the maker of a method that runs ms-swift's own within a context of its object."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(self: Any, *rest: Any, **options: Any) -> Any:
            with context(self):
                return original(self, *rest, **options)

        return replacement

    return make


def wrap(owner: Any, makers: Mapping[str, Maker]) -> None:
    """Replaces functions of a class or a module.

    Raises:
        AttributeError: one of them is not there; nothing was replaced.
    """
    missing = [name for name in makers if not callable(vars(owner).get(name))]
    if missing:
        raise AttributeError(f"{owner.__name__} has no {', no '.join(missing)}")
    originals = {name: vars(owner)[name] for name in makers}
    made = {name: functools.wraps(originals[name])(make(originals[name])) for name, make in makers.items()}
    for name, replacement in made.items():
        setattr(owner, name, replacement)
