"""How the rows of a chunk were dealt, as its seal tells."""

from __future__ import annotations

from pathlib import Path

from lazyshard.format import Seal
from lazyshard.format.dealt import DealtByCost
from lazyshard.format.names import seal_name
from lazyshard.store.files import read_file

__all__ = ["read_dealt"]


def read_dealt(directory: Path, chunk: int) -> DealtByCost | None:
    """Returns how the rows of a chunk were dealt by cost; None if they were not.

    Args:
        directory: of a stream of ours.
        chunk: one that is published and not deleted.

    Raises:
        SealInvalid, OSError: its seal cannot be read.
    """
    path = directory / seal_name(chunk)
    return DealtByCost.read(Seal.decode(read_file(path), chunk, str(path)).source)
