"""A store that fails, hangs or is away for a while, and the bound of what waits for it."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import StoreUnavailable
from lazyshard_producer.shipping.store import GivenUp, Tries
from tests.harness.processes.producing import assert_one_line, rows
from tests.store.producing import CHANGES, Run, Watched, check_ended, ids, until
from tests.store.server import BROKEN, BUSY, Server

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


@pytest.mark.parametrize("answer", [(503, BUSY), (500, BROKEN)])
def test_requests_that_fail_now_and_then_lose_nothing_and_double_nothing(
    run: Run, server: Server, answer: tuple[int, bytes]
) -> None:
    turns = 0

    def every_third(method: str, key: str) -> Any:
        nonlocal turns
        turns += 1
        if turns % 3:
            return None
        # Half of them are done all the same, and only the answer is a failure: a PUT that is repeated is refused then.
        return answer if turns % 2 else lambda body: _cut()

    with Watched(server, every_third):
        code, said = run.nursery.wait(run.start())
    assert code == 0, said
    check_ended(run.objects(), 15, 3)


def _cut() -> Any:
    raise RuntimeError("made so")


def test_a_store_that_is_away_at_the_start_is_waited_for(run: Run, server: Server) -> None:
    refused = 0

    def first_ones(method: str, key: str) -> Any:
        nonlocal refused
        refused += 1
        return (503, BUSY) if refused <= 5 else None

    with Watched(server, first_ones):
        code, said = run.nursery.wait(run.start())
    assert code == 0, said
    check_ended(run.objects(), 15, 3)


def test_the_spool_grows_to_its_bound_and_the_run_says_why_it_waits(run: Run, server: Server) -> None:
    away = True

    def refuse(method: str, key: str) -> Any:
        return (503, BUSY) if away and method in CHANGES and "chunk_" in key else None

    with Watched(server, refuse):
        pid = run.start("--max-spool", 2000)
        until(lambda: "SlowDown" in note(run))
        # A chunk with its seal has some 650 bytes.
        assert waiting(run) == 3
        assert note(run).startswith("--max-spool 2.0 kB: 3 chunks (")
        assert f"to be put to {run.url}; the store has not answered for" in note(run)
        until(lambda: "event=waiting" in run.nursery.said(pid))
        away = False
        code, said = run.nursery.wait(pid)
    assert code == 0, said
    assert "event=resumed" in said
    check_ended(run.objects(), 15, 3)


def test_a_slow_store_never_has_more_than_the_bound_waiting(run: Run, server: Server) -> None:
    most = 0

    def watch(method: str, key: str) -> None:
        nonlocal most
        if method == "PUT" and key.endswith(".completed"):
            most = max(most, waiting(run))

    with Watched(server, watch):
        code, said = run.nursery.wait(run.start("--max-spool", 2000))
    assert code == 0, said
    # The one that is put last stays until the next one is there.
    assert 1 <= most <= 4
    check_ended(run.objects(), 15, 3)


def test_past_its_patience_the_run_fails_with_7_and_keeps_what_is_not_put(run: Run, server: Server) -> None:
    def refuse(method: str, key: str) -> Any:
        return (503, BUSY) if method in CHANGES and "chunk_00002" in key else None

    with Watched(server, refuse):
        code, said = run.nursery.wait(run.start("--store-patience-seconds", 1))
    assert code == 7
    assert_one_line(said, "(--store-patience-seconds 1)", "SlowDown", "is kept in", "the same command goes on with it")
    assert ids(run.objects()) == list(range(6))
    before = waiting(run)
    assert before > 1
    said = run.finish()
    assert "is not gone on with" not in said
    check_ended(run.objects(), 15, 3)


@pytest.mark.parametrize("machine", ["same", "other"])
def test_a_signal_while_the_store_is_away_leaves_what_is_not_put_for_the_next_start(
    run: Run, server: Server, machine: str, source: Path
) -> None:
    def refuse(method: str, key: str) -> Any:
        return (503, BUSY) if method in CHANGES and "chunk_" in key else None

    with Watched(server, refuse):
        pid = run.start("--max-spool", 2000, prepare=["tests.store.producer_haste:install"])
        until(lambda: note(run).startswith("--max-spool"))
        os.kill(pid, signal.SIGINT)
        code, said = run.nursery.wait(pid)
    assert code == 130
    assert "still to be put to the store, and kept in" in said
    assert waiting(run) == 3
    if machine == "other":
        run.move()
    run.finish()
    check_ended(run.objects(), 15, 3)


def test_a_run_that_has_only_the_store_to_wait_for_says_so(run: Run, server: Server) -> None:
    away = threading.Event()

    def refuse(method: str, key: str) -> Any:
        return (503, BUSY) if away.is_set() and method in CHANGES and "chunk_" in key else None

    away.set()
    with Watched(server, refuse):
        # No wait at --max-spool: all rows are published here, and the command is through but for the store.
        pid = run.start()
        until(lambda: "still to be put" in run.nursery.said(pid))
        away.clear()
        code, said = run.nursery.wait(pid)
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if "event=waiting" in line]
    assert "5 chunks still to be put to s3://" in line
    assert "the store has not answered for" in line
    check_ended(run.objects(), 15, 3)


def test_a_signal_while_the_store_is_waited_for_at_the_start_ends_the_run(run: Run, server: Server) -> None:
    with Watched(server, lambda method, key: (503, BUSY)):
        pid = run.start()
        until(lambda: server.asked.total() > 2)
        os.kill(pid, signal.SIGTERM)
        code, said = run.nursery.wait(pid)
    assert code == 0
    assert "result=terminated" in said


def test_a_server_that_does_not_answer_is_given_up_by_the_request_and_asked_again(run: Run, server: Server) -> None:
    hung = threading.Event()
    over = threading.Event()

    def hang_once(method: str, key: str) -> None:
        if method == "PUT" and key.endswith("chunk_00001.jsonl") and not hung.is_set():
            hung.set()
            over.wait(60)

    with Watched(server, hang_once):
        pid = run.start(prepare=["tests.store.producer_haste:impatient"])
        try:
            code, said = run.nursery.wait(pid)
        finally:
            over.set()
    assert hung.is_set()
    assert code == 0, said
    check_ended(run.objects(), 15, 3)


class Failing:
    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self) -> str:
        if self.left:
            self.left -= 1
            raise StoreUnavailable("no") from OSError("connection refused")
        return "done"


def test_tries_go_on_until_the_call_is_done() -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return False

    tries = Tries("s3://a/b", 600.0, "", pause=pause, clock=lambda: sum(pauses))
    assert tries(Failing(6)) == "done"
    assert len(pauses) == 6
    assert pauses == sorted(pauses), "pauses grow"
    assert tries.trouble is None


def test_tries_say_since_when_and_why_nothing_comes_through() -> None:
    now = 0.0
    said: list[str | None] = []

    def pause(seconds: float) -> bool:
        nonlocal now
        now += 10.0
        said.append(tries.trouble)
        return False

    tries = Tries("s3://a/b", 600.0, "", pause=pause, clock=lambda: now)
    assert tries(Failing(2)) == "done"
    assert said == [
        "the store has not answered for 10 s (connection refused)",
        "the store has not answered for 20 s (connection refused)",
    ]


def test_tries_end_with_patience_or_by_being_given_up() -> None:
    now = 0.0

    def pause(seconds: float) -> bool:
        nonlocal now
        now += 10.0
        return now >= given_up_at

    given_up_at = 1e9
    tries = Tries("s3://a/b", 35.0, "It is kept.", pause=pause, clock=lambda: now)
    with pytest.raises(
        StoreUnavailable, match=r"s3://a/b: the store has failed for 40 s .*connection refused.* It is kept"
    ):
        tries(Failing(100))
    given_up_at = 60.0
    with pytest.raises(GivenUp):
        tries(Failing(100))
