"""A writer's steps: their order, what follows a failure, and the end."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import pytest

from lazyshard.storage.steps import Steps, StepsAtOnce, StepsInThread
from tests.storage.streams import DEADLINE_S


@pytest.fixture(params=[StepsAtOnce, StepsInThread])
def steps(request: pytest.FixtureRequest) -> Iterator[Steps]:
    made: Steps = request.param()
    yield made
    made.stop()


@pytest.fixture
def thread() -> Iterator[StepsInThread]:
    made = StepsInThread()
    yield made
    made.stop()


def fail() -> None:
    raise OSError("lost")


def test_steps_are_done_in_order(steps: Steps) -> None:
    done: list[int] = []
    for number in range(100):
        steps.do(functools.partial(done.append, number), 1 << 20)
    steps.wait()
    assert done == list(range(100))


def test_nothing_is_done_after_a_step_that_failed(thread: StepsInThread) -> None:
    done: list[int] = []
    gate = threading.Event()
    thread.do(lambda: gate.wait(DEADLINE_S))
    thread.do(fail)
    thread.do(lambda: done.append(1))
    gate.set()
    with pytest.raises(OSError, match="lost"):
        thread.wait()
    thread.do(lambda: done.append(2))
    thread.wait()
    assert thread.stop()
    assert done == []


def test_failure_of_a_step_at_once_is_raised_at_once() -> None:
    with pytest.raises(OSError, match="lost"):
        StepsAtOnce().do(fail)


def test_failure_of_a_step_in_the_thread_is_raised_by_a_later_call(thread: StepsInThread) -> None:
    thread.do(fail)
    with pytest.raises(OSError, match="lost"):
        while True:
            thread.do(lambda: None)


def test_wait_for_a_number_waits_for_no_later_step(thread: StepsInThread) -> None:
    gate = threading.Event()
    done: list[str] = []
    first = thread.do(lambda: done.append("first"))
    thread.do(lambda: gate.wait(DEADLINE_S))
    thread.wait(first)
    assert done == ["first"]
    gate.set()


def test_caller_waits_when_too_much_is_held(thread: StepsInThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.storage.steps._BACKLOG_BYTES", 10)
    held: list[int] = []
    most: list[int] = []

    def take() -> None:
        most.append(len(held))
        held.pop()

    for _ in range(50):
        held.append(1)
        thread.do(take, 4)
    thread.wait()
    # Two fit into 10 bytes, a third is being handed over, and one that was done has not been noticed yet.
    assert max(most) <= 4


def test_step_larger_than_the_backlog_is_done(thread: StepsInThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.storage.steps._BACKLOG_BYTES", 10)
    done: list[int] = []
    for number in range(3):
        thread.do(functools.partial(done.append, number), 1000)
    thread.wait()
    assert done == [0, 1, 2]


def test_stop_does_what_is_left_and_raises_nothing(thread: StepsInThread) -> None:
    done: list[int] = []
    gate = threading.Event()
    thread.do(lambda: gate.wait(DEADLINE_S))
    thread.do(lambda: done.append(1))
    thread.do(fail)
    gate.set()
    assert thread.stop()
    assert thread.stop()
    assert done == [1]


def test_interrupted_stop_says_so_and_waits_no_second_time(
    thread: StepsInThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread._executor, "shutdown", interrupt)
        with pytest.raises(KeyboardInterrupt):
            thread.stop()
    assert not thread.stop()
    thread._executor.shutdown()


def test_step_is_not_done_twice_where_no_thread_can_be_started(
    thread: StepsInThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            thread.do(lambda: done.append(1))
    assert thread.stop()
    assert done == []
