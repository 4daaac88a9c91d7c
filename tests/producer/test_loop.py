"""The loop with a feed that is made up, and a clock that is turned by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lazyshard import ChunkWriter
from lazyshard.stream.watchdog import Watchdog
from lazyshard_producer.loop import RowLoop
from lazyshard_producer.stop import Stop


class World:
    """Gives `rows` of these numbers, one read after another, and waits a second where there are none."""

    def __init__(self, rows: list[int]) -> None:
        self.now = 0.0
        self.told: list[tuple[float, str | None]] = []
        self._rows = rows

    def read(self) -> Any:
        if not self._rows:
            return None
        count = self._rows.pop(0)
        place = SimpleNamespace(file="a", line=1)
        return SimpleNamespace(lines=[b"{}"] * count, checked=True, tokens=None, place=lambda index: place)

    def wait(self, seconds: float) -> str:
        self.now += 1
        return "new rows"

    def waiting(self, why: str | None, text: str) -> None:
        self.told.append((self.now, why))

    def look(self) -> None:
        pass

    def taken(self, source: str, rows: int) -> None:
        pass

    @property
    def mixer(self) -> World:
        return self


def test_a_wait_for_rows_is_over_when_they_come_and_not_only_with_the_next_chunk(tmp_path: Path) -> None:
    world = World([1, 0, 0, 0, 1, 0, 0, 1])
    anything: Any = world
    with ChunkWriter(tmp_path, 100) as writer:
        loop = RowLoop(
            anything,
            anything,
            writer,
            pace=None,
            gate=None,
            stop=Stop(),
            watch=anything,
            watchdog=Watchdog(),
            reload=lambda: None,
            every_s=1e9,
            clock=lambda: world.now,
        )
        assert loop.run()
        assert (loop.rows, writer.published_chunks, writer.state) == (3, 0, "running")
    assert world.told == [(2.0, "source"), (3.0, None), (5.0, "source"), (5.0, None)]
