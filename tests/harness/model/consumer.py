"""The consumer of the model: a training run that reads in order, saves checkpoints, and commits after each.

Checkpoints are the trainer's own affair: one is saved in one step and stays. The cursor is written as by
`lazyshard.storage.cursor`, held by `test_model_code.py`. As in ms-swift it is also written at each start, and never
passes the oldest checkpoint that is kept.
"""

from __future__ import annotations

from typing import Final

from tests.harness.model.disk import Content, Disk, Step
from tests.harness.model.stream import CURSOR, CURSORS, STREAM, Broken, Plan, Seen, data_path, seal_path, told

_TOKENS: Final = "abcdefgh"

Kept = tuple[int, ...]
"""Chunks that were trained at each kept checkpoint, in order. From 0 a run can always start, as long as it is kept."""


class Consumer:
    """What a consumer does. Steps besides calls that change files: resume, commit, read, checkpoint, committed.

    Args:
        plan: how it consumes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def resuming(self, kept: Kept, seen: Seen) -> list[list[Step]]:
        """Returns what comes after a start: from any checkpoint that is kept. Nothing as long as there is no stream."""
        if told(seen) is None:
            return []
        return [[("commit", kept[0]), ("read", position)] for position in kept]

    def reading(self, position: int, kept: Kept, seen: Seen) -> list[Step] | None:
        """Returns what comes after a look for the next chunk; None: it is to be waited for.

        Raises:
            Broken: it dies.
        """
        found = told(seen)
        if found is None:
            return None
        chunks, ended = found
        if position < chunks:
            if not is_readable(seen, position):
                raise Broken(f"chunk {position}, of which it was told, cannot be read")
            return self.trained(position + 1, kept)
        return [] if ended else None

    def trained(self, position: int, kept: Kept) -> list[Step]:
        """Returns what comes after a chunk was trained."""
        return [("checkpoint", position), *self.committing(self.keep(kept, position)), ("read", position)]

    def keep(self, kept: Kept, position: int) -> Kept:
        """Returns the checkpoints that are kept once another one is saved; later ones are those of another course."""
        return (*(one for one in kept if one < position), position)[-self.plan.keeps :]

    def committing(self, kept: Kept) -> list[Step]:
        """Returns how it tells of its checkpoints."""
        return [("commit", kept[0])]

    def writing(self, done: int, disk: Disk, seen: Seen) -> list[Step]:
        """Writes the cursor, as `write_cursor` does."""
        names = set(disk.all_names())
        temporary = next(path for path in (f"{CURSORS}/.run.{one}" for one in _TOKENS) if path not in names)
        return [*self.making_folder(seen), *self.replacing(("cursor", done), temporary), ("committed", done)]

    def making_folder(self, seen: Seen) -> list[Step]:
        """Makes the folder of the cursors, and its name durable, whoever has made it."""
        steps: list[Step] = [] if CURSORS in seen else [("mkdir", CURSORS)]
        return [*steps, ("sync_directory", STREAM)]

    def replacing(self, value: Content, temporary: str) -> list[Step]:
        """Replaces the cursor."""
        return [
            ("create", temporary),
            ("write", temporary, value),
            ("sync", temporary),
            ("rename", temporary, CURSOR),
            ("sync_directory", CURSORS),
        ]


def is_readable(seen: Seen, chunk: int) -> bool:
    """Whether a chunk can be read, and holds what it should."""
    return seen.get(seal_path(chunk), ())[:3] == ("seal", chunk, chunk + 1) and seen.get(data_path(chunk)) == (
        "rows",
        chunk,
    )
