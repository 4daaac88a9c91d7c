"""Commits: the cursor that a run leaves in its stream, so that the producer deletes nothing which it may need again."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lazyshard.data.state_checks import standing
from lazyshard.errors import CursorTaken, CursorUnwritable, LazyShardError
from lazyshard.format import Cursor
from lazyshard.format.blend_share import BlendShare
from lazyshard.format.cursor import CURSORS
from lazyshard.format.state import RunState
from lazyshard.stream import CursorOwner
from lazyshard.stream.run_state import course_of

__all__ = ["Commits", "chunks_done"]


class Commits:
    """The commits of one process. It owns the consumer's cursor from the first one on, until it ends.

    Args:
        directory: the stream's directory.
        consumer: the consumer's name.

    Attributes:
        blend: how the stream is blended with others at the next commit; empty where it is not.
    """

    def __init__(self, directory: Path, consumer: str) -> None:
        self._directory = directory
        self._consumer = consumer
        self._owner: CursorOwner | None = None
        self.blend: tuple[BlendShare, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the cursor to the process that owns it."""
        return self.__dict__ | {"_owner": None}

    @property
    def begun(self) -> bool:
        """Whether this process has written the cursor."""
        return self._owner is not None and self._owner.begun

    def write(self, state: RunState, chunks_before: int, *, take_over: bool) -> None:
        """Writes the cursor durably.

        Raises:
            CursorTaken: another run of the same name writes it.
            CursorUnwritable: the filesystem refused.
            FileRefused, StoreRefused, StoreUnavailable: as they say.
            VersionUnsupported: the cursor that is there is of a later format.
            RuntimeError: this is a fork of the process that owns the cursor.
        """
        current = state.parts[-1]
        cursor = Cursor(
            consumer=self._consumer,
            stream_id=state.stream_id,
            consumed=state.consumed,
            chunks_before=chunks_before,
            plan={
                "dp_size": current.dp,
                "batch_size": current.batch_size,
                "unit": state.unit,
                "window": state.window,
                "seed": state.seed,
            },
            updated_at=time.time(),
            state=state,
            blend=self.blend,
        )
        try:
            if self._owner is None:
                self._owner = self._begin(take_over)
            self._owner.put(cursor)
        except LazyShardError:
            raise
        except OSError as error:
            raise self._unwritable(error) from error

    def _begin(self, take_over: bool) -> CursorOwner:
        try:
            return CursorOwner(self._directory, self._consumer, take_over=take_over)
        except CursorTaken as error:
            error.args = (f"{error}: `commit(..., take_over=True)`",)
            raise

    def _unwritable(self, error: OSError) -> CursorUnwritable:
        uid = os.geteuid()
        allowed = error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS)
        remedy = "Mend that" if allowed else f"Let uid {uid} write to {self._directory / CURSORS}"
        told = CursorUnwritable(
            f"{self._directory}: the cursor of {self._consumer!r} cannot be written ({error.strerror or error}). "
            f"The checkpoint is not touched; the producer goes by the cursor before this one, and without any it does "
            f"not know of this run. {remedy}, and commit again",
            directory=str(self._directory),
            consumer=self._consumer,
            uid=uid,
        )
        # As whoever expects an OSError asks for it: whether the disk is full, for instance.
        told.errno = error.errno
        return told


def chunks_done(states: Iterable[RunState], total: int | None) -> int:
    """Returns N such that none of these states needs a chunk of the half-open range [0, N) again, in its epoch.

    Args:
        states: at least one. Where they stand in several epochs, one of them has another epoch before it, and N is 0.
        total: the end of the stream, None while it is not known.
    """
    epochs, done, size = set(), [], 1
    for state in states:
        course, position = standing(course_of(state), total)
        epochs.add(course.epoch(total))
        done.append(course.done_before(position, total))
        size = state.samples_per_chunk
    return min(done) // size if len(epochs) == 1 else 0
