"""`--encode swift` and `--sharded_lazy_encode_cache`: the trainer gets what its template would have returned."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import StreamReader
from lazyshard.format.names import seal_name
from lazyshard.format.seal import Seal
from tests.swift.commands import Run, ids_by_dp, megatron_sft, swift_sft
from tests.swift.consumption import MICRO
from tests.swift.programs import MAX_LENGTH, TEMPLATE, encode, found_by
from tests.swift.streams import row, write_jsonl, write_stream

pytestmark = [pytest.mark.timeout(1000)]
ROWS: Final = 60
SIZE: Final = 8
TOKENS: Final = 96
"""More than any text has."""

LONG: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "what " * 600}, {"role": "assistant", "content": "one"}]
}

ODD: Final[list[dict[str, Any]]] = [
    {"messages": [{"role": "system", "content": "be brief"}, *row(1)["messages"], *row(2)["messages"]]},
    {"query": "sum of 1 and 2", "response": "数据 é \U0001f600"},
    {"instruction": "translate", "input": "fox", "output": "dog"},
    {"messages": [*row(3)["messages"][:1], {"role": "assistant", "content": "quick", "loss": False}]},
]


def text(number: int) -> dict[str, Any]:
    """The answer of a row behind its number, without any chat around it."""
    question, answer = row(number)["messages"]
    return {"messages": [{"role": "assistant", "content": f"{question['content']} {answer['content']}"}]}


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    """Rows of many kinds, of which one is too long; and texts, encoded, cut, or padded. By one process."""
    folder = tmp_path_factory.mktemp("encoded")
    chat, lone = folder / "chat.jsonl", folder / "lone.jsonl"
    for path, rows in ((chat, [*map(row, range(ROWS)), LONG, *ODD]), (lone, map(text, range(ROWS)))):
        path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    texts = ("--encode", "swift", "--encode-option", "use_chat_template=false", "--encode-option", "loss_scale=all")
    whole = ("--encode", "swift", "--max-length", MAX_LENGTH, "--workers", 2, "--on-bad-row", "quarantine")
    made: dict[str, tuple[Path, int, tuple[object, ...]]] = {
        "whole": (chat, SIZE, whole),
        "texts": (lone, SIZE, (*texts, "--max-length", MAX_LENGTH)),
        "split": (lone, SIZE, (*texts, "--split", TOKENS)),
        "padded": (lone, SIZE, (*texts, "--max-length", MAX_LENGTH, "--pad", TOKENS)),
    }
    return encode(model, folder, made)


def test_samples_and_batches_are_those_of_the_template(streams: dict[str, Path], model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(one) + "\n" for one in [*map(row, range(ROWS)), *ODD]), encoding="utf-8")
    program = Path(__file__).with_name("encoded_program.py")
    result = found_by(program, tmp_path, rows, model, *streams.values())
    assert result["same"] == [True] * (ROWS + len(ODD))
    assert result["kinds"] == {"input_ids": "list", "labels": "list", "length": "int", "lengths": "list"}
    assert result["batches"] == [True] * 4
    assert result["calls"] == 0
    length, texts = result["refused"]
    assert "max_length is 512 there and 99 here" in length
    assert "system is" in texts
    assert "loss_scale is 'default' there and 'all' here" in texts
    assert result["sequences"] == [True] * 4
    assert result["padded"] == [True] * (ROWS + 1)
    # Of two sequences of several documents each, none of which attends to another.
    assert len(result["lengths"]) > 4
    assert result["borders"] == [0, *itertools.accumulate(result["lengths"])]
    assert_packs(result["packs"])


def assert_packs(found: dict[str, Any]) -> None:
    """Checks the lists of ms-swift's packing data set, and in batches the positions and borders of every row."""
    groups, ours = found["groups"], found["ours"]
    assert sorted(itertools.chain(*groups)) == list(range(24))
    assert any(len(group) > 2 for group in groups)
    assert ours == found["encoded"] == found["ordinary"]
    assert [len(sample) for sample in ours["samples"]] == [len(group) for group in groups]
    for number, batch in enumerate(ours["batches"]):
        lengths = [found["lengths"][row] for group in groups[2 * number : 2 * number + 2] for row in group]
        assert batch["position_ids"] == [list(itertools.chain(*map(range, lengths)))]
        assert batch["cu_seqlens"] == [0, *itertools.accumulate(lengths)]
        assert len(batch["input_ids"][0]) == len(batch["labels"][0]) == sum(lengths)


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
    run = megatron_sft(
        tmp_path / "run",
        model,
        command=("megatron", "pt"),
        processes=2,
        dataset=streams["split"],
        sharded_lazy=True,
        max_length=TOKENS,
        micro_batch_size=1,
        global_batch_size=4,
        num_train_epochs=1,
    )
    assert len(run.losses) == sequences // 4 >= 4
    # All are full, but for the last one of the stream.
    assert sum(batch.tokens != TOKENS for batch in run.batches) <= 1
    assert max(len(batch.ids) for batch in run.batches) > 1


