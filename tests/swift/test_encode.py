"""What the producer encoded, measured or packed by ms-swift's template, in real runs: it trains as ms-swift's own."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import StreamReader
from lazyshard.format.records import seal_name
from lazyshard.format.seal import Seal
from tests.stream.streams import cursor_of, lengths_of
from tests.swift.commands import ids_by_dp, megatron_sft, swift_sft
from tests.swift.consumption import MICRO, SIZE, encoded_in, position_of
from tests.swift.programs import MAX_LENGTH, TEMPLATE, encode
from tests.swift.streams import producing, row, text, write_jsonl, write_rows
from tests.swift.warm import run_warm

pytestmark = [pytest.mark.timeout(1000)]
ROWS: Final = 60
TRAINED: Final = 61  # of the stream whose rows are measured
TOKENS: Final = 96  # more than any text has
LONG: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "what " * 600}, {"role": "assistant", "content": "one"}]
}
ODD: Final[list[dict[str, Any]]] = [
    {"messages": [{"role": "system", "content": "be brief"}, *row(1)["messages"], *row(2)["messages"]]},
    {"query": "sum of 1 and 2", "response": "数据 é \U0001f600"},
    {"instruction": "translate", "input": "fox", "output": "dog"},
    {"messages": [*row(3)["messages"][:1], {"role": "assistant", "content": "quick", "loss": False}]},
]


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    """Rows of many kinds, of which one is too long; texts, encoded, cut, or padded; rows that are measured."""
    folder = tmp_path_factory.mktemp("encoded")
    chat = write_rows(folder / "chat.jsonl", [*map(row, range(ROWS)), LONG, *ODD])
    lone = write_rows(folder / "lone.jsonl", map(text, range(ROWS)))
    texts = ("--encode", "swift", "--encode-option", "use_chat_template=false", "--encode-option", "loss_scale=all")
    whole = ("--encode", "swift", "--max-length", MAX_LENGTH, "--on-bad-row", "quarantine")
    made: dict[str, tuple[Path, int, tuple[object, ...]]] = {
        "whole": (chat, SIZE, whole),
        "texts": (lone, SIZE, (*texts, "--max-length", MAX_LENGTH)),
        "split": (lone, SIZE, (*texts, "--split", TOKENS)),
        "padded": (lone, SIZE, (*texts, "--max-length", MAX_LENGTH, "--pad", TOKENS)),
        "measured": (write_jsonl(folder / "rows.jsonl", 0, TRAINED), SIZE, ("--measure", "swift")),
    }
    return encode(model, folder, made)


def test_samples_and_batches_are_those_of_the_template(streams: dict[str, Path], model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [*map(row, range(ROWS)), *ODD])
    made = [streams[name] for name in ("whole", "texts", "split", "padded")]
    run_warm(tmp_path, Path(__file__).with_name("encoded_program.py"), rows, model, *made)


def test_seals_hold_the_lengths_and_the_manifest_what_rows_were_encoded_with(streams: dict[str, Path]) -> None:
    stream = streams["whole"]
    reader = StreamReader(stream)
    tokens = Seal.decode((stream / seal_name(1)).read_bytes(), 1).tokens
    assert tokens is not None
    rows = [reader.read(number) for number in range(SIZE, 2 * SIZE)]
    assert tokens.tolist() == [row["length"] for row in rows] == [len(row["input_ids"]) for row in rows]
    assert reader.encoding is not None
    facts = {"kind": "swift", "template": TEMPLATE, "max_length": MAX_LENGTH, "truncation_strategy": "raise"}
    assert facts.items() <= reader.encoding.items()
    assert len(str(reader.encoding["tokenizer"])) == 16
    # The row that is too long is a bad one.
    (line,) = (stream / "quarantine.jsonl").read_bytes().splitlines()
    assert json.loads(line)["line"] == ROWS + 1


def test_sequences_are_trained_by_megatron_pt(streams: dict[str, Path], model: Path, tmp_path: Path) -> None:
    sequences = sum(1 for _ in StreamReader(streams["split"]))
    options: dict[str, Any] = {"command": ("megatron", "pt"), "processes": 2, "dataset": streams["split"]}
    options |= {"sharded_lazy": True, "max_length": TOKENS, "micro_batch_size": 1, "global_batch_size": 4}
    options |= {"num_train_epochs": 1, "environment": {"ENCODED": str(tmp_path / "encoded")}}
    run = megatron_sft(tmp_path / "run", model, **options)
    assert not encoded_in(tmp_path / "encoded")
    assert len(run.losses) == sequences // 4 >= 4
    # All are full, but for the last one of the stream.
    assert sum(batch.tokens != TOKENS for batch in run.batches) <= 1
    assert max(len(batch.ids) for batch in run.batches) > 1


def test_batches_are_of_rows_of_about_one_length(streams: dict[str, Path], tmp_path: Path, model: Path) -> None:
    directory = streams["measured"]
    lengths = lengths_of(directory)
    options: dict[str, Any] = {"dataset": directory, "sharded_lazy": True, "group_by_length": True}
    options |= {"num_train_epochs": 1, "save_strategy": "epoch", "dataloader_num_workers": 2}
    run = swift_sft(tmp_path / "run", model, **options)
    # 15 steps of 4: the last sample of the stream is left over.
    assert sorted(number for batch in run.batches for number in batch.ids) == list(range(TRAINED - 1))
    assert run.output.count("lazyshard: --group_by_length true: ms-swift's sampler reads the whole") == 1
    for batch in run.batches:
        assert batch.tokens == MICRO * max(lengths[number] for number in batch.ids), "lengths of other samples"
    trained = sum(lengths[: TRAINED - 1])
    padding = sum(batch.tokens for batch in run.batches) - trained
    in_order = sum(MICRO * max(pair) for pair in zip(lengths[0::2], lengths[1::2], strict=False)) - trained
    assert padding < in_order / 2, "batches of any lengths"
    position = position_of(run.output_dir / "checkpoint-15")
    cursor = cursor_of(directory, position.consumer)
    assert (position.layout, position.consumed, cursor.consumed, cursor.chunks_before) == ("grouped", 60, 60, 0)


def test_packs_of_the_producer_while_it_still_packs(tmp_path: Path, model: Path) -> None:
    stream = tmp_path / "stream"
    # 128 are more tokens than any row has.
    source = write_rows(tmp_path / "rows.jsonl", (row(number) | {"length": 128} for number in range(64)))
    options: dict[str, Any] = {"processes": 2, "micro_batch_size": 1, "global_batch_size": 4, "train_iters": 9}
    options |= {"sharded_lazy": True, "packing": True, "packing_length": 512}
    with producing(stream, source, 1, 2.0, "--pack", 512, "--pack-buffer", 16, "--balance", 2):
        run = megatron_sft(tmp_path / "lazy", model, dataset=stream, **options)
    by_rank = ids_by_dp(run.batches)
    assert sorted(by_rank[0] + by_rank[1]) == list(range(64))
    assert all(len(batch.ids) == 512 // 128 for batch in run.batches)
    assert "has ended with 16 samples: training stops after step 4 of 9" in run.output
