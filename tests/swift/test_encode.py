"""`--encode swift`: the trainer gets what its template would have returned, and refuses what it would not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lazyshard import StreamReader
from lazyshard.format.names import seal_name
from lazyshard.format.seal import Seal
from tests.swift.encoding import MAX_LENGTH, SIZE, TEMPLATE, produce
from tests.swift.programs import found_by
from tests.swift.streams import row

ROWS = 40
OPTIONS = ("template=" + TEMPLATE, f"max_length={MAX_LENGTH}", "model_type=qwen3")
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "what " * 600}, {"role": "assistant", "content": "one"}]
}
ODD: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "be brief"}, *row(1)["messages"], *row(2)["messages"]]},
    {"query": "sum of 1 and 2", "response": "数据 é \U0001f600"},
    {"instruction": "translate", "input": "fox", "output": "dog"},
    {"messages": [*row(3)["messages"][:1], {"role": "assistant", "content": "quick", "loss": False}]},
]


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A stream of rows of many kinds, encoded by two workers; a row that is too long is left out."""
    out = tmp_path_factory.mktemp("encoded") / "stream"
    rows = [*map(row, range(ROWS)), LONG, *ODD]
    ended = produce(out, rows, model, "--workers", 2, "--on-bad-row", "quarantine")
    assert ended.returncode == 0, ended.stderr
    return out


def test_samples_and_batches_are_those_of_the_template(encoded: Path, model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(one) + "\n" for one in [*map(row, range(ROWS)), *ODD]), encoding="utf-8")
    result = found_by(Path(__file__).with_name("encoded_program.py"), tmp_path, encoded, rows, model, *OPTIONS)
    assert result["same"] == [True] * (ROWS + len(ODD))
    assert result["kinds"] == {"input_ids": "list", "labels": "list", "length": "int", "lengths": "list"}
    assert result["batches"] == [True] * 4
    assert result["calls"] == 0
    length, texts = result["refused"]
    assert "max_length is 512 there and 99 here (there: the stream, here: this run)" in length
    assert "system is" in texts
    assert "loss_scale is 'default' there and 'all' here" in texts


def test_seals_hold_the_lengths_and_the_manifest_what_rows_were_encoded_with(encoded: Path) -> None:
    reader = StreamReader(encoded)
    tokens = Seal.decode((encoded / seal_name(1)).read_bytes(), 1).tokens
    assert tokens is not None
    rows = [reader.read(number) for number in range(SIZE, 2 * SIZE)]
    assert tokens.tolist() == [row["length"] for row in rows] == [len(row["input_ids"]) for row in rows]
    assert reader.encoding is not None
    facts = {"kind": "swift", "template": TEMPLATE, "max_length": MAX_LENGTH, "truncation_strategy": "raise"}
    assert facts.items() <= reader.encoding.items()
    assert len(str(reader.encoding["tokenizer"])) == 16
    # The row that is too long is a bad one.
    (line,) = (encoded / "quarantine.jsonl").read_bytes().splitlines()
    assert json.loads(line)["line"] == ROWS + 1
