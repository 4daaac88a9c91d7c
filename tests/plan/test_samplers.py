"""Plan and layout under the samplers that walk the data set: every sample once, and own chunks with the right layout.

The samplers of Megatron-SWIFT are written here as the sequences of indices that they yield on rank r of a data set of
`dp * block` indices: contiguous blocks in random order (`data_sharding=True`), in turn (`shuffle=False`), and in turn
from one random order of all indices (`data_sharding=False`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.plan.layout import Layout
from tests.plan.cases import PROPERTY, Case, cases


def sharded_blocks(rank: int, dp: int, block: int) -> list[int]:
    return [rank * block + i for i in Random(0).sample(range(block), block)]


def in_turn(rank: int, dp: int, block: int) -> list[int]:
    return list(range(rank, dp * block, dp))


def in_turn_from_random(rank: int, dp: int, block: int) -> list[int]:
    return Random(0).sample(range(dp * block), dp * block)[rank::dp]


Sampler = Callable[[int, int, int], list[int]]
SAMPLERS: list[Sampler] = [sharded_blocks, in_turn, in_turn_from_random]


@PROPERTY
@given(cases(filled=True), st.booleans(), st.sampled_from(SAMPLERS), st.integers(0, 2))
def test_ranks_together_meet_every_sample_once(case: Case, strided: bool, sampler: Sampler, epoch: int) -> None:
    course, total, dp = case.course(epoch), case.total, case.part.dp
    layout = Layout(dp, course.epoch_length(total), strided)
    samples = [
        course.draw(*layout.locate(index), total).sample
        for rank in range(dp)
        for index in sampler(rank, dp, layout.block)
    ]
    assert sorted(samples) == sorted(chain.from_iterable(case.drawn(epoch)))
    assert len(set(samples)) == len(samples) == total - course.leftover(total)


@pytest.mark.parametrize(("strided", "sampler"), [(False, sharded_blocks), (True, in_turn)])
@pytest.mark.parametrize("window", [0, 8])
def test_rank_meets_only_its_own_chunks_with_the_matching_layout(strided: bool, sampler: Sampler, window: int) -> None:
    dp, chunk, total = 3, 4, 48
    course = Course(Rules(chunk, window), [Part(dp, 2)])
    layout = Layout(dp, course.epoch_length(total), strided)
    for rank in range(dp):
        places = [layout.locate(index) for index in sampler(rank, dp, layout.block)]
        chunks = {course.draw(lane, p, total).sample // chunk for lane, p in places}
        assert chunks == set(range(rank, 12, dp))
