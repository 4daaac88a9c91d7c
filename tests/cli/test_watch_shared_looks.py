"""Looks that all viewers share: few, never in the way of who asks, and honest about silence."""

from __future__ import annotations

import threading

import pytest

from lazyshard.cli import watch_server
from lazyshard.cli.watch_server import SharedLooks, seconds_to_next
from lazyshard.errors import StreamMissing
from lazyshard.inspection.survey import Survey
from tests.cli.looks import NOW, survey
from tests.stream.streams import wait_until

LONG_S = 3600.0


class Share:
    """A stream's storage that answers as told."""

    def __init__(self) -> None:
        self.looks = 0
        self.fails: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()

    def take(self) -> Survey:
        self.looks += 1
        assert self.answers.wait(60.0)
        if self.fails is not None:
            raise self.fails
        return survey(looked_at=NOW)


def test_viewers_share_a_look() -> None:
    share = Share()
    looks = SharedLooks(share.take, LONG_S, clock=lambda: NOW)
    looks.start()
    found: list[object] = []
    viewers = [threading.Thread(target=lambda: found.append(looks.facts().current)) for _ in range(20)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join()
    assert (len(found), len({id(one) for one in found}), share.looks) == (20, 1, 1)
    assert found[0] is not None
    looks.close()


def test_who_does_not_wait_is_answered_at_once() -> None:
    share = Share()
    share.answers.clear()
    looks = SharedLooks(share.take, 1.0)
    looks.start()
    assert looks.facts(0.0).last is None
    share.answers.set()
    wait_until(lambda: looks.facts(0.0).last is not None, "asking without waiting has it look too")
    looks.close()


def test_looks_go_on_every_interval_while_somebody_has_asked_within_a_minute() -> None:
    assert seconds_to_next(now=100.0, asked_at=99.0, due=101.5) == 1.5
    assert seconds_to_next(now=100.0, asked_at=40.0, due=99.0) == 0.0
    assert seconds_to_next(now=100.1, asked_at=40.0, due=99.0) is None, "not before somebody asks"
    assert seconds_to_next(now=5.0, asked_at=float("-inf"), due=float("-inf")) is None


def test_looks_go_on_without_being_asked_each_time() -> None:
    share = Share()
    looks = SharedLooks(share.take, 0.001)
    looks.start()
    assert looks.facts().current is not None
    wait_until(lambda: share.looks > 3, "looks go on while somebody has asked lately")
    looks.close()


def test_share_that_hangs_holds_up_nobody_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_server, "SILENT_S", 0.02)
    share = Share()
    looks = SharedLooks(share.take, 0.001, clock=lambda: NOW)
    looks.start()
    assert looks.facts().current is not None
    share.answers.clear()
    wait_until(lambda: looks.facts().silent_since is not None, "the silence is told")
    facts = looks.facts()
    assert (facts.silent_since, facts.current) == (NOW, None)
    assert facts.last is not None, "what was known is still shown"
    share.answers.set()
    wait_until(lambda: looks.facts().current is not None, "it answers again")
    looks.close()


def test_share_that_hangs_from_the_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_server, "SILENT_S", 0.02)
    monkeypatch.setattr(watch_server, "_PATIENCE_S", 0.01)
    share = Share()
    share.answers.clear()
    looks = SharedLooks(share.take, 1.0, clock=lambda: NOW)
    looks.start()
    wait_until(lambda: looks.facts().silent_since == NOW, "the silence is told")
    assert looks.facts().last is None
    looks.close()
    share.answers.set()


def test_a_look_that_fails_is_told_and_the_next_one_made() -> None:
    share = Share()
    share.fails = StreamMissing("/data/stream: there is no stream", directory="/data/stream")
    looks = SharedLooks(share.take, 0.001, clock=lambda: NOW)
    looks.start()
    facts = looks.facts()
    assert (facts.error, facts.last, facts.answered_at) == ("/data/stream: there is no stream", None, NOW)
    share.fails = None
    wait_until(lambda: looks.facts().current is not None, "the stream has come")
    share.fails = OSError(5, "Input/output error")
    wait_until(lambda: looks.facts().error is not None, "the failure is told")
    assert looks.facts().last is not None
    assert looks.facts().current is None
    looks.close()


def test_an_error_of_ours_ends_no_looks() -> None:
    share = Share()
    share.fails = KeyError("x")
    looks = SharedLooks(share.take, 0.001)
    looks.start()
    error = looks.facts().error
    assert error is not None and error.startswith("unexpected KeyError: 'x'; ")
    share.fails = None
    wait_until(lambda: looks.facts().current is not None, "looks go on")
    looks.close()


def test_slow_looks_are_made_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lazyshard.cli.watch_server.time.monotonic", lambda: now[0])
    looks = SharedLooks(Share().take, 2.0)
    for took, pause in ((0.005, 2.0), (0.2, 2.0), (3.0, 30.0)):
        looks._began = (NOW, now[0])
        now[0] += took
        looks._tell(None, None)
        assert looks._pause == pytest.approx(pause)
