"""Which elements of a sequence are one shard's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.layout import Sharding


def dealt(total: int, shards: int, batch_size: int, **options: Any) -> list[list[int]]:
    """What each shard gets of 0, 1, ...: by the pure rule alone."""
    found = []
    for index in range(shards):
        rules = Sharding(shards, index, batch_size, **options)
        full, left = divmod(total, rules.batch)
        mine = [batch * rules.batch + place for batch in range(full) for place in rules.own]
        mine += [at if begun else full * rules.batch + at for begun, at in rules.last(left, full > 0)]
        assert rules.count(total) == len(mine)
        found.append(mine)
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[0, 1, 4, 5, 8, 0], [2, 3, 6, 7, 1, 2]]),
        ({"strided": True}, [[0, 2, 4, 6, 8, 1], [1, 3, 5, 7, 0, 2]]),
        ({"drop_last": True}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"even_batches": False}, [[0, 1, 4, 5, 8], [2, 3, 6, 7]]),
        ({"split_batches": True}, [[0, 2, 4, 6, 8], [1, 3, 5, 7, 0]]),
        ({"split_batches": True, "drop_last": True}, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_nine_elements_for_two_shards(options: dict[str, bool], expected: list[list[int]]) -> None:
    assert dealt(9, 2, 2, **options) == expected


def test_fewer_elements_than_a_batch_are_repeated() -> None:
    assert dealt(3, 2, 4) == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert dealt(1, 3, 1) == [[0], [0], [0]]
    assert dealt(0, 3, 1) == [[], [], []]


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_without_completion_every_element_is_one_shards(
    total: int, shards: int, size: int, strided: bool, drop_last: bool
) -> None:
    found = dealt(total, shards, size, strided=strided, drop_last=drop_last, even_batches=False)
    kept = total - total % (shards * size) if drop_last else total
    assert sorted(itertools.chain.from_iterable(found)) == list(range(kept))


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_completed_shards_are_equally_long_and_miss_nothing(total: int, shards: int, size: int, strided: bool) -> None:
    found = dealt(total, shards, size, strided=strided)
    assert len(set(map(len, found))) == 1
    assert set(itertools.chain.from_iterable(found)) == set(range(total))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "num_shards is 1 or more, got 0"),
        ((2, 2), r"index is in \[0, 2\), got 2"),
        ((2, 0, 0), "batch_size is 1 or more, got 0"),
        ((2, 0, 3, True), "batch_size is a multiple of num_shards, got 3 for 2"),
    ],
)
def test_impossible_numbers_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sharding(*arguments)
