"""Packs that are made while the real `megatron sft` trains; what the collator makes of them: unit/test_packed.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from tests.swift.commands import ids_by_dp, megatron_sft
from tests.swift.streams import producing, row

pytestmark = [pytest.mark.timeout(400)]

ROWS: Final = 64
CAPACITY: Final = 512
RANKS: Final = 2

LONGEST: Final = 128
"""More tokens than any row has."""


def test_packs_of_the_producer_while_it_still_packs(tmp_path: Path, model: Path) -> None:
    source, stream = tmp_path / "rows.jsonl", tmp_path / "stream"
    lines = [json.dumps(row(number) | {"length": LONGEST}) + "\n" for number in range(ROWS)]
    source.write_text("".join(lines), encoding="utf-8")
    with producing(stream, source, 1, 2.0, "--pack", CAPACITY, "--pack-buffer", 16, "--balance", RANKS):
        run = megatron_sft(
            tmp_path / "lazy",
            model,
            dataset=stream,
            sharded_lazy=True,
            train_iters=9,
            processes=RANKS,
            micro_batch_size=1,
            global_batch_size=4,
            packing=True,
            packing_length=CAPACITY,
        )
    by_rank = ids_by_dp(run.batches)
    assert sorted(by_rank[0] + by_rank[1]) == list(range(ROWS))
    assert all(len(batch.ids) == CAPACITY // LONGEST for batch in run.batches)
    assert "the stream has ended with 16 samples: training stops after step 4 of 9" in run.output
