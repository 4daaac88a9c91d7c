"""The deal: the lanes of the oracle, both ways, and errors at every border."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given

from lazyshard.plan.deal import Deal
from tests.plan.cases import PROPERTY, Case, cases


def lane_of(deal: Deal, lane: int, total: int) -> list[int]:
    return [deal.sample(lane, q, total) for q in range(deal.lane_length(lane, total))]


def test_deal_golden_with_a_tail() -> None:
    deal = Deal(dp=2, unit=3)
    assert lane_of(deal, 0, 16) == [0, 1, 2, 6, 7, 8, 12, 14]
    assert lane_of(deal, 1, 16) == [3, 4, 5, 9, 10, 11, 13, 15]


def test_stream_of_fewer_chunks_than_lanes_is_all_tail() -> None:
    assert [lane_of(Deal(dp=4, unit=100), lane, 6) for lane in range(4)] == [[0, 4], [1, 5], [2], [3]]


def test_unit_1_gives_each_lane_every_dp_th_sample() -> None:
    assert [lane_of(Deal(3, 1), lane, 10) for lane in range(3)] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


@PROPERTY
@given(cases())
def test_lanes_equal_the_oracle(case: Case) -> None:
    deal = case.deal
    assert [lane_of(deal, lane, case.total) for lane in range(deal.dp)] == case.lanes()


@PROPERTY
@given(cases())
def test_every_sample_is_in_one_lane_once_and_lanes_differ_by_at_most_one(case: Case) -> None:
    deal = case.deal
    lanes = [lane_of(deal, lane, case.total) for lane in range(deal.dp)]
    assert sorted(chain.from_iterable(lanes)) == list(range(case.total))
    assert max(map(len, lanes)) - min(map(len, lanes)) <= 1


@PROPERTY
@given(cases())
def test_whole_stripes_hold_only_the_lanes_own_chunks(case: Case) -> None:
    deal = Deal(case.deal.dp, case.deal.unit)
    for lane in range(deal.dp):
        for q in range(deal.whole_positions(case.total)):
            assert deal.sample(lane, q, case.total) // deal.unit % deal.dp == lane


@PROPERTY
@given(cases())
def test_vectorised_equals_scalar(case: Case) -> None:
    deal, total = case.deal, case.total
    for lane, expected in enumerate(case.lanes()):
        positions = np.arange(len(expected))
        assert deal.samples(lane, positions, total).tolist() == expected
        live = [deal.sample(lane, q) for q in range(len(expected))]
        assert deal.samples(np.full(len(expected), lane), positions).tolist() == live


def test_vectorised_broadcasts_lanes_against_positions() -> None:
    deal = Deal(2, 3)
    table = deal.samples(np.arange(2)[:, None], np.arange(8), 16)
    assert table.dtype == np.int64
    assert table.tolist() == [[0, 1, 2, 6, 7, 8, 12, 14], [3, 4, 5, 9, 10, 11, 13, 15]]


@pytest.mark.parametrize(("position", "sample"), [(4, 10), (7, 15)])
def test_vectorised_of_two_integers_has_no_dimension(position: int, sample: int) -> None:
    found = Deal(2, 3).samples(1, position, 16)
    assert isinstance(found, np.ndarray)
    assert found.shape == ()
    assert found.item() == sample


def test_vectorised_of_nothing_is_empty() -> None:
    found = Deal(2, 3).samples(0, [], 16)
    assert found.dtype == np.int64
    assert found.shape == (0,)


@PROPERTY
@given(cases())
def test_place_is_the_inverse(case: Case) -> None:
    deal = case.deal
    for lane, samples in enumerate(case.lanes()):
        for q, sample in enumerate(samples):
            assert deal.place(sample, case.total) == (lane, q)
            assert deal.sample(*deal.place(sample)) == sample


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0, 1), "dp must be an int >= 1, got 0"),
        ((True, 1), "dp must be an int >= 1, got True"),
        ((2.0, 1), "dp must be an int >= 1, got 2.0"),
        ((1, 0), "unit must be an int >= 1, got 0"),
        ((1, "4"), "unit must be an int >= 1, got '4'"),
        ((2, 1, 2), r"turn must be an int in \[0, 2\), got 2"),
    ],
)
def test_field_out_of_range_is_refused(fields: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Deal(*fields)


@pytest.mark.parametrize(
    ("lane", "position", "message"),
    [
        (2, 0, r"lane must be in \[0, 2\), got 2"),
        (-1, 0, r"lane must be in \[0, 2\), got -1"),
        (0, -1, r"position must be >= 0, got -1"),
        (0, 9, r"position must be in \[0, 9\) in lane 0 of 2 over 17 samples, got 9"),
        (1, 8, r"position must be in \[0, 8\) in lane 1 of 2 over 17 samples, got 8"),
    ],
)
def test_place_out_of_range_is_refused_alone_and_in_an_array(lane: int, position: int, message: str) -> None:
    deal = Deal(2, 3)
    with pytest.raises(IndexError, match=message):
        deal.sample(lane, position, 17)
    with pytest.raises(IndexError, match=message):
        deal.samples([0, lane], [0, position], 17)
    with pytest.raises(IndexError, match=message):
        deal.samples(lane, position, 17)


@pytest.mark.parametrize(
    ("sample", "total", "message"),
    [
        (-1, None, "sample must be >= 0, got -1"),
        (-1, 9, r"sample must be in \[0, 9\), got -1"),
        (9, 9, r"sample must be in \[0, 9\), got 9"),
    ],
)
def test_sample_outside_the_stream_has_no_place(sample: int, total: int | None, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        Deal(2, 3).place(sample, total)


def test_lane_out_of_range_has_no_length() -> None:
    with pytest.raises(IndexError, match=r"lane must be in \[0, 2\), got 2"):
        Deal(2, 3).lane_length(2, 9)


def test_positions_that_are_no_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="position must be integers, got dtype float64"):
        Deal(2, 3).samples(0, [0.5])
    with pytest.raises(IndexError, match="position must be >= 0, got 18446744073709551615"):
        Deal(2, 3).samples(0, np.array([2**64 - 1], dtype=np.uint64))


def test_turn_moves_the_tail_alone() -> None:
    deal = Deal(dp=3, unit=2, turn=2)
    assert [[deal.sample(lane, q, 11) for q in range(deal.lane_length(lane, 11))] for lane in range(3)] == [
        [0, 1, 7, 10],
        [2, 3, 8],
        [4, 5, 6, 9],
    ]
    assert [deal.place(sample, 11) for sample in (5, 6, 7, 10)] == [(2, 1), (2, 2), (0, 2), (0, 3)]
    assert deal.samples([0, 1, 2], 2, 11).tolist() == [7, 8, 6]
