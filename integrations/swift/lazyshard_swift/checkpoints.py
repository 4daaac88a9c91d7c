"""What is kept at a checkpoint: the position inside it, and the stream's cursor once it is durable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lazyshard.errors import CursorTaken
from lazyshard.storage.durable import sync_directory
from lazyshard_swift import cursors, parallel
from lazyshard_swift.parallel import caution
from lazyshard_swift.position import Position
from lazyshard_swift.position_files import load_if_there, save, saved_in, unmark
from lazyshard_swift.run_plan import RunPlan
from lazyshard_swift.settings import version_folders


class _Pending(NamedTuple):
    folder: Path
    position: Position


class Checkpoints:
    """Keeps positions and the cursor of a run. Only global rank 0 writes.

    The cursor tells the producer which chunks nobody needs any more, so it never runs ahead of the oldest checkpoint
    of the run that is still there.

    Args:
        plan: what was decided for the run.
        output_dir: the folder of its checkpoints.
    """

    def __init__(self, plan: RunPlan, output_dir: str) -> None:
        self._plan = plan
        self._output_dir = Path(output_dir)
        self._pending: list[_Pending] = []
        self.last_step = -1
        self._fenced = False

    def register(self) -> None:
        """Puts the cursor where this run starts, so that from then on the producer keeps what the run needs.

        Before anything is read: chunks are kept only for consumers that the producer knows. The cursor may go back, if
        a run starts anew or from an older checkpoint. One that cannot be written is told and not raised. A collective:
        every rank calls it.

        Raises:
            CursorTaken: another run of this name is there. On all ranks.
        """
        saved, taken = self._plan.saved, None
        if parallel.is_first():
            consumed, step = (0, 0) if saved is None else (saved.consumed, saved.step)
            try:
                self._write(self._plan.position(consumed, step))
            except CursorTaken as error:
                taken = _with_way_out(error)
        taken = parallel.agree(taken)
        if taken is not None:
            raise CursorTaken(taken, directory=self._plan.directory, consumer=self._plan.consumer)

    def is_due(self, step: int) -> bool:
        """Returns whether this start has trained steps, up to this one, that no checkpoint of it holds."""
        begun = 0 if self._plan.saved is None else self._plan.saved.step
        return step not in (begun, self.last_step)

    def begin(self, folder: str, consumed: int, step: int) -> None:
        """Writes the position into the folder of a checkpoint that is about to be saved.

        If an earlier start has saved one there, it counts as torn until it is saved anew.
        """
        self.last_step = step
        if parallel.is_first():
            position = self._plan.position(consumed, step)
            unmark(folder)
            save(position, folder)
            self._pending.append(_Pending(Path(folder), position))

    def commit(self, unfinished: int = 0) -> None:
        """Moves the cursor to the newest checkpoint that is whole.

        A cursor that cannot be written is told and not raised: training and checkpoints do not depend on it.

        Args:
            unfinished: how many of those begun last are still being saved.
        """
        whole = len(self._pending) - unfinished
        if whole <= 0:
            return
        folder, position = self._pending[whole - 1]
        del self._pending[:whole]
        try:
            self._write(position, folder)
        except CursorTaken as error:
            if not self._fenced:
                self._fenced = True
                caution(str(error))

    @property
    def pending(self) -> bool:
        """Whether a checkpoint was begun whose cursor is not committed."""
        return bool(self._pending)

    def _write(self, position: Position, folder: Path | None = None) -> None:
        try:
            if folder is not None:
                _make_durable(folder)
            for directory, cursor in self._plan.cursors(position, self._standing(position)):
                cursors.put(directory, cursor, take_over=self._plan.take_over)
        except OSError as error:
            caution(
                f"the cursor could not be written ({error}); the producer goes by the one before: it keeps chunks that "
                f"are done with, or if there is none it does not know of this run"
            )

    def _standing(self, newest: Position) -> list[Position]:
        """Returns the positions of other checkpoints of this run, from which it may be gone on with."""
        plan, known = self._plan, saved_in(*self._folders())
        # Wherever it lies: if this run is lost before its first checkpoint, that one is resumed from again.
        begun = None if plan.checkpoint is None else load_if_there(plan.checkpoint)
        if begun is not None:
            known.append(begun)
        return [other for other in known if other.stream == newest.stream]

    def _folders(self) -> list[Path]:
        """Returns the folders with checkpoints of this run: ms-swift makes a new one at each start."""
        return [self._output_dir, *version_folders(self._output_dir)]


def _with_way_out(error: CursorTaken) -> str:
    return (
        f"{error} (--sharded_lazy_consumer NAME gives it another name, --sharded_lazy_take_over true takes the cursor "
        f"over)"
    )


def _make_durable(folder: Path) -> None:
    """Waits until what a checkpoint's folder holds is on the device, as far as this machine wrote it."""
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sync_directory(folder)
    sync_directory(folder.parent)


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield path
