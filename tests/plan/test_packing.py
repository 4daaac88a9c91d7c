"""Packs: every sample in one, none too full, as few as best fit makes them, and the same ones every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.splitting import pack_samples

CAPACITY = 20

lengths_of_samples = st.lists(st.integers(1, CAPACITY), max_size=60)


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The same by looking at every pack; of packs with the same room the one that got it last."""
    packs: list[list[int]] = []
    rooms: list[int] = []
    changed: list[int] = []
    for moment, sample in enumerate(sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))):
        fits = [pack for pack, room in enumerate(rooms) if room >= lengths[sample]]
        if fits:
            pack = min(fits, key=lambda pack: (rooms[pack], -changed[pack]))
        else:
            pack = len(packs)
            packs.append([])
            rooms.append(capacity)
            changed.append(moment)
        packs[pack].append(sample)
        rooms[pack] -= lengths[sample]
        changed[pack] = moment
    return [sorted(pack) for pack in sorted(packs, key=lambda pack: pack[0])]


@given(lengths_of_samples)
def test_packs_are_those_of_best_fit_decreasing(lengths: list[int]) -> None:
    assert pack_samples(lengths, CAPACITY) == best_fit(lengths, CAPACITY)


@given(lengths_of_samples)
def test_every_sample_is_in_one_pack_and_no_pack_is_too_full(lengths: list[int]) -> None:
    packs = pack_samples(np.array(lengths, np.uint32), CAPACITY)
    assert sorted(sample for pack in packs for sample in pack) == list(range(len(lengths)))
    filled = [sum(lengths[sample] for sample in pack) for pack in packs]
    assert all(0 < tokens <= CAPACITY for tokens in filled)
    assert sum(2 * tokens <= CAPACITY for tokens in filled) <= 1


def test_a_small_case() -> None:
    #                    0  1  2  3  4  5   longest first: 3 (7), 0 (6), 5 (5), 1 (4), 4 (3), 2 (2)
    assert pack_samples([6, 4, 2, 7, 3, 5], 10) == [[0, 1], [3, 4], [2, 5]]


def test_the_tightest_pack_is_taken() -> None:
    # 7 leaves 3, 6 leaves 4; 3 fits both.
    assert pack_samples([6, 7, 3], 10) == [[0], [1, 2]]


def test_packs_come_as_their_longest_samples_stand() -> None:
    assert pack_samples([1, 9, 5, 9, 5], 10) == [[1], [2, 4], [0, 3]]


def test_nothing_makes_no_packs() -> None:
    assert pack_samples([], 10) == []


@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([3, 0], 10, "lengths are from 1 to 10, got 0 for sample 1"),
        ([3, 11], 10, "lengths are from 1 to 10, got 11 for sample 1"),
        ([], 0, "capacity is a number of tokens from 1, got 0"),
    ],
)
def test_impossible_lengths_are_refused(lengths: list[int], capacity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_samples(lengths, capacity)


def test_lengths_as_of_texts_are_packed_almost_without_waste() -> None:
    spread = np.random.default_rng(0).lognormal(np.log(700) - 0.5, 1.0, 10_000)
    lengths = np.clip(np.rint(spread), 1, 8192).astype(np.int64)
    assert lengths.sum() > 0.995 * 8192 * len(pack_samples(lengths, 8192))
