"""The loop, its pace and its waits, with clocks that are turned by hand; what a run says that is stuck or has failed.

A share that hangs: tests/faults/test_network.py.
"""

import json
import platform
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import StreamReader
from lazyshard.errors import StreamMismatch, WaitTimeout
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.display import Display, Outcome, Tally
from lazyshard_producer.loop import BURST_S, Pace, RowLoop
from lazyshard_producer.position import RunPosition, decode_position, source_names
from lazyshard_producer.run import run
from lazyshard_producer.stop import Stop
from tests.cli.commands import lazyshard, python
from tests.harness.processes.producing import head, ids, plain_sources, rows, run_arguments
from tests.producer.commands import Fails
from tests.stream.streams import World as WaitingWorld
from tests.stream.streams import raised


def test_a_million_rows_do_not_drift() -> None:
    pace = Pace(3, 1e6)
    pace.take(1_000_000)
    assert pace.delay(1e6) == pytest.approx(1_000_000 / 3, abs=1e-6)


@pytest.mark.parametrize(("pause", "at_once"), [(0.5, 6), (3600.0, 11)])
def test_of_a_pause_a_second_at_most_is_made_up_for(pause: float, at_once: int) -> None:
    pace = Pace(10, 0.0)
    for _ in range(at_once):  # and the one due now
        assert pace.delay(pause) == 0
        pace.take()
    assert pace.delay(pause) == pytest.approx(0.1)


@given(rate=st.floats(0.01, 1e6), pauses=st.lists(st.floats(0, 100), max_size=30))
def test_never_faster_than_the_rate_and_a_burst(rate: float, pauses: list[float]) -> None:
    pace = Pace(rate, 0.0)
    now = 0.0
    for taken, pause in enumerate(pauses, 1):
        now += pause
        now += pace.delay(now)
        pace.take()
        assert taken <= rate * (now + BURST_S) + 1 + 1e-6


class Recorder(Display):
    def __init__(self) -> None:
        super().__init__(log=True)
        self.shown: list[float] = []

    def show(self, tally: Tally) -> None:
        self.shown.append(tally.seconds)


class SlowWorld:
    def __init__(self, out: Path) -> None:
        self.out = out
        self.now = 1000.0
        self.states: list[str] = []
        self.longest = 0.0

    def sleep(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)
        self.now += seconds
        state = head(self.out)["state"]
        if self.states[-1:] != [state]:
            self.states.append(state)


