"""A position's file in the folder of a checkpoint: written whole or not at all, and found again."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from lazyshard.storage.durable import publish_bytes, remove
from lazyshard.storage.files import read_given_file
from lazyshard_swift.errors import PositionInvalid
from lazyshard_swift.position import Position, parse

NAME: Final = "lazyshard.json"


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
