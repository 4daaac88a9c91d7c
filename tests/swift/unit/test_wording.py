"""`wording`: `megatron sft` and `swift sft` end a stream in the same words, and one rank is one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from lazyshard.data.rank import Rank
from lazyshard_swift.planning import decide
from lazyshard_swift.run_plan import RunPlan, how_it_goes_on
from lazyshard_swift.wording import each_of, ranks, stopped
from tests.swift.unit.runs import facts, megatron


@pytest.mark.parametrize(
    ("checkpoint", "told"), [(None, ""), ("output/checkpoint-25", ". Checkpoint: output/checkpoint-25")]
)
def test_end_of_a_stream(checkpoint: str | None, told: str) -> None:
    """As the README has it."""
    args = megatron(micro_batch_size=2, global_batch_size=8, train_iters=60)
    why, left = decide(args, "/streams/one", facts(203), Rank(0, 2)).end(200, 203, 8)
    assert stopped(why, left, step=25, planned=60, trained=200, checkpoint=checkpoint) == (
        "the stream has ended with 203 samples: training stops after step 25 of 60, on all ranks alike, with 200 "
        f"samples trained and 3 left over, fewer than the 8 of a step{told}"
    )


def test_one_rank_is_told_in_the_singular() -> None:
    assert (ranks(1), ranks(4)) == ("1 data-parallel rank", "4 data-parallel ranks")
    assert (each_of(1), each_of(4)) == ("the only data-parallel rank", "each of 4 data-parallel ranks")


def test_a_run_that_goes_on_with_one_rank_says_so() -> None:
    saved = SimpleNamespace(consumed=160, step=20, dp_size=2, batch_size=2)
    plan = SimpleNamespace(saved=saved, rank=SimpleNamespace(dp_size=1), batch_size=2, one_pass=False, skipped=())
    assert how_it_goes_on(cast("RunPlan", plan)) == (
        "goes on after 160 samples, in step 21; with 1 data-parallel rank and micro batches of 2, before with 2 and 2: "
        "what is left of the epoch is dealt anew, each sample once"
    )
