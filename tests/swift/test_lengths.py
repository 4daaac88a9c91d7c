"""Lengths that the producer measures, groups by length, and packs, in real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import Tokenizer

from lazyshard import ChunkWriter, StreamReader
from lazyshard.stream import read_cursor
from tests.producer.commands import run
from tests.stream.lengths import lengths_of
from tests.swift.commands import ids_by_dp, megatron_sft, swift_sft
from tests.swift.consumption import MICRO, SIZE, position_of
from tests.swift.streams import producing, row

pytestmark = [pytest.mark.timeout(400)]


MAX_LENGTH: Final = 79


WORDS: Final = ("the answer is three", "hello world", "what is the sum of one and two", "chunk row rank")


CHAT: Final = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
)

"""What ms-swift's template qwen2_5 makes of a question and its answer."""


def test_lengths_are_those_of_the_template_and_of_the_tokenizer(model: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for number in range(10):
        text = " ".join(WORDS[(number + part) % 4] for part in range(number % 8))
        messages = [{"role": "user", "content": WORDS[number % 4]}, {"role": "assistant", "content": text or "0"}]
        rows.append({"messages": messages, "note": text})
    with ChunkWriter(tmp_path / "s", 4) as writer:
        for row in rows:
            writer.write(row)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    chats = [tokens(CHAT.format(*(message["content"] for message in row["messages"]))) for row in rows]
    assert min(chats) < MAX_LENGTH < max(chats)
    common = ["run", "--source", str(tmp_path / "s"), "--samples-per-chunk", "3", "--on-bad-row", "quarantine"]
    by_model = ["--model", str(model), "--template", "qwen2_5", "--max-length", str(MAX_LENGTH)]
    out = tmp_path / "template"
    swift = ["--measure", "swift", *by_model, "--encode-option", "model_type=qwen3", "--workers", "1"]
    done = run(*common, "--out", str(out), *swift)
    assert done.returncode == 0, done.stderr
    assert list(StreamReader(out)) == [row for row, length in zip(rows, chats, strict=True) if length <= MAX_LENGTH]
    assert lengths_of(out) == [length for length in chats if length <= MAX_LENGTH]
    refused = (out / "quarantine.jsonl").read_bytes().splitlines()
    assert len(refused) == sum(length > MAX_LENGTH for length in chats)

    out = tmp_path / "tokenizer"
    by_text = ["--measure", str(model), "--measure-field", "note", "--workers", "1"]
    done = run(*common, "--out", str(out), *by_text)
    assert done.returncode == 0, done.stderr
    assert lengths_of(out) == [tokens(row["note"]) for row in rows]


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


PACKED: Final = 64

CAPACITY: Final = 512

RANKS: Final = 2


LONGEST: Final = 128

"""More tokens than any row has."""


def test_packs_of_the_producer_while_it_still_packs(tmp_path: Path, model: Path) -> None:
    source, stream = tmp_path / "rows.jsonl", tmp_path / "stream"
    lines = [json.dumps(row(number) | {"length": LONGEST}) + "\n" for number in range(PACKED)]
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
    assert sorted(by_rank[0] + by_rank[1]) == list(range(PACKED))
    assert all(len(batch.ids) == CAPACITY // LONGEST for batch in run.batches)
    assert "the stream has ended with 16 samples: training stops after step 4 of 9" in run.output
