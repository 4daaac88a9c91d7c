"""Packs in the real `megatron sft`: what ms-swift trains of packs of its own, to the digits of the losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.format.batch import encode_pack
from lazyshard.format.row import encode_row
from tests.swift.commands import Run, ids_by_dp, megatron_sft
from tests.swift.encoding import produce
from tests.swift.streams import producing, row, write_jsonl

pytestmark = [pytest.mark.timeout(400)]

ROWS: Final = 60
CAPACITY: Final = 512
RANKS: Final = 2

LONGEST: Final = 128
"""More tokens than any row has."""

OPTIONS: Final[dict[str, Any]] = {
    "processes": RANKS,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "packing": True,
    "packing_length": CAPACITY,
}


def fed(run: Run) -> dict[tuple[int, int, int], tuple[tuple[int, ...], int]]:
    """What each process was fed, by rank, step and micro batch: rows, and how many tokens."""
    return {(batch.rank, batch.step, batch.micro): (batch.ids, batch.tokens) for batch in run.batches}


def write_packs(directory: Path, groups: list[tuple[int, ...]]) -> Path:
    with ChunkWriter(directory, 2) as writer:
        for group in groups:
            writer.write(encode_pack([encode_row(row(number)) for number in group], [LONGEST] * len(group)))
    return directory


@pytest.mark.sweep
def test_the_packs_of_ms_swift_as_a_stream(tmp_path: Path, model: Path) -> None:
    ordinary = megatron_sft(
        tmp_path / "ordinary",
        model,
        dataset=write_jsonl(tmp_path / "rows.jsonl", 0, ROWS),
        train_dataloader_shuffle=False,
        dataset_shuffle=False,
        num_train_epochs=1,
        **OPTIONS,
    )
    # Rank r is given the packs r, r + ranks, ...
    groups = [batch.ids for batch in sorted(ordinary.batches, key=lambda batch: (batch.step, batch.micro, batch.rank))]
    assert max(map(len, groups)) > 3
    stream = megatron_sft(
        tmp_path / "lazy",
        model,
        dataset=write_packs(tmp_path / "stream", groups),
        sharded_lazy=True,
        sharded_lazy_unit="sample",
        train_dataloader_shuffle=False,
        num_train_epochs=1,
        **OPTIONS,
    )
    assert fed(stream) == fed(ordinary)
    assert len(stream.losses) == len(groups) // 4
    assert stream.losses == pytest.approx(ordinary.losses, rel=1e-5)


def test_packs_of_the_producer_while_it_still_packs(tmp_path: Path, model: Path) -> None:
    source = tmp_path / "rows.jsonl"
    lines = [json.dumps(row(number) | {"length": LONGEST}) + "\n" for number in range(ROWS + 4)]
    source.write_text("".join(lines), encoding="utf-8")
    packing = ("--pack", CAPACITY, "--pack-buffer", 16)
    with producing(tmp_path / "stream", source, 1, 2.0, *packing):
        run = megatron_sft(
            tmp_path / "lazy", model, dataset=tmp_path / "stream", sharded_lazy=True, train_iters=9, **OPTIONS
        )
    by_rank = ids_by_dp(run.batches)
    assert sorted(by_rank[0] + by_rank[1]) == list(range(ROWS + 4))
    assert all(len(batch.ids) == CAPACITY // LONGEST for batch in run.batches)
    assert "the stream has ended with 16 samples: training stops after step 4 of 9" in run.output


def test_encoded_packs_dealt_by_cost_are_trained_as_raw_packs_are(tmp_path: Path, model: Path) -> None:
    """On four processes, of which each two tensor-parallel peers are one data-parallel rank."""
    training = {**OPTIONS, "processes": 2 * RANKS, "tensor_model_parallel_size": 2, "num_train_epochs": 1}
    options = ("--pack", CAPACITY, "--pack-buffer", 40, "--balance", RANKS)
    made = produce(tmp_path / "encoded", list(map(row, range(ROWS))), model, *options, samples_per_chunk=2)
    assert made.returncode == 0, made.stderr
    # Whatever is encoded in training shows in the order of the words.
    encoded = megatron_sft(tmp_path / "of encoded", model, dataset=tmp_path / "encoded", sharded_lazy=True, **training)
    rows = list(StreamReader(tmp_path / "encoded"))
    assert sum(len(row["pack"]) for row in rows) == ROWS
    trained = {batch.ids: batch.tokens for batch in encoded.batches}
    assert len(trained) == len(rows) // 4 * 4
    assert max(map(len, trained)) > 3
    assert sum(trained.values()) > 0.8 * CAPACITY * len(trained)
    order = {(batch.step, batch.micro, batch.dp): batch.ids for batch in encoded.batches}
    raw = megatron_sft(
        tmp_path / "of raw",
        model,
        dataset=write_packs(tmp_path / "raw", [order[at] for at in sorted(order)]),
        sharded_lazy=True,
        sharded_lazy_unit="sample",
        train_dataloader_shuffle=False,
        **training,
    )
    assert fed(encoded) == fed(raw)
    assert encoded.losses == raw.losses
