"""A store that fails, hangs or is away for a while, and the bound of what waits for it."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import StoreUnavailable
from lazyshard_producer.shipping.store import StreamStore
from lazyshard_producer.stop import GivenUp
from tests.harness.processes.producing import assert_one_line, rows
from tests.store.producing import CHANGES, HASTE, Fault, Run, check_ended, ids, until, watched
from tests.store.server import BROKEN, BUSY
from tests.stream.streams import raised

pytestmark = pytest.mark.full


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(rows(0, 15))
    return path


def waiting(run: Run) -> int:
    """Chunks that lie in the spool."""
    return len(list(run.spool.rglob("stream/*.completed")))


def note(run: Run) -> str:
    """What the run waits for, as the head in the spool has it."""
    for head in run.spool.rglob("stream/head.json"):
        return str(json.loads(head.read_bytes()).get("note", ""))
    return ""


def refusing(part: str = "chunk_") -> Fault:
    """A store that takes no object with this in its name."""
    return lambda method, key: (503, BUSY) if method in CHANGES and part in key else None


def test_failing_requests_lose_and_double_nothing(run: Run) -> None:
    turns = most = 0

    def cut(body: bytes) -> Any:
        raise RuntimeError("made so")

    def every_third(method: str, key: str) -> Any:
        nonlocal turns, most
        turns += 1
        if method == "PUT" and key.endswith(".completed"):
            most = max(most, waiting(run))
        # At the start the store is away for a while.
        if turns > 5 and turns % 3:
            return None
        # Half of them are done all the same, and only the answer is a failure: a PUT that is repeated is refused then.
        return [(503, BUSY), cut, (500, BROKEN), cut][turns // 3 % 4]

    run.finish("--max-spool", 2000, fault=every_third)
    # Three fit into the bound. The one that is put last stays until the next one is there.
    assert 1 <= most <= 4
    check_ended(run.objects(), 15, 3)


# Rows that fit into the spool are all published there, and the command is through but for the store.
@pytest.mark.parametrize(("options", "chunks"), [(("--max-spool", 2000), 3), ((), 5)])
def test_the_run_says_why_it_waits(options: tuple[object, ...], chunks: int, run: Run) -> None:
    with watched(run.server, refusing()):
        pid = run.start(*options, prepare=HASTE)
        until(lambda: "event=waiting" in run.nursery.said(pid))
        if options:
            until(lambda: "SlowDown" in note(run))
            # A chunk with its seal has some 650 bytes.
            assert waiting(run) == 3
            assert "--max-spool 2.0 kB: 3 chunks" in note(run) and str(run.url) in note(run)
    code, said = run.nursery.wait(pid)
    assert code == 0, said
    line, *_ = [line for line in said.splitlines() if "event=waiting" in line]
    assert f"{chunks} chunks" in line
    assert not options or "event=resumed" in said
    check_ended(run.objects(), 15, 3)


def test_past_its_patience_the_run_fails_with_7_and_keeps_what_is_not_put(run: Run) -> None:
    code, said = run.run("--store-patience-seconds", 1, fault=refusing("chunk_00002"))
    assert code == 7
    assert_one_line(said, "--store-patience-seconds", "SlowDown")
    assert ids(run.objects()) == list(range(6))
    assert waiting(run) > 1
    assert "is discarded" not in run.finish()
    check_ended(run.objects(), 15, 3)


def test_signal_while_the_store_is_away_leaves_the_rest_for_the_next_start(run: Run) -> None:
    with watched(run.server, refusing()):
        pid = run.start("--max-spool", 2000, prepare=HASTE)
        until(lambda: note(run).startswith("--max-spool"))
        os.kill(pid, signal.SIGINT)
        assert run.nursery.wait(pid)[0] == 130
    assert waiting(run) == 3
    run.move()
    run.finish()
    check_ended(run.objects(), 15, 3)


def test_a_signal_while_the_store_is_waited_for_at_the_start_ends_the_run(run: Run) -> None:
    with watched(run.server, lambda method, key: (503, BUSY)):
        code, said = run.stopped(lambda: run.server.asked.total() > 2, by=signal.SIGTERM)
    assert code == 0
    assert "result=terminated" in said


def store_that_fails(monkeypatch: pytest.MonkeyPatch, times: int, pause: Callable[[float], bool]) -> StreamStore:
    """A store that refuses so many connections; each pause takes 10 s."""
    now, store = [0.0], StreamStore("s3://a/b", 35.0, "It is kept", pause=lambda seconds: pause(now[0]))

    def refuse() -> tuple[Any, str]:
        nonlocal times
        times -= 1
        if times < 0:
            return None, ""
        now[0] += 10.0
        raise OSError("connection refused")

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(store, "_system", refuse)
    return store


def test_tries_go_on_until_the_call_is_done_and_say_since_when_and_why_nothing_comes_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str | None] = []

    def pause(now: float) -> bool:
        said.append(store.trouble)
        return False

    store = store_that_fails(monkeypatch, 3, pause)
    assert store.request("", "reading", lambda fs, path: "done") == "done"
    assert store.trouble is None
    assert said == [f"the store has not responded for {10 * n} s (connection refused)" for n in range(1, 4)]


def test_tries_end_with_patience_or_by_being_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnavailable, match=r"40 s: connection refused.* It is kept; --store-patience-seconds 35 "):
        store_that_fails(monkeypatch, 100, lambda now: False).get("a")
    raised(GivenUp, store_that_fails(monkeypatch, 100, lambda now: now >= 20).get, "a")
