"""`unit="auto"`: the same on every rank whenever it looks, kept by the state, told to a producer that holds back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazyshard import BlendedDataset, LazyShardedDataset
from lazyshard.errors import LengthUnknown, StateMismatch, WaitTimeout
from lazyshard.stream import read_reading
from tests.data.options import grouped
from tests.data.runs import open_ranks, read
from tests.data.workers import DEADLINE_S, loader
from tests.stream.streams import produce

WAITING: dict[str, Any] = {"unit": "auto", "max_total_samples": 8, "max_wait": 0}


def units(ranks: list[LazyShardedDataset]) -> set[int]:
    """The units of the ranks, which their states name."""
    found = {rank.unit for rank in ranks}
    assert {rank.state_dict()["unit"] for rank in ranks} == found
    return found


@pytest.mark.parametrize(
    ("samples", "dp", "options", "unit", "expected"),
    [
        # Three chunks of four, for four ranks; and a full one for every rank.
        (12, 4, {"batch_size": 2}, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (18, 4, {"batch_size": 2}, 4, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        # Three chunks for two ranks, but of seven samples there is no full one for each.
        (12, 2, {"max_total_samples": 8}, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (12, 2, {"max_total_samples": 7}, 1, [[0, 2, 4], [1, 3, 5]]),
    ],
)
def test_chunks_are_dealt_where_each_rank_has_a_full_one_and_else_batches(
    tmp_path: Path, samples: int, dp: int, options: dict[str, Any], unit: int, expected: list[list[int]]
) -> None:
    ranks = open_ranks(produce(tmp_path / "s", samples, 4), dp, unit="auto", **options)
    assert read(ranks) == expected
    assert units(ranks) == {unit}


def test_live_stream_with_a_small_maximum_is_read_at_once(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, 4, end=False)
    options: dict[str, Any] = {"batch_size": 2, "max_total_samples": 7, "max_wait": 0}
    assert read(open_ranks(directory, 2, unit="auto", **options), 2) == [[0, 1], [2, 3]]
    with pytest.raises(WaitTimeout):
        read(open_ranks(directory, 2, unit="chunk", **options), 2)


def test_without_a_length_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, 4, end=False)
    dataset = open_ranks(directory, 2, unit="auto")[0]
    with pytest.raises(LengthUnknown):
        len(dataset)
    produce(directory, 6, 4)
    assert read([dataset]) == [[0, 2, 4]]


def test_samples_can_be_left_out_before_the_unit_is_settled(tmp_path: Path) -> None:
    ranks = open_ranks(produce(tmp_path / "s", 12, 4), 4, unit="auto")
    for rank in ranks:
        rank.skip(samples=[(2, 6)])
    assert sorted(i for lane in read(ranks) for i in lane) == [0, 1, 6, 7, 8, 9, 10, 11]


def test_live_stream_that_does_not_tell_yet_is_waited_for_and_what_was_waited_for_is_said(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, 4, end=False)
    for number, dataset in reversed([*enumerate(open_ranks(directory, 2, **WAITING, consumer="sft"))]):
        assert read_reading(directory, "sft") is None
        with pytest.raises(WaitTimeout, match=rf"^rank {number} of 2: ") as caught:
            len(dataset)
        assert caught.value.chunk == 1
    # A producer that holds back is told.
    mark = read_reading(directory, "sft")
    assert mark is not None and mark.needs_chunks == 2
    # Nothing was settled by that.
    produce(directory, 8, 4)
    assert read([dataset]) == [[0, 1, 2, 3]]


# Three full chunks. With four ranks they are not enough, with two they are.
@pytest.mark.parametrize(("before", "after"), [(4, 1), (2, 4), (2, 2)])
def test_run_keeps_the_unit_with_which_it_began(tmp_path: Path, before: int, after: int) -> None:
    directory = produce(tmp_path / "s", 15, 4)
    begun = open_ranks(directory, before, unit="auto", batch_size=2)
    expected = 2 if before == 4 else 4
    assert units(begun) == {expected}
    seen = [i for lane in read(begun, 2) for i in lane]
    state = begun[0].state_dict(len(seen))
    # Another micro batch makes no other unit.
    ranks = open_ranks(directory, after, state, unit="auto", batch_size=1)
    assert units(ranks) == {expected}
    seen += [i for lane in read(ranks) for i in lane]
    assert len(set(seen)) == len(seen) > 15 - after
    # In the next epoch too.
    for rank in ranks:
        rank.set_epoch(1)
    assert units(ranks) == {expected}
    with pytest.raises(StateMismatch, match='"auto"'):
        open_ranks(directory, after, state, unit="sample")


def test_run_that_began_while_the_stream_was_live_keeps_its_unit_once_it_has_ended(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 8, 4, end=False)
    options: dict[str, Any] = {"unit": "auto", "max_total_samples": 100}
    state = open_ranks(directory, 2, **options)[0].state_dict(4)
    assert state["unit"] == 4
    produce(directory, 9, 4)
    # Three ranks have no full chunk each; who begins now takes batches.
    assert units(open_ranks(directory, 3, **options)) == {1}
    resumed = open_ranks(directory, 3, state, **options)
    assert units(resumed) == {4}
    assert read(resumed) == read(open_ranks(directory, 3, state, max_total_samples=100))


def test_workers_deal_as_their_rank_does(tmp_path: Path) -> None:
    ranks = open_ranks(produce(tmp_path / "s", 30, 12), 3, unit="auto", batch_size=2)
    # A sampler that asks the data set for nothing.
    batches = loader(ranks[0], range(30), 2, batch_size=2)
    assert [i for batch in batches for i in batch] == [
        i for first in (0, 2, 4) for at in range(first, 30, 6) for i in (at, at + 1)
    ]


def test_streams_of_a_blend_choose_each_for_itself(tmp_path: Path) -> None:
    few, many = produce(tmp_path / "few", 8, 4), produce(tmp_path / "many", 32, 4)

    def blend(rank: int) -> BlendedDataset:
        common: dict[str, Any] = {"dp_rank": rank, "dp_size": 4, "batch_size": 2, "max_wait": DEADLINE_S}
        members = [LazyShardedDataset(directory, **grouped(unit="auto", **common)) for directory in (few, many)]
        return BlendedDataset([(member, 1) for member in members], batch_size=2)

    blends = [blend(rank) for rank in range(4)]
    drawn = [[blended[index]["id"] for index in blended.rank_indices] for blended in blends]
    # Two draws of each: batches of two from the few, the beginnings of chunks from the many.
    assert [sorted(lane) for lane in drawn] == [
        sorted([2 * rank, 2 * rank + 1, 4 * rank, 4 * rank + 1]) for rank in range(4)
    ]
    assert [units([member]) for member in blends[0].datasets] == [{2}, {4}]
