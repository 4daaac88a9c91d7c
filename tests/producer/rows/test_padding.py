"""`--pad`: each row comes out with exactly so many tokens, and with all else that it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyshard import LazyShardedSequences, Pad, StreamReader
from lazyshard.format.names import arrays_name, chunk_name, seal_name
from lazyshard.format.row import encode_row
from lazyshard.format.seal import Seal
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.rows.pipeline import Pipeline
from tests.harness.processes.producing import plain_sources, run_arguments
from tests.producer.rows.draining import drain

ENCODE = "tests.producer.encoders:tokenized"
RECIPES = "tests.producer.recipes"


def write(path: Path, lengths: list[int], **more: Any) -> Path:
    """A file of rows {"id": ..., "input_ids": [...], "labels": [...]} of these lengths."""
    rows = []
    for number, length in enumerate(lengths):
        tokens = [10 * (number + 1) + place for place in range(length)]
        rows.append(encode_row({"id": number, "input_ids": tokens, "labels": [-100, *tokens[1:]], **more}))
    path.write_bytes(b"".join(rows))
    return path


def make(path: Path, **more: Any) -> Settings:
    return Settings(
        sources=plain_sources([str(path)]), out=str(path.parent / "out"), samples_per_chunk=2, **{"pad": 4, **more}
    )


def test_the_rows_to_the_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [2, 4], length=9, source="a")
    out = tmp_path / "out"
    assert main(run_arguments(out, [path], 2, "--pad", 4, "--pad-token", 3, "--no-progress")) == 0
    assert (out / chunk_name(0)).read_bytes() == (
        b'{"id":0,"input_ids":[10,11,3,3],"labels":[-100,11,-100,-100],"length":2,"source":"a",'
        b'"attention_mask":[1,1,0,0]}\n'
        b'{"id":1,"input_ids":[20,21,22,23],"labels":[-100,21,22,23],"length":4,"source":"a",'
        b'"attention_mask":[1,1,1,1]}\n'
    )
    tokens = Seal.decode((out / seal_name(0)).read_bytes(), 0).tokens
    assert tokens is not None
    assert tokens.tolist() == [2, 4]


def test_encoded_rows_to_the_byte(tmp_path: Path) -> None:
    path, out = write(tmp_path / "rows.jsonl", [1, 3]), tmp_path / "out"
    assert main(run_arguments(out, [path], 2, "--encode", ENCODE, "--pad", 3, "--no-progress")) == 0
    first, second = (out / chunk_name(0)).read_bytes().splitlines()
    assert first == (
        b'{"id":0,"copy":null,"length":1,"input_ids":{"$array":["int32",[3],0]},'
        b'"labels":{"$array":["int32",[3],16]},"attention_mask":{"$array":["int32",[3],32]}}'
    )
    assert second.startswith(b'{"id":1,"copy":null,"length":3,')
    numbers = np.frombuffer((out / arrays_name(0)).read_bytes()[:96], "<i4").reshape(6, 4)
    assert numbers[:, :3].tolist() == [[10, 0, 0], [-100] * 3, [1, 0, 0], [20, 21, 22], [-100, 21, 22], [1, 1, 1]]


def test_the_rows_are_those_that_are_made_at_run_time(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [5, 1, 8, 3])
    padded = run_arguments(tmp_path / "padded", [path], 2, "--pad", 8, "--pad-token", 7, "--no-progress")
    raw = run_arguments(tmp_path / "raw", [path], 2, "--encode", ENCODE, "--no-progress")
    assert (main(padded), main(raw)) == (0, 0)
    made = LazyShardedSequences(tmp_path / "raw", form=Pad(8, token=7), dp_rank=0, dp_size=1)
    expected = [{name: values.tolist() for name, values in one.items()} for one in made]
    found = [{name: row[name] for name in expected[0]} for row in StreamReader(tmp_path / "padded")]
    assert found == expected
    assert expected[1]["attention_mask"] == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [1, 2, 3, 4, 5]}, "--pad: 5 tokens, more than the 4 to which rows are padded"),
        ({"input_ids": [1], "position_ids": [0]}, "--pad: 'position_ids' holds something for each token, which would"),
    ],
)
def test_a_row_that_cannot_be_padded_is_a_bad_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], reason: str
) -> None:
    path = write(tmp_path / "rows.jsonl", [2])
    path.write_bytes(path.read_bytes() + encode_row(row))
    arguments = run_arguments(tmp_path / "out", [path], 2, "--pad", 4, "--no-progress")
    assert main(arguments) == 3
    assert f"{path}:2: {reason}" in capsys.readouterr().err
    assert main([*arguments, "--on-bad-row", "quarantine"]) == 0
    (entry,) = map(json.loads, (tmp_path / "out" / "quarantine.jsonl").read_bytes().splitlines())
    assert entry["reason"].startswith(reason)


def test_a_padded_row_is_no_longer_than_rows_may_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", [2])
    arguments = run_arguments(tmp_path / "out", [path], 2, "--pad", 100, "--max-row-bytes", 200, "--no-progress")
    assert main(arguments) == 3
    assert "--pad made a row of " in capsys.readouterr().err


@pytest.mark.parametrize("shuffle", [0, 3])
def test_going_on_after_any_row(tmp_path: Path, shuffle: int) -> None:
    path = write(tmp_path / "rows.jsonl", [2, 4, 1, 3, 2])
    settings = make(path, transform=f"{RECIPES}:some", shuffle=shuffle)
    whole = list(drain(settings))
    assert sorted(row["id"] for row, _ in whole) == [1, 2, 2, 4]
    for taken, (_, position) in enumerate(whole, 1):
        assert list(drain(settings, position)) == whole[taken:]


def test_workers_pad_as_one_process_does(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [2, 4, 1, 3])
    there = make(path, transform=f"{RECIPES}:twice", workers=1)
    assert list(drain(there)) == list(drain(make(path, transform=f"{RECIPES}:twice")))


def test_check_tells_to_what_rows_are_padded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = run_arguments(tmp_path / "out", [write(tmp_path / "rows.jsonl", [2])], 2, "--pad", 4)
    assert main(["check", *arguments[1:]]) == 0
    assert "padded to 4 tokens with 0" in capsys.readouterr().out


def test_the_manifest_of_an_encoded_stream_tells_its_form(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [2])
    for form in ("pad", "split"):
        out = tmp_path / form
        assert main(run_arguments(out, [path], 2, "--encode", ENCODE, f"--{form}", 4, "--no-progress")) == 0
        assert StreamReader(out).encoding == {"kind": "function", "function": ENCODE, "form": form}


def test_rows_of_swift_that_are_cut_may_be_of_any_length() -> None:
    common: dict[str, Any] = {"sources": plain_sources(["a"]), "out": "out", "samples_per_chunk": 1}
    common |= {"encode": "swift", "model": "m"}
    forms: list[dict[str, Any]] = [{"split": 8}, {"split": 8, "max_length": 16}, {"pad": 8}, {}]
    lengths = [Settings(**common, **more).encoding for more in forms]
    assert [one.max_length for one in lengths if one is not None] == [2**31 - 1, 16, None, None]


def test_a_pipeline_of_padded_rows_has_their_lengths(tmp_path: Path) -> None:
    pipeline = Pipeline(make(write(tmp_path / "rows.jsonl", [2, 4])), None, warn=lambda text: None)
    try:
        batch = pipeline.reader.read()
        assert batch is not None
        assert batch.tokens == [2]
    finally:
        pipeline.close()
