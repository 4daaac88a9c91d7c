"""`--group_by_length true` in the real `swift sft`: killed and gone on with, each sample once, and less padding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lazyshard import ChunkWriter
from lazyshard.stream import read_cursor
from tests.swift.commands import start_swift_sft, swift_sft
from tests.swift.consumption import MICRO, SIZE, position_of
from tests.swift.streams import row
from tests.swift.test_measure import CHAT

pytestmark = [pytest.mark.timeout(400)]

SAMPLES = 121
RANKS = 2


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


def test_killed_and_gone_on_with(tmp_path: Path, model: Path) -> None:
    directory = tmp_path / "stream"
    lengths = write_measured(directory, model)
    options: dict[str, Any] = {
        "processes": RANKS,
        "dataset": directory,
        "output_dir": tmp_path / "output",
        "sharded_lazy": True,
        "group_by_length": True,
        "num_train_epochs": 1,
        "save_strategy": "steps",
        "save_steps": 10,
        "dataloader_num_workers": 2,
    }
    checkpoint = tmp_path / "output" / "checkpoint-10"
    with start_swift_sft(tmp_path / "run1", model, **options) as training:
        training.wait_for(lambda: 12 in training.losses, "loss of step 12")
        training.kill()
        killed = training.wait()
    assert killed.output.count("lazyshard: --group_by_length true: ms-swift's sampler goes through the whole") == 1
    assert (position_of(checkpoint).layout, position_of(checkpoint).consumed) == ("grouped", 40)
    resumed = swift_sft(tmp_path / "run2", model, **options, resume_from_checkpoint=checkpoint)

    assert {batch.step for batch in resumed.batches} == set(range(11, 31))
    batches = [batch for batch in killed.batches if batch.step <= 10] + resumed.batches
    times = Counter(number for batch in batches for number in batch.ids)
    # 30 steps of 4: the last sample of the stream is left over.
    assert times == dict.fromkeys(range(SAMPLES - 1), 1)
    again = {(batch.rank, batch.step): batch.ids for batch in resumed.batches}
    lost = {(batch.rank, batch.step): batch.ids for batch in killed.batches if batch.step > 10}
    assert lost, "nothing was trained after the checkpoint"
    assert {place: again[place] for place in lost} == lost

    for batch in batches:
        assert batch.tokens == MICRO * max(lengths[number] for number in batch.ids), "lengths of other samples"
    trained = sum(lengths[: SAMPLES - 1])
    padding = sum(batch.tokens for batch in batches) - trained
    in_order = sum(MICRO * max(pair) for pair in zip(lengths[0::2], lengths[1::2], strict=False)) - trained
    assert padding < in_order / 2, "batches of any lengths"
    cursor = read_cursor(directory, position_of(checkpoint).consumer)
    assert cursor is not None
    assert (cursor.consumed, cursor.chunks_before) == (120, 0)
