"""What is kept at a checkpoint: the position inside it, and the stream's cursor once it is durable.

A position's file in the folder of a checkpoint is written whole or not at all. One process owns the cursor of a run,
from the start of the run to its end: the lock that keeps a second run of the same name out is held as long as the
process lives, and ends with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from lazyshard.errors import CursorTaken
from lazyshard.format.cursor import Cursor
from lazyshard.store.durable import publish_bytes, remove, sync_directory
from lazyshard.store.files import read_given_file
from lazyshard.stream import CursorOwner
from lazyshard_swift import parallel
from lazyshard_swift.errors import PositionInvalid, ResumeRefused
from lazyshard_swift.parallel import caution
from lazyshard_swift.position import Position, parse
from lazyshard_swift.run_plan import RunPlan
from lazyshard_swift.settings import version_folders

NAME: Final = "lazyshard.json"

TRACKER: Final = "latest_checkpointed_iteration.txt"
"""Megatron's last file of a checkpoint, but with --async_save."""

_TRAINER: Final = "trainer_state.json"
"""The Hugging Face trainer's last file of a checkpoint."""

_METADATA: Final = ("metadata.json", ".metadata")
"""What Megatron writes into ``iter_N`` behind the parts of all ranks."""

_held: dict[tuple[str, str], CursorOwner] = {}


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
            save_position(position, folder)
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
                put_cursor(directory, cursor, take_over=self._plan.take_over)
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


def load_position(checkpoint: str | os.PathLike[str]) -> Position | None:
    """Reads the position in a checkpoint's folder; None if there is none.

    Raises:
        PositionInvalid: it is there and cannot be read.
        OSError: the filesystem failed.
    """
    file = Path(checkpoint) / NAME
    try:
        data = read_given_file(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse(data, str(file))


def save_position(position: Position, checkpoint: str | os.PathLike[str]) -> None:
    """Writes a position into a checkpoint's folder, which is made if need be, whole or not at all.

    Raises:
        OSError: the filesystem refused.
    """
    folder = Path(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{NAME}.{secrets.token_hex(8)}"
    try:
        publish_bytes(position.to_bytes(), folder / NAME, temporary)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise


def is_whole(checkpoint: str | os.PathLike[str]) -> bool:
    """Returns whether the trainer has finished saving a checkpoint: what it writes last is there."""
    folder = Path(checkpoint)
    if not (folder / TRACKER).exists():
        return (folder / _TRAINER).exists()
    parts = {file.parent for file in folder.glob("iter_*/*.distcp")}
    return all(any((part / name).exists() for name in _METADATA) for part in parts)


def unmark(checkpoint: str | os.PathLike[str]) -> None:
    """Has a checkpoint that is about to be saved over count as torn until it is saved whole again."""
    folder = Path(checkpoint)
    for file in (
        folder / TRACKER,
        folder / _TRAINER,
        *(found for name in _METADATA for found in folder.glob(f"iter_*/{name}")),
    ):
        file.unlink(missing_ok=True)


def check_whole(checkpoint: str, option: str) -> None:
    """Refuses a checkpoint of a stream whose save was interrupted, which a trainer may take for a new start.

    Args:
        checkpoint: its folder.
        option: by which it was given, without dashes.

    Raises:
        ResumeRefused: naming the newest one of the run that is whole.
        PositionInvalid: its position cannot be read.
    """
    torn = load_position(checkpoint)
    if torn is None or is_whole(checkpoint):
        return
    output_dir = Path(checkpoint).resolve().parent
    saved = [
        (position.saved_at, str(file.parent))
        for folder in (output_dir, *version_folders(output_dir))
        for file in folder.glob(f"checkpoint-*/{NAME}")
        if is_whole(file.parent)
        and (position := load_if_there(file.parent)) is not None
        and position.consumer == torn.consumer
    ]
    newest = max(saved)[1] if saved else None
    way_out = (
        f"The newest whole one of this run is {newest}: give --{option} {newest}"
        if newest is not None
        else f"No other one of this run is whole: start anew, without --{option}"
    )
    raise ResumeRefused(
        f"{checkpoint}: its save was interrupted, so it is no checkpoint to go on from: {NAME} is there, what the "
        f"trainer writes last is not. {way_out}",
        checkpoint=checkpoint,
        expected=newest,
    )


def load_if_there(checkpoint: str | os.PathLike[str]) -> Position | None:
    """Reads the position in a checkpoint's folder; None if there is none or it cannot be read."""
    try:
        return load_position(checkpoint)
    except (PositionInvalid, OSError):
        return None


def saved_in(*output_dirs: Path) -> list[Position]:
    """Returns the positions of all checkpoints in these folders, those that cannot be read left out."""
    found = (load_if_there(file.parent) for folder in output_dirs for file in folder.glob(f"checkpoint-*/{NAME}"))
    return [position for position in found if position is not None]


def put_cursor(directory: str, cursor: Cursor, *, take_over: bool = False) -> None:
    """Writes a cursor durably; the first time for this process, the run begins to own it.

    Args:
        directory: the stream's directory.
        cursor: what to write.
        take_over: go on although another run on this machine has the cursor.

    Raises:
        CursorTaken: another run has it, or has taken it over. Nothing was written.
        VersionUnsupported: the cursor that is there is of a later format.
        OSError: the filesystem refused; may be called again.
    """
    key = (directory, cursor.consumer)
    owner = _held.get(key)
    if owner is None:
        owner = _held[key] = CursorOwner(directory, cursor.consumer, take_over=take_over)
    owner.put(cursor)


def let_go_of_cursors() -> None:
    """Lets other runs in."""
    while _held:
        _held.popitem()[1].close()