CACHED: Final = 24


def trained(run: Run) -> list[tuple[Any, ...]]:
    return sorted((batch.step, batch.micro, batch.rank, batch.ids, batch.tokens) for batch in run.batches)


def counting(log: Path) -> dict[str, Any]:
    """Options of a run that writes down which rows it encodes."""
    return {"sharded_lazy": True, "environment": {"ENCODED": str(log)}, "timeout_s": 400}


def encoded_in(log: Path) -> Counter[int]:
    """How often each row was encoded."""
    return Counter(map(int, log.read_text().split()) if log.exists() else ())


def test_swift_encodes_each_row_once_over_epochs_and_starts(tmp_path: Path, model: Path) -> None:
    options: dict[str, Any] = {
        "dataset": write_stream(tmp_path / "stream", 0, CACHED, 8),
        "num_train_epochs": 2,
        "sharded_lazy_encode_cache": tmp_path / "cache",
        "sharded_lazy_encode_cache_size": "64MiB",
    }
    first = swift_sft(tmp_path / "first", model, **options, **counting(tmp_path / "1"))
    assert encoded_in(tmp_path / "1") == Counter(range(CACHED)), first.tail()
    more = {"dataloader_num_workers": 2}
    second = swift_sft(tmp_path / "second", model, **options | more, **counting(tmp_path / "2"))
    assert encoded_in(tmp_path / "2") == Counter()
    assert trained(first) == trained(second)
    assert first.losses == second.losses
    assert len(first.losses) == 2 * CACHED // 4
    told = re.findall(r"--sharded_lazy_encode_cache \S+: this rank encoded (\d+) rows and found", second.output)
    assert told == ["0"]


def test_cached_and_encoded_rows_train_alike_on_four_processes(tmp_path: Path, model: Path) -> None:
    """Two tensor-parallel peers of each of two data-parallel ranks, which share one file."""
    options: dict[str, Any] = {"tensor_model_parallel_size": 2, "num_train_epochs": 1, "sharded_lazy_unit": "batch"}
    raw = write_stream(tmp_path / "raw", 0, CACHED, CACHED)
    cache: dict[str, Any] = {"sharded_lazy_encode_cache": tmp_path / "cache"}
    cached = megatron_sft(tmp_path / "cached", model, dataset=raw, **options, **cache, **counting(tmp_path / "1"))
    assert encoded_in(tmp_path / "1") == Counter(range(CACHED)), cached.tail()
    source = write_jsonl(tmp_path / "rows.jsonl", 0, CACHED)
    encode(model, tmp_path, {"made": (source, CACHED, ("--encode", "swift", "--max-length", MAX_LENGTH))})
    ready = megatron_sft(tmp_path / "ready", model, dataset=tmp_path / "made", **options, **counting(tmp_path / "2"))
    assert encoded_in(tmp_path / "2") == Counter()
    assert trained(cached) == trained(ready)
    assert len(cached.losses) == CACHED // 8
    assert cached.losses == ready.losses
    # Each rank shuffles its own batches of the file.
    by_dp = ids_by_dp(cached.batches)
    assert sorted(by_dp[0] + by_dp[1]) == list(range(CACHED))
    assert all(number // MICRO % 2 == rank for rank, ids in by_dp.items() for number in ids)
    assert all(ids != sorted(ids) for ids in by_dp.values())
