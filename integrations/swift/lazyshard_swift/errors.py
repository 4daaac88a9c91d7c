"""Errors of the integration, and how a rank that cannot continue exits: with one message, no traceback, and a code.

`torchrun` prints the codes (``exitcode  : 75``) and itself exits with 1; without it, `swift sft` exits with the code:

    2   the arguments or the checkpoint do not fit the stream, another run has the cursor, or the object store refuses
    5   the stream is damaged, or too many of its rows are bad
    75  data did not arrive in time; the same command can be retried (EX_TEMPFAIL of sysexits.h)
    130 Ctrl-C
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from lazyshard import errors as library

REFUSED: Final = 2
DAMAGED: Final = 5
TIMED_OUT: Final = 75
INTERRUPTED: Final = 130

# Ranks that wait for the same chunk give up within moments of each other. `torchrun` ends the others as soon as one has
# exited, so each stays this long to let the others exit on their own.
_LINGER_S: Final = 3.0
_FINISH_S: Final = 10.0  # Time for the interpreter to shut down (exit handlers, communicators) before it is killed


class SettingsRefused(library.LazyShardError, ValueError):
    """Arguments that cannot work together with ``--sharded_lazy true``."""

    argument: str | None = None


def refused(argument: str, why: str) -> SettingsRefused:
    """Returns the error for an argument, given without dashes, with which the message begins."""
    return SettingsRefused(f"--{argument} {why}", argument=argument)


class PositionInvalid(library.FormatInvalid):
    """The position saved with a checkpoint cannot be read."""


class ResumeRefused(library.LazyShardError, ValueError):
    """A checkpoint that cannot be resumed from with these data and settings."""

    checkpoint: str | None = None


def not_resumed(checkpoint: str | None, why: str, expected: object = None, actual: object = None) -> ResumeRefused:
    """Returns the error for a checkpoint."""
    there, here = (None if value is None else str(value) for value in (expected, actual))
    return ResumeRefused(f"{checkpoint}: {why}", checkpoint=checkpoint, expected=there, actual=here)


class StreamTooShort(library.LazyShardError, ValueError):
    """The stream has ended with fewer samples than one step needs."""


def too_short(directory: str, samples: int, why: str) -> StreamTooShort:
    """Returns the error for a stream, or for several in a blend."""
    return StreamTooShort(f"{directory}: {why}", directory=directory, samples=samples)


_OF_ARGUMENTS: Final = (SettingsRefused, StreamTooShort, library.ConfigInvalid, library.StreamMismatch)
_OF_STATES: Final = (ResumeRefused, PositionInvalid, library.StateInvalid, library.StateMismatch)
_OF_STREAMS: Final = (library.ChunkRetired, library.CursorTaken, library.AccessRefused)


def each_of(ranks: int) -> str:
    """Returns the ranks in words, for messages."""
    return "the only data-parallel rank" if ranks == 1 else f"each of {ranks} data-parallel ranks"


@functools.cache
def install_exits() -> None:
    """Sets up how this process exits, once."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (code := _say(error)) is None:
            previous(kind, error, trace)
        else:
            _leave(code)

    sys.excepthook = hook
    # The kernel ends this rank if `torchrun` is killed; otherwise it would continue alone, or hang.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def end_within(seconds: float, error: BaseException) -> threading.Timer:
    """Ends this process as by an error of lazyshard, unless the returned timer is cancelled in time."""
    return _after(seconds, lambda: _cut_off(_say(error) or TIMED_OUT))


def _after(seconds: float, act: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


def code_of(error: BaseException) -> int | None:
    """Returns the exit code for an error of lazyshard, or for one raised while such an error was handled; else None."""
    ours = _ours(error)
    if ours is None:
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else None
    if isinstance(ours, (library.StoreUnavailable, library.WaitTimeout)):
        return TIMED_OUT
    return REFUSED if isinstance(ours, _OF_ARGUMENTS + _OF_STATES + _OF_STREAMS) else DAMAGED


def _ours(error: BaseException) -> library.LazyShardError | None:
    """Returns the last error of lazyshard among this one and its causes: ms-swift's clean-up may fail after it."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen and not isinstance(link, library.LazyShardError):
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return link if isinstance(link, library.LazyShardError) else None


def _say(error: BaseException) -> int | None:
    code, ours, line = code_of(error), _ours(error), "interrupted"
    if code is None:
        return None
    if ours is not None:
        text, name = str(ours).strip(), f"\n{type(ours).__module__}.{type(ours).__qualname__}: "
        if text.startswith("Caught ") and name in text:
            # An error from a DataLoader worker is a traceback that ends with it.
            text = text.partition(name)[2]
        # The library's message names its own argument.
        line = "error: " + text.replace("wait longer with max_wait", "wait longer with --sharded_lazy_max_wait")
    who = f"lazyshard: rank {os.environ['RANK']}" if "RANK" in os.environ else "lazyshard"
    # torch.distributed replaces sys.stderr by a buffer while it calls us, and loses it when we exit.
    print(f"\n{who}: {line} (exit code {code})", file=sys.__stderr__, flush=True)
    return code


def _leave(code: int) -> None:
    """Ends the process, in an orderly way if that is possible in time."""
    # torchrun sends SIGTERM to the other ranks once the first one has exited, but they exit on their own.
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _kill_children()
    if code == TIMED_OUT and int(os.environ.get("WORLD_SIZE") or 1) > 1:
        time.sleep(_LINGER_S)
    _after(_FINISH_S, functools.partial(_cut_off, code))
    raise SystemExit(code)


def _kill_children() -> None:
    """Kills the DataLoader workers, which may be waiting for data; torch would give each of them 5 s."""
    with contextlib.suppress(ValueError):
        # Torch raises an error if a worker dies unexpectedly.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()


def _cut_off(code: int) -> None:
    _kill_children()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
