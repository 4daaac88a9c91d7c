"""How the commands show rows with arrays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lazyshard import BFLOAT16, ChunkWriter, LazyShardedDataset, Order
from lazyshard.cli.main import main


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    with ChunkWriter(tmp_path / "stream", 2, arrays=True) as writer:
        for number in range(3):
            bits = np.array([0x3FC0], np.uint16).view(BFLOAT16)
            writer.write({"id": number, "x": np.arange(30, dtype=np.int16).reshape(2, 15), "b": [bits]}, tokens=2)
    return tmp_path / "stream"


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_inspected_row_tells_dtype_shape_and_first_numbers(stream: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "inspect", stream, 1)
    assert "sample 1: chunk 0, row 1 (byte 80), 80 bytes and 72 bytes of arrays, 2 tokens" in text
    numbers = ", ".join(map(str, range(20)))
    assert f'"x": "array of int16, shape 2 x 15: {numbers}, ..."' in text
    assert '"array of bfloat16, shape 1: 1.5"' in text


def test_inspected_row_is_shown_whole_if_asked_for(stream: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "inspect", stream, 1, "--full")
    assert json.loads(text.partition("\n")[2]) == {"id": 1, "x": [list(range(15)), list(range(15, 30))], "b": [[1.5]]}


def test_inspected_stream_and_chunk_tell_of_arrays(stream: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "inspect", stream)
    assert "arrays of a row in bytes, of 3 rows\n  min 72  p5 72  median 72  p95 72  max 72  mean 72" in text
    assert "x   int16 array  " in text
    assert "array of bfloat16 array" in text
    assert "bytes of arrays  144" in shown(capsys, "inspect", stream, "--chunk", 0)


def test_json_holds_the_row_as_it_is_published(stream: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [row] = json.loads(shown(capsys, "inspect", stream, 1, "--json"))["rows"]
    assert row["arrays_bytes"] == 72
    assert row["value"]["x"] == {"$array": ["int16", [2, 15], 0]}
    values = json.loads(shown(capsys, "inspect", stream, "--chunk", 0, "--json"))
    assert values["arrays_bytes"] == 144
    assert json.loads(shown(capsys, "inspect", stream, "--json"))["row_arrays_bytes"]["max"] == 72


def test_traced_row_shows_arrays(stream: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=1, order=Order(micro_batches_per_step=1))
    (tmp_path / "state.json").write_text(json.dumps(dataset.state_dict(2)))
    text = shown(capsys, "trace", stream, "--state", tmp_path / "state.json", "--sample", 1, "--rows")
    assert '"x": "array of int16, shape 2 x 15: 0, 1, ' in text


def test_verified_stream_counts_the_bytes_of_side_files(stream: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "2 chunks, 3 samples, 456 bytes, ended: all is well" in shown(capsys, "verify", stream)


def test_status_counts_side_files(stream: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = sum(path.stat().st_size for path in stream.iterdir() if path.name.startswith("chunk_"))
    assert json.loads(shown(capsys, "status", stream, "--json"))["used_bytes"] == size
