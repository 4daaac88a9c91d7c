"""A slow rate, with a clock that is turned by hand."""

import json
from pathlib import Path

from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.display.progress import Display
from lazyshard_producer.run import run
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import Outcome, Tally
from tests.producer.commands import ids, plain_sources, rows


class Recorder(Display):
    def __init__(self) -> None:
        super().__init__(log=True)
        self.shown: list[float] = []

    def show(self, tally: Tally) -> None:
        self.shown.append(tally.seconds)


class World:
    def __init__(self, head: Path) -> None:
        self.head = head
        self.now = 1000.0
        self.states: list[str] = []
        self.longest = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)
        self.now += seconds
        state = json.loads(self.head.read_bytes())["state"]
        if self.states[-1:] != [state]:
            self.states.append(state)


def test_waiting_for_the_rate(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 4))
    world, display = World(out / "head.json"), Recorder()
    settings = Settings(sources=plain_sources([str(source)]), out=str(out), samples_per_chunk=2, rate=0.01)
    outcome = run(settings, display, Stop(), clock=world.clock, sleep=world.sleep)
    assert isinstance(outcome, Outcome)
    assert 300 <= outcome.tally.seconds < 301
    assert ids(out) == [0, 1, 2, 3]
    # Readers are told that it waits, and after a publish that it runs, until it has waited a while again.
    assert world.states == ["running", "waiting", "running", "waiting"]
    assert world.longest <= 0.1
    assert [round(seconds) for seconds in display.shown] == [60, 120, 180, 240, 300][: len(display.shown)]
    assert len(display.shown) >= 4
