"""How many samples a run had trained when, by the checkpoints of folders that are named and by the stream's cursors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lazyshard.errors import LazyShardError
from lazyshard.inspection.report_course import At
from lazyshard.inspection.tracing_states import SavedState, checkpoint_files, read_state
from lazyshard.stream.consumers import Consumer

MOST_CHECKPOINTS: Final = 1000
"""Of a folder; of more, evenly spaced ones are read."""

CHECKPOINTS: Final = "checkpoints"
"""What a run is called whose checkpoints do not tell."""


def trained_points(
    directory: Path, stream_id: str | None, consumers: Sequence[Consumer], folders: Sequence[Path], unread: list[str]
) -> dict[str, list[At]]:
    """Returns how many samples were trained when, by consumer.

    Args:
        directory: the stream's directory.
        stream_id: of the stream, None where it has none: then nothing tells whether a checkpoint is of it.
        consumers: its consumers.
        folders: of runs, or of checkpoints.
        unread: takes what cannot be read, a sentence each.
    """
    cursors = {one.name: one.cursor for one in consumers if one.cursor is not None}
    found: dict[str, set[At]] = {name: set() for name in cursors}
    for folder in folders:
        for saved in _states(directory, folder, unread):
            other = saved.state.stream_id
            if None not in (other, stream_id) and other != stream_id:
                unread.append(f"{saved.file}: is of stream {other}, not of this one")
                continue
            found.setdefault(_name(saved, found), set()).add(At(saved.saved_at, saved.state.consumed))
    for name, cursor in cursors.items():
        # It follows its checkpoint, and is no other moment of training.
        if cursor.consumed not in {point.amount for point in found[name]}:
            found[name].add(At(cursor.updated_at, cursor.consumed))
    return {name: sorted(points) for name, points in found.items()}


def _name(saved: SavedState, known: dict[str, set[At]]) -> str:
    if saved.consumer is not None:
        return saved.consumer
    # Of a stream with one consumer the checkpoints can be of no other.
    return next(iter(known)) if len(known) == 1 else CHECKPOINTS


def _states(directory: Path, folder: Path, unread: list[str]) -> Iterator[SavedState]:
    try:
        files = checkpoint_files(folder)
    except OSError as error:
        unread.append(f"{folder}: {error.strerror or error}")
        return
    if not files:
        unread.append(f"{folder}: holds no checkpoint with a lazyshard.json")
    step = -(-len(files) // MOST_CHECKPOINTS) or 1
    for file in files[::-1][::step]:
        try:
            yield read_state(file, directory)
        except (LazyShardError, OSError) as error:
            unread.append(str(error))
