"""What goes wrong while a producer runs, functions that misbehave, the loop's pace, what a stuck or failed run says."""

import json
import os
import platform
import shutil
import signal
import threading
import time
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import StreamMismatch, WaitTimeout
from lazyshard.stream import StreamReader
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.display import Display, Outcome
from lazyshard_producer.errors import OUT_OF_MEMORY
from lazyshard_producer.loop import BURST_S, Pace, RowLoop
from lazyshard_producer.position import RunPosition, decode_position, source_names
from lazyshard_producer.rows.recipe import Maker
from lazyshard_producer.run import run as run_settings
from lazyshard_producer.stop import Stop
from tests.cli.commands import lazyshard, python
from tests.harness.processes import producing
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import catches, head, ids, published, rows, run_arguments, running, wait_until
from tests.producer.commands import Fails, Running, commit, snapshot
from tests.producer.rows.draining import making
from tests.stream.streams import raised

FAKETIME: Final = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
came = threading.Event()


def removes(row: dict[str, Any]) -> dict[str, Any]:
    """At the 50th row removes the stream's directory, which is told in the rows."""
    if row["id"] == 50:
        Path("out").rename("away")
        shutil.rmtree("away")
    return row


def test_stream_is_removed(here: Path, fails: Fails) -> None:
    Path("a.jsonl").write_bytes(rows(0, 200))
    arguments = run_arguments(Path("out"), [Path("a.jsonl")], 10, "--no-progress")
    fails([*arguments, "--transform", f"{__name__}:removes"], 7, "error: out: the stream's directory is gone")
    assert not Path("out").exists()
    assert main(arguments) == 0
    assert ids(Path("out")) == list(range(200))


@pytest.mark.skipif(not FAKETIME, reason="needs libfaketime")
def test_clock_jumps_have_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, out, clock = tmp_path / "pipe", tmp_path / "out", tmp_path / "clock"
    os.mkfifo(pipe)

    def jump(year: int) -> None:
        """The file is looked at for every call, so it is replaced whole."""
        new = clock.with_suffix(".new")
        new.write_text(f"@{year}-07-01 00:00:00")
        new.replace(clock)

    def published_in(year: int) -> int:
        told = head(out)
        return int(told["chunks"]) if time.gmtime(told["updated_at"]).tm_year == year else -1

    jump(2030)
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(FAKETIME[0]))
        patch.setenv("FAKETIME_TIMESTAMP_FILE", str(clock))
        patch.setenv("FAKETIME_NO_CACHE", "1")
        patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        # A pipe is waited for by poll: libfaketime 0.9.10 breaks time.sleep of Python 3.11.
        process = producing.start(*run_arguments(out, [pipe], 10, "--log-every-seconds", "0.1"))
    with process, pipe.open("wb", buffering=0) as writer:
        wait_until((out / "head.json").exists, process)
        for number, year in enumerate((2030, 2001, 2036, 1971)):
            jump(year)
            writer.write(rows(10 * number, 10 * number + 10))
            wait_until(partial(lambda year, chunks: published_in(year) == chunks, year, number + 1), process)
            reader = StreamReader(out, max_wait=0)
            assert reader.read(10 * number)["id"] == 10 * number
            with pytest.raises(WaitTimeout):
                reader.read(10 * number + 10)
        writer.close()
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert [line for line in said.splitlines() if "warning" in line] == []
    assert ids(out) == list(range(40))


