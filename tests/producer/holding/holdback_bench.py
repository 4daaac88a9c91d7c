"""A stream in a folder, its producer's `Holdback` with clocks turned by hand, and what consumers leave there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lazyshard.format.cursor import Cursor, ReadingMark
from lazyshard.stream import ChunkWriter, write_cursor
from lazyshard.stream.consumers import write_reading
from lazyshard_producer.configuration.settings import Limits
from lazyshard_producer.holding.holdback import Holdback
from lazyshard_producer.holding.shelf import Shelf

SAMPLES_PER_CHUNK = 2


class Bench:
    """A stream, its producer and what consumers leave in it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.now = 0.0
        self.warnings: list[str] = []
        self.writer = ChunkWriter(out, SAMPLES_PER_CHUNK, clock=lambda: 1e9)
        self.holdback = self.limited()

    def limited(self, check: Callable[[], None] = lambda: None, **limits: Any) -> Holdback:
        self.holdback = Holdback(
            Limits(**limits),
            Shelf(self.out),
            SAMPLES_PER_CHUNK,
            check=check,
            warn=self.warnings.append,
            clock=lambda: self.now,
            wall_clock=lambda: 1e9 + self.now,
        )
        return self.holdback

    def ask(self, after_s: float = 1.0) -> Any:
        self.now += after_s
        return self.holdback.before_chunk(self.writer.published_chunks, self.writer.published_samples)

    def publish(self, chunks: int = 1, width: int = 100, after_s: float = 1.0) -> None:
        for _ in range(chunks):
            for _ in range(SAMPLES_PER_CHUNK):
                self.writer.write({"text": "x" * width})
            self.now += after_s
            self.holdback.after_publish(self.writer.published_chunks)

    def publish_while_allowed(self) -> int:
        while self.ask() is None:
            self.publish()
        return self.writer.published_chunks

    def commit(self, name: str, chunks_before: int, at: float = 0.0, stream_id: str | None = None) -> None:
        cursor = Cursor(name, stream_id or self.writer.stream_id, 0, chunks_before, {}, 1e9 + at)
        write_cursor(self.out, cursor)

    def need(self, name: str, chunks: int, at: float = 0.0, stream_id: str | None = None) -> None:
        assert write_reading(self.out, ReadingMark(name, stream_id or self.writer.stream_id, 1, 0, chunks, 1e9 + at))

    def chunks(self) -> list[int]:
        data = sorted(int(path.name[6:11]) for path in self.out.glob("chunk_*.jsonl"))
        assert data == sorted(int(path.name[6:11]) for path in self.out.glob("chunk_*.completed"))
        return data

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.out.glob("chunk_*"))

    def retired(self) -> int:
        chunks: int = json.loads((self.out / "retired.json").read_bytes())["chunks_before"]
        return chunks
