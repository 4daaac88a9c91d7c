"""A position's file in the folder of a checkpoint: written whole or not at all, and found again."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from lazyshard.storage.durable import publish_bytes, remove
from lazyshard.storage.files import read_given_file
from lazyshard_swift.errors import PositionInvalid, ResumeRefused
from lazyshard_swift.position import Position, parse
from lazyshard_swift.settings import version_folders

NAME: Final = "lazyshard.json"

TRACKER: Final = "latest_checkpointed_iteration.txt"
"""Megatron's last file of a checkpoint, but with --async_save."""

_TRAINER: Final = "trainer_state.json"
"""The Hugging Face trainer's last file of a checkpoint."""

_METADATA: Final = ("metadata.json", ".metadata")
"""What Megatron writes into ``iter_N`` behind the parts of all ranks."""


def load(checkpoint: str | os.PathLike[str]) -> Position | None:
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


def save(position: Position, checkpoint: str | os.PathLike[str]) -> None:
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
    torn = load(checkpoint)
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
        return load(checkpoint)
    except (PositionInvalid, OSError):
        return None


def saved_in(*output_dirs: Path) -> list[Position]:
    """Returns the positions of all checkpoints in these folders, those that cannot be read left out."""
    found = (load_if_there(file.parent) for folder in output_dirs for file in folder.glob(f"checkpoint-*/{NAME}"))
    return [position for position in found if position is not None]
