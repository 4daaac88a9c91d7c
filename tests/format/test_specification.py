"""The examples of `docs/format.md` are what the code writes and reads."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from lazyshard.format.arrays import pack_row
from lazyshard.format.records import Manifest
from lazyshard.format.row import check_row
from lazyshard.format.seal import Seal
from tests.format.records import RECORDS, Record, written

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
EXAMPLE = DOCUMENT.partition("## A worked example")[2]


def example(pattern: str) -> bytes:
    found = re.search(pattern, EXAMPLE, re.MULTILINE)
    assert found, pattern
    return found[1].encode()


def test_example_seal_matches_the_example_rows() -> None:
    dump = "".join(re.findall(r"^000000\d0: ((?:[0-9a-f]{2,4} )+)", EXAMPLE, re.MULTILINE))
    data = bytes.fromhex(dump)
    text = example(r'^(\{"format":1,"chunk":0.*\})$') + b"\n"
    seal = Seal.decode(text, 0)
    assert seal.encode() == text
    assert seal.size == len(data) == 34
    rows = [data[start:stop] for start, stop in zip(seal.offsets[:-1], seal.offsets[1:], strict=True)]
    assert [check_row(row) for row in rows] == [{"text": "one"}, {"text": "zwei ü"}]
    assert [xxhash.xxh3_64_intdigest(row) for row in rows] == seal.digests.tolist()
    for field, array in (("offsets", seal.offsets), ("xxh3", seal.digests), ("tokens", seal.tokens)):
        assert array is not None
        cell = example(rf"^\| `{field}` \| `([0-9a-f ]+)` \|").decode()
        assert bytes.fromhex(cell) == array.tobytes()


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_example_file_is_read_and_written_the_same(record: Record) -> None:
    for text in re.findall(rf"^{re.escape(record.file)} +(\{{.*\}})$", DOCUMENT, re.MULTILINE):
        assert written(record.decode(text.encode())) == text.encode() + b"\n"


def test_example_of_each_file_is_there() -> None:
    shown = set(re.findall(r"^(\S+\.(?:json|end|owner)) +\{.*\}$", DOCUMENT, re.MULTILINE))
    assert {record.file for record in RECORDS.values() if "chunk" not in record.file} - shown == {"lazyshard.json"}


def test_example_with_arrays_is_what_is_written() -> None:
    arrays = EXAMPLE.partition("### The same with arrays")[2]

    def shown(name: str) -> bytes:
        found = re.search(rf"^{re.escape(name)} +(.*)$", arrays, re.MULTILINE)
        assert found, name
        return found[1].encode()

    row = {"id": 7, "input_ids": np.array([1, -2, 3], np.int32), "mel": np.array([[0, 0.5], [1, 1.5]], np.float16)}
    line, data = pack_row(row)
    assert line == shown("chunk_00000.jsonl") + b"\n"
    assert data == bytes.fromhex(shown("chunk_00000.arrays").decode())
    assert f"line has {len(line)} bytes, its newline included, its side file {len(data)}:" in " ".join(arrays.split())
    manifest = Manifest.decode(shown("stream.json"))
    assert manifest.arrays
    assert manifest.encode() == shown("stream.json") + b"\n"
    seal = Seal.decode(shown("chunk_00000.jsonl.completed"), 0)
    assert seal.encode() == shown("chunk_00000.jsonl.completed") + b"\n"
    assert seal.arrays is not None
    assert (seal.size, seal.arrays.size) == (len(line), len(data))
    assert seal.digests.tolist() == [xxhash.xxh3_64_intdigest(line)]
    assert seal.arrays.digests.tolist() == [xxhash.xxh3_64_intdigest(data)]
    assert f"`{xxhash.xxh3_64_hexdigest(b'')}` of no bytes" in DOCUMENT


def test_minimal_producer_fills_a_foreign_directory(tmp_path: Path) -> None:
    known: dict[str, Any] = {}
    exec(DOCUMENT.partition("```python\n")[2].partition("```")[0], known)
    for chunk, rows in enumerate(([b'{"n":0}\n', b'{"n":1}\n'], [b'{"n":2}\n'])):
        known["publish"](tmp_path, chunk, rows)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "chunk_00000.jsonl": b'{"n":0}\n{"n":1}\n',
        "chunk_00000.jsonl.completed": b"",
        "chunk_00001.jsonl": b'{"n":2}\n',
        "chunk_00001.jsonl.completed": b"",
    }
