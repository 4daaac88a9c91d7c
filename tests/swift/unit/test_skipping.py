"""`--sharded_lazy_skip`: what is read of the argument, and what a run that goes on without some samples then trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazyshard_swift.errors import SettingsRefused
from tests.stream.streams import produce
from tests.swift.unit.runs import decided, hugging_face, megatron, refused
from tests.swift.unit.test_rescale import PER_CHUNK, STEPS, History, Shape

TOTAL = 48


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return produce(tmp_path_factory.mktemp("skip") / "s", TOTAL, PER_CHUNK)


@pytest.fixture(params=["swift", "megatron"])
def history(request: pytest.FixtureRequest, tmp_path: Path, stream: Path) -> History:
    options: dict[str, Any] = {"sharded_lazy_shuffle_window": 1, STEPS[request.param]: 500}
    return History(request.param, stream, tmp_path, **options)


def uninterrupted(history: History, shape: Shape) -> list[list[int]]:
    """What such a run trains, step by step, over all ranks."""
    course = history.plan(shape).course
    per_step = shape.batch * shape.accumulation
    return [
        [course.draw(lane, place, TOTAL).sample for lane in range(shape.dp) for place in range(at, at + per_step)]
        for at in range(0, course.epoch_length(TOTAL), per_step)
    ]


def assert_trained(history: History, out: set[int], step: int) -> None:
    """Checks that all but these were trained once, but for fewer than a step at the end of the stream."""
    trained = ids(history)
    assert len(trained) == len(set(trained))
    left = set(range(TOTAL)) - out - set(trained)
    assert not out & set(trained)
    assert len(left) < step


def ids(history: History) -> list[int]:
    return [sample for _, sample in history.trained]


@pytest.mark.parametrize("after", [Shape(2, 1, 2), Shape(3, 1, 1), Shape(1, 2, 1)])
def test_next_steps_are_passed_over(history: History, after: Shape) -> None:
    shape = Shape(2, 1, 2)
    steps = uninterrupted(history, shape)
    history.start(shape, 4)
    assert history.start(after, sharded_lazy_skip="steps 5:8")
    out = {sample for step in steps[4:7] for sample in step}
    assert len(out) == 12
    assert_trained(history, out, after.step)
    # Steps go on to be counted where they were.
    assert min(history.last[0].steps) == 4


def test_samples_and_chunks_are_left_out_of_what_is_left(history: History) -> None:
    history.start(Shape(2, 1, 2), 3)
    before = set(ids(history))
    assert history.start(Shape(1, 1, 1), sharded_lazy_skip="samples 30:35, chunks 0:2, chunks 13:14")
    out = {*range(30, 35), *range(6), *range(39, 42)} - before
    assert sorted(ids(history)) == sorted(set(range(TOTAL)) - out)


def test_command_that_is_started_again_leaves_nothing_out_twice(history: History) -> None:
    shape, again = Shape(2, 1, 2), "steps 5:7, samples 40:42"
    steps = uninterrupted(history, shape)
    history.start(shape, 4)
    for _ in range(3):
        history.start(shape, 1, sharded_lazy_skip=again)
    assert history.start(shape, sharded_lazy_skip=again)
    out = {*(sample for step in steps[4:6] for sample in step), 40, 41}
    assert_trained(history, out, shape.step)
    # Trained, passed over up to the end of a window, and what is left without the two samples.
    assert [part.skip for part in history.plans[0].state.parts] == [(), (), ((40, 42),)]


def test_epochs_are_trained_to_their_end_without_what_is_left_out(tmp_path: Path, stream: Path) -> None:
    for kind in ("swift", "megatron"):
        history = History(kind, stream, tmp_path / kind, num_train_epochs=2, sharded_lazy_shuffle_window=0)
        history.start(Shape(2, 1, 1), 6)
        assert history.start(Shape(2, 1, 1), sharded_lazy_skip="steps 7:9, samples 44:48")
        second = sorted(sample for epoch, sample in history.trained if epoch == 1)
        assert second == list(range(44))
        assert len(ids(history)) == len(set(history.trained))
        assert sum(1 for epoch, _ in history.trained if epoch == 0) == 44 - 4


def test_what_cannot_be_left_out_is_refused_naming_the_argument(history: History) -> None:
    history.start(Shape(2, 1, 2), 3)
    with refused(SettingsRefused, argument="sharded_lazy_skip"):
        history.plan(Shape(2, 1, 2), sharded_lazy_skip="steps 3:5")
    anew: dict[str, Any] = {"sharded_lazy_skip": "steps 2:3"}
    for args in (
        # Steps of a run that begins anew; and ms-swift's own shuffle leaves nothing out.
        megatron(train_iters=9, **anew),
        hugging_face(max_steps=9, **anew),
        megatron(train_iters=9, data_sharding=True, sharded_lazy_skip="samples 1:2"),
    ):
        with refused(SettingsRefused, argument="sharded_lazy_skip"):
            decided(args)


def test_later_steps_of_a_live_stream_that_are_not_published_are_refused(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 24, PER_CHUNK, end=False)
    history = History("megatron", directory, tmp_path / "out", train_iters=50, sharded_lazy_shuffle_window=1)
    history.start(Shape(2, 1, 1), 3)
    assert history.plan(Shape(2, 1, 1), sharded_lazy_skip="steps 6:13").state.parts[-1].skip
    with refused(SettingsRefused, "steps before 14", argument="sharded_lazy_skip"):
        history.plan(Shape(2, 1, 1), sharded_lazy_skip="steps 6:14")
    # What comes next is passed over, whatever it is.
    assert history.plan(Shape(2, 1, 1), sharded_lazy_skip="steps 4:41").state.parts[-2].draws == 37