HERE: Final = "tests.producer.recipes"
MADE: Final = "returned an invalid row: "
JSON: Final = MADE + "cannot be written as JSON: "
NONSENSE: Final = {
    "breaks_off": "raised ValueError: after the first (recipes.py:",
    "exits": "raised SystemExit: 0 (recipes.py:",
    "cancelled": "raised CancelledError (recipes.py:",
    "a_set": JSON,
    "not_a_number": MADE + "NaN",
    "numbers": MADE + "expected a dict, found int",
    "text": "raised TypeError: expected a row, None or rows, got str (recipe.py:",
    "a_surrogate": JSON,
    "huge_number": JSON,
    "deep": JSON,
    "circular": JSON,
    "too_large": "returned a row of 2009 bytes, longer than the 1000 bytes",
    "recursion": "raised RecursionError: ",
    "raises_digits": "raised KeyError: (not shown: writing it raised ValueError) (recipes.py:",
    "raises_a_surrogate": r"raised ValueError: no file \udcff (recipes.py:",
    "raises_a_long_text": f"raised ValueError: {'x' * 500}... (recipes.py:",
    "raises_what_is_broken": "raised Broken: (not shown: writing it raised RuntimeError) (",
}


@pytest.fixture
def source(source: Path) -> Path:
    source.write_bytes(rows(0, 6))
    return source


def transforming(out: Path, source: Path, function: str, *more: object) -> list[str]:
    return run_arguments(out, [source], 2, "--transform", f"{HERE}:{function}", "--max-row-bytes", 1000, *more)


@pytest.mark.parametrize("function", NONSENSE)
def test_nonsense_is_refused_with_the_reason(function: str) -> None:
    maker = Maker(making(transform=f"{HERE}:{function}", max_row_bytes=1000))
    made = [maker.make(line, 0) for line in rows(2, 5).splitlines(keepends=True)]
    assert [one.refused is None for one in made] == [True, False, True]
    assert made[1].rows == []
    assert made[1].refused is not None
    assert str(made[1].refused.reason).startswith(f"--transform {NONSENSE[function]}")


@pytest.mark.parametrize(("function", "workers"), [("exits", 0), ("deep", 0), ("raises_digits", 1), ("exits", 1)])
def test_nonsense_is_quarantined(function: str, workers: int, source: Path, out: Path) -> None:
    assert main(transforming(out, source, function, "--on-bad-row", "quarantine", "--workers", workers)) == 0
    assert ids(out) == [0, 1, 2, 4, 5]
    (entry,) = producing.refused(out)
    assert (entry["line"], entry["row"]) == (4, '{"id":3,"text":"row 3"}')
    assert entry["reason"].startswith(f"--transform {NONSENSE[function]}")


@pytest.mark.parametrize("option", ["--transform", "--where", "--encode"])
def test_no_memory_stops_the_run(option: str, source: Path, out: Path, fails: Fails) -> None:
    more = (option, f"{HERE}:has_no_memory", "--on-bad-row", "quarantine", "--no-progress")
    fails(run_arguments(out, [source], 2, *more), OUT_OF_MEMORY, "not enough memory: ", "the image cannot be decoded")
    assert not (out / "quarantine.jsonl").exists()
    assert published(out) == 1


def test_what_is_printed_disturbs_nothing(source: Path, out: Path) -> None:
    done = producing.run(*transforming(out, source, "prints", "--workers", 1))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"printed {number}" for number in range(6)]
    assert ids(out) == list(range(6))


def test_a_function_that_hangs_is_left_by_the_second_signal(source: Path, nursery: Commands, out: Path) -> None:
    with Running(nursery, *transforming(out, source, "hangs")) as run:
        run.wait_until(lambda: (nursery.folder / "hangs").exists() and published(out) == 1)
        run.send(signal.SIGTERM)
        # It is noted, and seen only once the function gives its row.
        run.wait_until(lambda: not catches(run.pid, signal.SIGTERM))
        assert run.end(signal.SIGTERM)[0] == -signal.SIGTERM
    assert ids(out) == [0, 1]
    assert main(run_arguments(out, [source], 2)) == 0
    assert ids(out) == list(range(6))


