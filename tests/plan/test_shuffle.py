"""Permutations: pinned for ever, equal to their definition, different for different keys."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.shuffle import mix64, permutation
from tests.plan import oracle
from tests.plan.cases import PROPERTY

words = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("key", "mixed"),
    [
        ((), 0),
        # The first output of SplitMix64 seeded with 0, as published test vectors give it.
        ((0,), 0xE220A8397B1DCDAF),
        ((0, 0), 0xA706DD2F4D197E6F),
        ((1, 2, 3, 4), 0xD55CCD4AEB3CCAFB),
        ((2**64 - 1,), 0xE4D971771B652C20),
    ],
)
def test_mix64_golden(key: tuple[int, ...], mixed: int) -> None:
    assert mix64(*key) == mixed


@pytest.mark.parametrize(
    ("size", "key", "order"),
    [
        (8, (0, 0, 0, 0), [5, 2, 3, 6, 0, 1, 4, 7]),
        (5, (1, 2, 3, 4), [0, 2, 1, 3, 4]),
        (1, (1,), [0]),
        (0, (1,), []),
    ],
)
def test_permutation_golden(size: int, key: tuple[int, ...], order: list[int]) -> None:
    assert permutation(size, *key).tolist() == order


@PROPERTY
@given(st.integers(0, 300), st.lists(words, max_size=5))
def test_permutation_equals_its_definition_in_plain_integers(size: int, key: list[int]) -> None:
    assert permutation(size, *key).tolist() == oracle.permutation(size, key)


@pytest.mark.parametrize("size", [4000, 100_000])
def test_permutation_of_thousands_equals_its_definition(size: int) -> None:
    # Large enough that many words share their highest 16 bits.
    assert permutation(size, 7, 0, 3, 5).tolist() == oracle.permutation(size, (7, 0, 3, 5))


def test_permutation_of_fewer_leaves_out_the_rest() -> None:
    assert permutation(20, 3).tolist() == [i for i in permutation(50, 3).tolist() if i < 20]


def test_permutation_differs_for_every_seed_epoch_lane_and_window() -> None:
    keys = list(product(range(4), repeat=4))
    orders = {tuple(permutation(32, *key).tolist()) for key in keys}
    assert len(orders) == len(keys)


def test_permutation_differs_by_number_and_order_of_the_key() -> None:
    keys = [(), (0,), (0, 0), (0, 1), (1, 0), (1,)]
    assert len({tuple(permutation(32, *key).tolist()) for key in keys}) == len(keys)


def test_permutation_brings_every_element_everywhere() -> None:
    seen = {(i, to) for w in range(200) for i, to in enumerate(permutation(8, 0, 0, 0, w).tolist())}
    assert len(seen) == 64


def test_permutation_is_shared_and_refuses_to_be_written() -> None:
    order = permutation(4, 9)
    assert order.dtype == np.int64
    assert permutation(4, 9) is order
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 1


@pytest.mark.parametrize("word", [-1, 2**64])
def test_key_out_of_range_is_refused(word: int) -> None:
    with pytest.raises(ValueError, match=rf"key must be in \[0, 2\*\*64\), got {word}"):
        mix64(0, word)
    with pytest.raises(ValueError, match="key"):
        permutation(3, word)


def test_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be >= 0, got -1"):
        permutation(-1, 0)


def test_key_of_numpy_integers_is_that_of_ints() -> None:
    assert mix64(np.int64(3), np.uint64(2**63)) == mix64(3, 2**63)  # type: ignore[arg-type]
