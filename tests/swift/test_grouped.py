"""`--group_by_length true` in the real `swift sft`: less padding. Killed and gone on with: unit/test_grouping.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lazyshard import ChunkWriter
from lazyshard.stream import read_cursor
from tests.swift.commands import swift_sft
from tests.swift.consumption import MICRO, SIZE, position_of
from tests.swift.streams import row
from tests.swift.test_measure import CHAT

pytestmark = [pytest.mark.timeout(400)]

SAMPLES = 61


def write_measured(directory: Path, model: Path) -> list[int]:
    """A stream whose seals say how many tokens ms-swift's template makes of each row; returns these lengths."""
    tokenizer, lengths = Tokenizer.from_file(str(model / "tokenizer.json")), []
    with ChunkWriter(directory, SIZE) as writer:
        for number in range(SAMPLES):
            values = row(number)
            text = CHAT.format(*(message["content"] for message in values["messages"]))
            lengths.append(len(tokenizer.encode(text).ids))
            writer.write(values, tokens=lengths[-1])
    return lengths


def test_batches_are_of_rows_of_about_one_length(tmp_path: Path, model: Path) -> None:
    directory = tmp_path / "stream"
    lengths = write_measured(directory, model)
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
