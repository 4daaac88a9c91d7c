"""What a resumed run is told to leave out: samples, chunks and steps; and that its state says so."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.data.runs import State, open_ranks, part, read
from tests.stream.streams import produce


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Forty samples in ten chunks."""
    return produce(tmp_path / "s", 40, 4)


@pytest.fixture
def state(stream: Path) -> State:
    """After three steps, of two micro batches of one, of two ranks: [0, 1, 2, 3, 8, 9] and [4, 5, 6, 7, 12, 13]."""
    return open_ranks(stream, 2, micro_batches_per_step=2)[0].state_dict(12)


def skipping(stream: Path, dp: int, state: State | None, **skip: Any) -> Any:
    ranks = open_ranks(stream, dp, micro_batches_per_step=2)
    for dataset in ranks:
        if state is not None:
            dataset.load_state_dict(state)
        dataset.skip(**skip)
    return ranks


def test_without_anything_to_skip_nothing_changes(stream: Path, state: State) -> None:
    ranks = skipping(stream, 2, state)
    assert ranks[0].state_dict() == state
    assert read(ranks, 2) == [[10, 11], [14, 15]]


def test_samples_and_chunks_are_left_out_from_here_on(stream: Path, state: State) -> None:
    ranks = skipping(stream, 2, state, samples=[(0, 2), (11, 14)], chunks=[(4, 6)])
    # Left of the open windows: 10, 14, 15; from chunk 6 on all is dealt anew.
    assert read(ranks) == [[10, 14, 24, 25, 26, 27, 32, 33, 34], [15, 28, 29, 30, 31, 36, 37, 38, 39]]
    assert ranks[0].state_dict(20)["parts"] == [
        part(2, 6, draws_per_step=2),
        part(2, 4, skip=[[0, 2], [11, 14], [16, 24]], first_step=3, draws_per_step=2),
    ]
    # Whoever goes on from there need not say it again.
    again = open_ranks(stream, 3, ranks[0].state_dict(20), micro_batches_per_step=2)
    rest = list(chain(*read(again)))
    assert not {11, 12, 13, *range(16, 24)} & set(rest)
    # Or says it again, which changes nothing.
    twice = skipping(stream, 3, ranks[0].state_dict(20), samples=[(0, 2)], chunks=[(4, 6)])
    assert twice[0].state_dict() == again[0].state_dict()
    # And the next epoch leaves out the same.
    for dataset in again:
        dataset.set_epoch(1)
    assert len(again[0]) == (40 - 13) // 3 * 3
    assert set(chain(*read(again))) == set(range(40)) - {0, 1, 11, 12, 13, *range(16, 24)}


def test_run_can_begin_without_some_samples(stream: Path) -> None:
    ranks = skipping(stream, 2, None, chunks=[(0, 8)], samples=[(39, 40)])
    assert read(ranks) == [[32, 34, 36], [33, 35, 37]]
    assert ranks[0].state_dict(2)["parts"] == [part(2, 1, skip=[[0, 32], [39, 40]], draws_per_step=2)]


def test_next_steps_are_passed_over(stream: Path, state: State) -> None:
    ranks = skipping(stream, 2, state, steps=[(4, 6)])
    whole = read(open_ranks(stream, 2))
    assert [lane[6:10] for lane in whole] == [[10, 11, 16, 17], [14, 15, 20, 21]]
    assert read(ranks, 2) == [[18, 19], [22, 23]]
    assert sorted(chain(*read(ranks))) == sorted(chain(*(lane[10:] for lane in whole)))
    # What was not trained is not counted.
    assert ranks[0].state_dict(16)["parts"] == [
        part(2, 6, draws_per_step=2),
        part(2, 4, trained=False, first_step=3, draws_per_step=2),
        part(2, 2, first_step=3, draws_per_step=2),
    ]


def test_later_steps_train_something_else(stream: Path, state: State) -> None:
    ranks = skipping(stream, 2, state, steps=[(5, 6), (7, 8)])
    whole = read(open_ranks(stream, 2))
    out = set(chain(*(lane[8:10] + lane[12:14] for lane in whole)))
    assert out == {16, 17, 20, 21, 24, 25, 28, 29}
    assert sorted(chain(*read(ranks))) == sorted(set(range(40)) - set(range(10)) - {12, 13} - out)
    assert ranks[0].state_dict()["parts"][-1]["skip"] == [[16, 18], [20, 22], [24, 26], [28, 30]]


def test_next_steps_and_later_ones_are_those_of_the_run_as_it_was(stream: Path, state: State) -> None:
    ranks = skipping(stream, 2, state, steps=[(6, 7), (4, 5)])
    whole = read(open_ranks(stream, 2))
    out = set(chain(*(lane[6:8] + lane[10:12] for lane in whole)))
    assert out == {10, 11, 14, 15, 18, 19, 22, 23}
    assert sorted(chain(*read(ranks))) == sorted(set(range(40)) - set(range(10)) - {12, 13} - out)


def test_steps_of_other_ranks_are_theirs(stream: Path, state: State) -> None:
    ranks = skipping(stream, 1, state, steps=[(4, 5)])
    assert read(open_ranks(stream, 1, state), 4) == [[10, 11, 14, 15]]
    assert read(ranks, 3) == [[14, 15, 16]]


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ({"samples": [(4, 4)]}, r"samples: expected ranges \(FIRST, STOP\) with 0 <= FIRST < STOP, got \(4, 4\)"),
        ({"samples": [(-1, 4)]}, r"samples: expected ranges .* got \(-1, 4\)"),
        ({"chunks": [(2, 1)]}, r"chunks: expected ranges .* got \(2, 1\)"),
        ({"steps": [(3, 5)]}, "steps 3:5: expected FIRST:STOP with 4 <= FIRST < STOP, since 3 steps are trained"),
        ({"steps": [(5, 5)]}, r"steps: expected ranges .* got \(5, 5\)"),
        ({"samples": (3, 5)}, r"samples are half-open ranges such as \[\(120, 180\)\], got \(3, 5\)"),
        ({"samples": 3}, r"samples are half-open ranges such as .* got 3"),
    ],
)
def test_range_that_cannot_be_is_refused(stream: Path, state: State, skip: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        skipping(stream, 2, state, **skip)


def test_steps_of_a_run_that_does_not_know_them_are_refused(stream: Path) -> None:
    with pytest.raises(ValueError, match="does not say how many samples a step has, so steps cannot be named"):
        open_ranks(stream, 2)[0].skip(steps=[(2, 3)])


def test_what_to_skip_is_said_before_the_data_set_is_used(stream: Path, state: State) -> None:
    dataset = open_ranks(stream, 2, state)[0]
    len(dataset)
    with pytest.raises(RuntimeError, match="in use already, what to skip is said before"):
        dataset.skip(samples=[(0, 1)])
