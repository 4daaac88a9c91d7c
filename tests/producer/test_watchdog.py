"""A run that is stuck says in what, and when it is over. A share that hangs: tests/faults/test_network.py."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from lazyshard.stream.watchdog import Watchdog
from lazyshard_producer import run as runs
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.display.progress import Display
from lazyshard_producer.run import run
from lazyshard_producer.stop import Stop
from tests.harness.processes.producing import ids, plain_sources, rows
from tests.stream.waiting_by_hand import World


def test_what_takes_too_long_is_told_once_and_so_is_its_end() -> None:
    world = World()
    world.watchdog.ask(lambda: "reading a")
    assert world.look_at(59.9) == []
    assert world.look_at(60.0) == ["no answer for 60 s: reading a"]
    # The next question has its own time.
    world.watchdog.ask(lambda: "reading b")
    assert world.look_at(119.0) == []
    assert world.look_at(120.0) == ["no answer for 60 s: reading b"]
    assert world.look_at(200.0) == []
    world.watchdog.answered()
    assert world.told[-1] == "answered after 140 s: reading b"


def test_what_comes_in_time_is_not_told() -> None:
    world = World()
    for number in range(5):
        world.watchdog.ask(lambda: "reading a")
        assert world.look_at(50.0 * number) == []
        world.now += 49.0
        world.watchdog.answered()
        world.watchdog.answered()
    assert world.look_at(1000.0) == []


came = threading.Event()


def waits(row: dict[str, Any]) -> dict[str, Any]:
    """Comes back once it was told that it does not."""
    if row["id"] == 3:
        assert came.wait(60)
    return row


class Listening(Display):
    def __init__(self) -> None:
        super().__init__(log=False)
        self.told: list[str] = []

    def warn(self, text: str) -> None:
        self.told.append(text)
        came.set()


def test_a_function_that_does_not_come_back_is_named_with_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "Watchdog", lambda tell: Watchdog(tell, 0.05))
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 6))
    settings = Settings(
        sources=plain_sources([str(source)]), out=str(out), samples_per_chunk=2, transform=f"{__name__}:waits"
    )
    display = Listening()
    with Stop() as stop:
        run(settings, display, stop)
    assert display.told[0].startswith("no answer for 0 s: ")
    assert display.told[0].endswith(f"{source}:4")
    assert display.told[1].startswith("answered after ")
    assert ids(out) == list(range(6))
