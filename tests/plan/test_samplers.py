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

from lazyshard.plan.deal import Deal
from lazyshard.plan.lane import Plan
from lazyshard.plan.layout import make_layout
from tests.plan.cases import PROPERTY, Case, filled_cases


def sharded_blocks(rank: int, dp: int, block: int) -> list[int]:
    return [rank * block + i for i in Random(0).sample(range(block), block)]


def in_turn(rank: int, dp: int, block: int) -> list[int]:
    return list(range(rank, dp * block, dp))


def in_turn_from_random(rank: int, dp: int, block: int) -> list[int]:
    return Random(0).sample(range(dp * block), dp * block)[rank::dp]


Sampler = Callable[[int, int, int], list[int]]
SAMPLERS: list[Sampler] = [sharded_blocks, in_turn, in_turn_from_random]


@PROPERTY
@given(filled_cases(), st.sampled_from(["block", "strided"]), st.sampled_from(SAMPLERS), st.integers(0, 2))
def test_ranks_together_meet_every_sample_once(case: Case, name: str, sampler: Sampler, epoch: int) -> None:
    plan, total, dp = case.plan, case.total, case.plan.deal.dp
    layout = make_layout(name, dp, plan.epoch_length(total))
    samples = [
        plan.draw(*layout.locate(index), total, epoch).sample
        for rank in range(dp)
        for index in sampler(rank, dp, layout.block)
    ]
    assert sorted(samples) == sorted(chain.from_iterable(case.drawn(epoch)))
    assert len(set(samples)) == len(samples) == case.total - plan.deal.start - plan.leftover(total)


@pytest.mark.parametrize(("name", "sampler"), [("block", sharded_blocks), ("strided", in_turn)])
@pytest.mark.parametrize("window", [0, 8])
def test_rank_meets_only_its_own_chunks_with_the_matching_layout(name: str, sampler: Sampler, window: int) -> None:
    dp, chunk, total = 3, 4, 48
    plan = Plan(Deal(dp, chunk), batch_size=2, window=window)
    layout = make_layout(name, dp, plan.epoch_length(total))
    for rank in range(dp):
        places = [layout.locate(index) for index in sampler(rank, dp, layout.block)]
        chunks = {plan.draw(lane, p, total).sample // chunk for lane, p in places}
        assert chunks == set(range(rank, 12, dp))


def test_strided_rank_in_turn_walks_its_lane_in_order() -> None:
    plan = Plan(Deal(2, 3))
    layout = make_layout("strided", 2, plan.epoch_length(12))
    samples = [plan.draw(*layout.locate(index), 12).sample for index in in_turn(1, 2, layout.block)]
    assert samples == [3, 4, 5, 9, 10, 11]
