"""Groups by lengths that the producer measures by ms-swift's template, and packs, in real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter
from lazyshard.format.batch import encode_pack
from lazyshard.format.row import encode_row
from lazyshard.stream import read_cursor
from tests.stream.lengths import lengths_of
from tests.swift.commands import ids_by_dp, megatron_sft, swift_sft
from tests.swift.consumption import MICRO, SIZE, position_of
from tests.swift.programs import encode
from tests.swift.streams import producing, row, write_jsonl

pytestmark = [pytest.mark.timeout(400)]
SAMPLES: Final = 61


def test_batches_are_of_rows_of_about_one_length(tmp_path: Path, model: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", 0, SAMPLES)
    directory = encode(model, tmp_path, {"stream": (source, SIZE, ("--measure", "swift"))})["stream"]
    lengths = lengths_of(directory)
    run = swift_sft(
        tmp_path / "run",
        model,
        dataset=directory,
        sharded_lazy=True,
        group_by_length=True,
        num_train_epochs=1,
        save_strategy="epoch",
        dataloader_num_workers=2,
    )
    # 15 steps of 4: the last sample of the stream is left over.
    assert sorted(number for batch in run.batches for number in batch.ids) == list(range(SAMPLES - 1))
    assert run.output.count("lazyshard: --group_by_length true: ms-swift's sampler goes through the whole") == 1
    for batch in run.batches:
        assert batch.tokens == MICRO * max(lengths[number] for number in batch.ids), "lengths of other samples"
    trained = sum(lengths[: SAMPLES - 1])
    padding = sum(batch.tokens for batch in run.batches) - trained
    in_order = sum(MICRO * max(pair) for pair in zip(lengths[0::2], lengths[1::2], strict=False)) - trained
    assert padding < in_order / 2, "batches of any lengths"
    position = position_of(run.output_dir / "checkpoint-15")
    cursor = read_cursor(directory, position.consumer)
    assert cursor is not None
    assert (position.layout, position.consumed, cursor.consumed, cursor.chunks_before) == ("grouped", 60, 60, 0)


PACKED: Final = 64
CAPACITY: Final = 512
RANKS: Final = 2
LONGEST: Final = 128
"""More tokens than any row has."""

PACKING: Final[dict[str, Any]] = {
    **{"processes": RANKS, "micro_batch_size": 1, "global_batch_size": 4},
    **{"packing": True, "packing_length": CAPACITY},
}


def test_packs_of_the_producer_while_it_still_packs(tmp_path: Path, model: Path) -> None:
    source, stream = tmp_path / "rows.jsonl", tmp_path / "stream"
    lines = [json.dumps(row(number) | {"length": LONGEST}) + "\n" for number in range(PACKED)]
    source.write_text("".join(lines), encoding="utf-8")
    with producing(stream, source, 1, 2.0, "--pack", CAPACITY, "--pack-buffer", 16, "--balance", RANKS):
        run = megatron_sft(tmp_path / "lazy", model, dataset=stream, sharded_lazy=True, train_iters=9, **PACKING)
    by_rank = ids_by_dp(run.batches)
    assert sorted(by_rank[0] + by_rank[1]) == list(range(PACKED))
    assert all(len(batch.ids) == CAPACITY // LONGEST for batch in run.batches)
    assert "the stream has ended with 16 samples: training stops after step 4 of 9" in run.output


@pytest.mark.sweep
def test_packs_of_ms_swift_as_a_stream_are_trained_as_its_own(tmp_path: Path, model: Path) -> None:
    options: dict[str, Any] = {"train_dataloader_shuffle": False, "num_train_epochs": 1, **PACKING}
    rows = write_jsonl(tmp_path / "rows.jsonl", 0, 60)
    ordinary = megatron_sft(tmp_path / "ordinary", model, dataset=rows, dataset_shuffle=False, **options)
    # Rank r is given the packs r, r + ranks, ...
    groups = [batch.ids for batch in sorted(ordinary.batches, key=lambda batch: (batch.step, batch.micro, batch.rank))]
    assert max(map(len, groups)) > 3
    with ChunkWriter(tmp_path / "stream", 2) as writer:
        for group in groups:
            writer.write(encode_pack([encode_row(row(number)) for number in group], [LONGEST] * len(group)))
    own: dict[str, Any] = {"dataset": writer.directory, "sharded_lazy": True, "sharded_lazy_unit": "sample"}
    stream = megatron_sft(tmp_path / "lazy", model, **own, **options)
    fed = [
        {(one.rank, one.step, one.micro): (one.ids, one.tokens) for one in run.batches} for run in (stream, ordinary)
    ]
    assert fed[0] == fed[1]
    assert stream.losses == pytest.approx(ordinary.losses, rel=1e-5)
