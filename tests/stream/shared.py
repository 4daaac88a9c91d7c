"""Streams of several writers whose chunks have a fixed order: pieces are written first, and then sequenced."""

import json
import time
from pathlib import Path
from unittest import mock

from lazyshard import ChunkWriter
from lazyshard.stream.sequencer import Sequencer
from lazyshard.stream.share import Share
from lazyshard.stream.writer import open_sequenced

SIZE = 4


def write_pieces(
    directory: Path,
    name: str,
    rows: int,
    writers: int | None = None,
    *,
    first: int = 0,
    end: bool = True,
    text: str = "",
) -> None:
    """A writer publishes rows [first, rows) as pieces of 4; each row is a line of NAME.jsonl beside the stream."""
    source = directory.parent / f"{name}.jsonl"
    lines = [f'{{"id": "{text or f"{name}-{number}"}"}}\n'.encode() for number in range(rows)]
    source.write_bytes(b"".join(lines))
    with mock.patch.multiple(Share, begin=mock.DEFAULT, finish=mock.DEFAULT, make_room=mock.DEFAULT):
        writer = ChunkWriter(directory, SIZE, writer=name, writers=writers)
        for number in range(first, rows):
            entry = {"path": str(source), "kind": "jsonl", "offset": sum(map(len, lines[: number + 1]))}
            position = {"sources": [{**entry, "line": number + 1}], "rows": number + 1, "refused": 0, "skip": 0}
            writer.write(lines[number], source=position)
        writer.close(end)


def sequence(directory: Path) -> None:
    """A sequencer gives all pieces that are there their numbers."""
    writer = open_sequenced(directory, time.time, False, None)
    sequencer = Sequencer(writer, None, 0)
    while not sequencer.ended and sequencer.turn():
        pass
    sequencer.close()


def owners(directory: Path) -> list[list[str]]:
    """The ids of the rows of each chunk."""
    chunks = sorted(directory.glob("chunk_*.jsonl"))
    return [[json.loads(line)["id"] for line in chunk.read_bytes().splitlines()] for chunk in chunks]