def test_waiting_for_the_rate(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_bytes(rows(0, 4))
    world, display = SlowWorld(out), Recorder()
    settings = Settings(sources=plain_sources([str(source)]), out=str(out), samples_per_chunk=2, rate=0.01)
    monkeypatch.setattr(RowLoop, "clock", staticmethod(lambda: world.now))
    monkeypatch.setattr(RowLoop, "sleep", staticmethod(world.sleep))
    outcome = run(settings, display, Stop())
    assert isinstance(outcome, Outcome)
    assert 300 <= outcome.tally.seconds < 301
    assert ids(out) == [0, 1, 2, 3]
    # Readers are told that it waits, and after a publish that it runs, until it has waited a while again.
    assert world.states == ["running", "waiting", "running", "waiting"]
    assert world.longest <= 0.1
    assert [round(seconds) for seconds in display.shown] == [60, 120, 180, 240, 300][: len(display.shown)]
    assert len(display.shown) >= 4


def test_a_run_that_has_failed_says_why_in_the_stream(source: Path, out: Path, fails: Fails) -> None:
    source.write_bytes(rows(0, 5) + b"[]\n")
    said = fails(run_arguments(out, [source], 2), 3)
    reason = said.splitlines()[-1].removeprefix("lazyshard-producer: error: ")
    told = head(out)
    assert (told["state"], told["chunks"], told["note"]) == ("failed", 2, reason)
    assert reason.startswith(f"{source}:6: ")
    producer = json.loads(lazyshard("status", out, "--json").stdout)["producer"]
    assert (producer["failure"], producer["waits_for"]) == (reason, None)
    assert raised(WaitTimeout, StreamReader(out, max_wait=0).read, 4).state == "failed"
    source.write_bytes(rows(0, 6))
    assert main(run_arguments(out, [source], 2)) == 0
    assert "note" not in head(out)


ROUNDS = """
import resource, sys
if sys.argv[1] == "keep":
    from lazyshard_producer.run import keep_freed_memory
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
rows = [bytes(2000) for _ in range(2000)]
before = faults()
for _ in range(20):
    rows = None
    rows = [bytes(2000) for _ in range(2000)]
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what is freed by rules of theirs")
def test_pages_of_freed_rows_are_not_fetched_again() -> None:
    given_back, kept = (int(python("-c", ROUNDS, mode).stdout) for mode in ("give back", "keep"))
    assert given_back > 1000
    assert kept < given_back / 10


def test_what_takes_too_long_is_told_once() -> None:
    world = WaitingWorld()
    world.watchdog.ask(lambda: "reading a")
    assert [world.look_at(now) for now in (59.9, 60.0, 200.0)] == [[], ["no answer for 60 s: reading a"], []]


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
        if text.endswith(":4"):
            came.set()


def test_function_that_does_not_return_is_named_with_its_row(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazyshard.stream.waiting.NO_ANSWER_S", 0.05)
    source.write_bytes(rows(0, 6))
    settings = Settings(
        sources=plain_sources([str(source)]), out=str(out), samples_per_chunk=2, transform=f"{__name__}:waits"
    )
    display = Listening()
    with Stop() as stop:
        run(settings, display, stop)
    # A slow disk may have been told of before.
    at = next(at for at, text in enumerate(display.told) if text.endswith(f"{source}:4"))
    assert display.told[at].startswith("no answer for 0 s: ")
    assert display.told[at + 1].startswith("answered after ")
    assert ids(out) == list(range(6))


A: dict[str, Any] = {"kind": "jsonl", "path": "a", "offset": 10, "line": 3, "blank": 1, "open_end": True}
A |= {"head": "0000000000000000", "tail": "1111111111111111"}
ENCODED: dict[str, Any] = {"version": 1, "sources": [A, {"kind": None, "path": "b"}], "skip": 1}
ENCODED |= {"rows": 5, "refused": 2}
ENCODED |= {"duplicate": 7, "blocks": 3, "quarantine_bytes": 40, "drawn": [4, 1], "finished": [False, True]}
ENCODED |= {"unit": [3, 0], "skipped": "0123456789abcdef", "recipe": {"transform": "m:f"}}

PLAIN = RunPosition(sources=(A, None), rows=2, duplicate=1)
MIXED = decode_position(ENCODED, "out")


def test_positions_are_pinned_and_survive_json() -> None:
    assert (MIXED.sources, MIXED.recipe) == ((A, None), {"transform": "m:f"})
    assert (MIXED.skip, MIXED.rows, MIXED.refused, MIXED.duplicate, MIXED.blocks) == (1, 5, 2, 7, 3)
    assert (MIXED.quarantine_bytes, MIXED.skipped) == (40, "0123456789abcdef")
    assert (MIXED.drawn, MIXED.finished, MIXED.unit) == ((4, 1), (False, True), (3, 0))
    assert MIXED.encode(["a", "b"]) == ENCODED
    for position in (PLAIN, MIXED):
        value = orjson.loads(orjson.dumps(position.encode(["a", "b"])))
        # Unknown fields are ignored.
        assert decode_position(value | {"later": 1}, "out") == position
        assert source_names(value) == ["a", "b"]


def test_a_value_that_is_no_position_is_refused() -> None:
    wrong: list[Any] = [None, {"version": 1}, {"version": 2, "sources": []}, {"version": 1, "sources": [{"path": "a"}]}]
    wrong += [ENCODED | {"skip": -1}, ENCODED | {"skip": 0}, ENCODED | {"unit": [0, 0]}, ENCODED | {"unit": [3, -1]}]
    wrong += [ENCODED | {"rows": True}, ENCODED | {"drawn": [1]}, ENCODED | {"finished": [0, 1]}]
    for value in (*wrong, ENCODED | {"skipped": ""}, ENCODED | {"recipe": []}):
        raised(StreamMismatch, decode_position, value, "out")