def test_a_signal_while_the_command_is_loaded(source: Path, out: Path) -> None:
    # The first thing that the command does is to note signals; the slow imports come after.
    process = producing.start(*run_arguments(out, [source], 10, "--rate", 0.01))
    wait_until(lambda: catches(process.pid, signal.SIGTERM), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err


def test_workers_that_hang_are_left_by_the_first_signal(source: Path, tmp_path: Path) -> None:
    with running(*transforming(tmp_path / "out", source, "hangs", "--workers", 2), cwd=tmp_path) as process:
        wait_until((tmp_path / "hangs").exists, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_module_that_takes_minutes_to_import_is_left_by_the_second_signal(source: Path, tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text("import pathlib, time\npathlib.Path('imports').touch()\ntime.sleep(600)\n")
    with running(*run_arguments(tmp_path / "out", [source], 2, "--transform", "users:made"), cwd=tmp_path) as process:
        wait_until((tmp_path / "imports").exists, process)
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: process.poll() is not None or not catches(process.pid, signal.SIGTERM), process)
        assert process.wait(60) == -signal.SIGTERM


@pytest.mark.full
def test_one_that_wakes_deletes_nothing(nursery: Commands, source: Path, out: Path) -> None:
    source.write_bytes(rows(0, 60))
    limits = ("--max-ahead", 2, "--retain", "consumed", "--consumers", "trainer")
    with Running(nursery, *run_arguments(out, [source], 10, *limits)) as old:
        old.wait_until(lambda: published(out) == 2)
        old.send(signal.SIGSTOP)
        # Lets another producer in, as on a machine where the lock of this one does not hold.
        (out / ".producer.lock").unlink()
        assert nursery.run(*run_arguments(out, [source], 10))[0] == 0
        commit(out, 4, 10)
        before = snapshot(out)
        status, err = old.end(signal.SIGCONT)
        assert status == 6
        producing.assert_one_line(err, "has taken this stream over")
    assert snapshot(out) == before
    assert ids(out) == list(range(60))


@pytest.mark.full
def test_the_second_one_changes_nothing_of_the_first(nursery: Commands, source: Path, out: Path, fails: Fails) -> None:
    source.write_bytes(rows(0, 12) + b"bad\n" + rows(12, 100))
    # The bad row is in the quarantine's file, and no seal counts it yet: a start would cut it off.
    arguments = run_arguments(out, [source], 10, "--on-bad-row", "quarantine", "--max-ahead", 2)
    with Running(nursery, *arguments) as first:
        first.wait_until(lambda: published(out) == 2)
        before = snapshot(out)
        fails(arguments, 6, f"process {first.pid} on ", "already producing into this stream")
        after = snapshot(out)
        for names in (before, after):
            names.pop("head.json")  # which tells that the first one is alive
        assert after == before
        assert first.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(("pause", "at_once"), [(0.5, 6), (3600.0, 11)])
def test_of_a_pause_a_second_at_most_is_made_up_for_and_a_million_rows_do_not_drift(pause: float, at_once: int) -> None:
    pace = Pace(10, 0.0)
    for _ in range(at_once):  # and the one due now
        assert pace.delay(pause) == 0
        pace.take()
    assert pace.delay(pause) == pytest.approx(0.1)
    pace = Pace(3, 1e6)
    pace.take(1_000_000)
    assert pace.delay(1e6) == pytest.approx(1_000_000 / 3, abs=1e-6)


@given(rate=st.floats(0.01, 1e6), pauses=st.lists(st.floats(0, 100), max_size=30))
def test_never_faster_than_the_rate_and_a_burst(rate: float, pauses: list[float]) -> None:
    pace = Pace(rate, 0.0)
    now = 0.0
    for taken, pause in enumerate(pauses, 1):
        now += pause
        now += pace.delay(now)
        pace.take()
        assert taken <= rate * (now + BURST_S) + 1 + 1e-6


def test_waiting_for_the_rate(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_bytes(rows(0, 4))
    now, states, pauses, shown = 1000.0, list[str](), list[float](), list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)
        states.append(head(out)["state"])

    monkeypatch.setattr(RowLoop, "clock", staticmethod(lambda: now))
    monkeypatch.setattr(RowLoop, "sleep", staticmethod(sleep))
    monkeypatch.setattr(Display, "show", lambda _, tally: shown.append(tally.seconds))
    settings = Settings(sources=producing.plain_sources([str(source)]), out=str(out), samples_per_chunk=2, rate=0.01)
    outcome = run_settings(settings, Display(log=True), Stop())
    assert isinstance(outcome, Outcome)
    assert 300 <= outcome.tally.seconds < 301
    assert ids(out) == [0, 1, 2, 3]
    # Readers are told that it waits, and after a publish that it runs, until it has waited a while again.
    assert [state for state, _ in groupby(states)] == ["running", "waiting", "running", "waiting"]
    assert max(pauses) <= 0.1
    assert [round(seconds) for seconds in shown] == [60, 120, 180, 240, 300][: len(shown)]
    assert len(shown) >= 4


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


def waits(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == 3:
        assert came.wait(60)
    return row


def test_hung_function_is_named_with_its_row(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def warn(_: object, text: str) -> None:
        told.append(text)
        if text.endswith(":4"):
            came.set()

    monkeypatch.setattr("lazyshard.stream.waiting.NO_ANSWER_S", 0.05)
    monkeypatch.setattr(Display, "warn", warn)
    source.write_bytes(rows(0, 6))
    settings = Settings(
        sources=producing.plain_sources([str(source)]), out=str(out), samples_per_chunk=2, transform=f"{__name__}:waits"
    )
    with Stop() as stop:
        run_settings(settings, Display(log=False), stop)
    # A slow disk may have been told of before.
    at = next(at for at, text in enumerate(told) if text.endswith(f"{source}:4"))
    assert told[at].startswith("no answer for 0 s: ")
    assert told[at + 1].startswith("answered after ")
    assert ids(out) == list(range(6))


A: dict[str, Any] = {"kind": "jsonl", "path": "a", "offset": 10, "line": 3, "blank": 1, "open_end": True}
A |= {"head": "0000000000000000", "tail": "1111111111111111"}
ENCODED: dict[str, Any] = {"version": 1, "sources": [A, {"kind": None, "path": "b"}], "skip": 1}
ENCODED |= {"rows": 5, "refused": 2}
ENCODED |= {"duplicate": 7, "blocks": 3, "quarantine_bytes": 40, "drawn": [4, 1], "finished": [False, True]}
ENCODED |= {"unit": [3, 0], "skipped": "0123456789abcdef", "recipe": {"transform": "m:f"}}

PLAIN = RunPosition(sources=(A, None), rows=2, duplicate=1)
MIXED = decode_position(ENCODED, "out")


def test_positions_are_pinned_and_survive_json_and_others_are_refused() -> None:
    assert (MIXED.sources, MIXED.recipe) == ((A, None), {"transform": "m:f"})
    assert (MIXED.skip, MIXED.rows, MIXED.refused, MIXED.duplicate, MIXED.blocks) == (1, 5, 2, 7, 3)
    assert (MIXED.quarantine_bytes, MIXED.skipped) == (40, "0123456789abcdef")
    assert (MIXED.drawn, MIXED.finished, MIXED.unit) == ((4, 1), (False, True), (3, 0))
    assert MIXED.encode(["a", "b"]) == ENCODED
    for position in (PLAIN, MIXED):
        value = orjson.loads(orjson.dumps(position.encode(["a", "b"])))
        assert decode_position(value | {"later": 1}, "out") == position
        assert source_names(value) == ["a", "b"]
    wrong: list[Any] = [None, {"version": 1}, {"version": 2, "sources": []}, {"version": 1, "sources": [{"path": "a"}]}]
    wrong += [ENCODED | {"skip": -1}, ENCODED | {"skip": 0}, ENCODED | {"unit": [0, 0]}, ENCODED | {"unit": [3, -1]}]
    wrong += [ENCODED | {"rows": True}, ENCODED | {"drawn": [1]}, ENCODED | {"finished": [0, 1]}]
    for value in (*wrong, ENCODED | {"skipped": ""}, ENCODED | {"recipe": []}):
        raised(StreamMismatch, decode_position, value, "out")
