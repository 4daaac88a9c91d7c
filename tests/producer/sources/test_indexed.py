"""Megatron's IndexedDataset as a source: its rows, continuing after each, damage and change, kills, blend files."""

import json
import os
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard import StreamReader
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.sources import indexed as indexed_source
from lazyshard_producer.sources.indexed import IndexedSource
from lazyshard_producer.sources.source import Context
from tests.conversion.megatron_core import corpora, write
from tests.harness.processes.producing import run_arguments, seal
from tests.producer.commands import Fails
from tests.producer.sources.reading import lines, parsed, refusal, take

DOCUMENTS: Final = [[[1, 2], [3]], [], [[4, 5, 6]], [[]]]


def opened(prefix: Path, position: Any = None, most: int = 1 << 20) -> IndexedSource:
    return IndexedSource(SourceSettings(path=f"{prefix}.idx"), position, Context(prefix.parent / "out", most))


def values(source: IndexedSource) -> list[Any]:
    """All rows, parsed; of a refused one what is wrong."""
    found = list(map(parsed, lines(source)))
    source.close()
    return found


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write(tmp_path / "a", "uint16", DOCUMENTS)
    return tmp_path / "a"


def test_rows_of_documents_and_of_sequences(prefix: Path, tmp_path: Path) -> None:
    assert values(opened(prefix)) == [
        {"input_ids": [1, 2, 3], "lengths": [2, 1]},
        {"input_ids": [], "lengths": []},
        {"input_ids": [4, 5, 6]},
        {"input_ids": []},
    ]
    write(tmp_path / "m", "int8", [[[1], [2]], [], [[3]]], modes=True)
    assert values(opened(tmp_path / "m")) == [
        {"input_ids": [1, 2], "lengths": [1, 1]},
        {"input_ids": [], "lengths": []},
        {"input_ids": [3]},
    ]


@settings(max_examples=40)
@given(corpora(), st.integers(1, 4), st.integers(1, 30), st.integers(1, 4))
def test_every_row_once(corpus: tuple[str, Any, Any], piece_rows: int, piece_bytes: int, piece_sequences: int) -> None:
    """Whatever a piece may hold, and wherever it is continued: the rows are those of the file, each once."""
    dtype, documents, modes = corpus
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_source, "PIECE_ROWS", piece_rows)
        patch.setattr(indexed_source, "PIECE_BYTES", piece_bytes)
        patch.setattr(indexed_source, "_PIECE_SEQUENCES", piece_sequences)
        prefix = Path(folder) / "a"
        write(prefix, dtype, documents, modes=modes)
        expected = values(opened(prefix))
        assert [row["input_ids"] for row in expected] == [list(chain(*document)) for document in documents]
        assert [row.get("lengths", [len(row["input_ids"])]) for row in expected] == [
            list(map(len, document)) for document in documents
        ]
        source = opened(prefix)
        positions = [source.entry(source.start)]
        positions += [source.entry(rows.position(index)) for _, rows, index in take(source)]
        assert len(positions) == len(expected) + 1
        for taken, position in enumerate(positions):
            again = opened(prefix, json.loads(json.dumps(position)))
            assert again.entry(again.start) == position
            assert values(again) == expected[taken:]


def test_marks_places_and_progress(prefix: Path) -> None:
    source = opened(prefix)
    assert (source.name, source.live, source.blank, source.start) == (f"{prefix}.idx", False, 0, 0)
    assert source.progress == (0, 12)
    rows = source.read()
    assert rows is not None
    assert [rows.position(index) for index in (0, 3)] == [1, 4]
    assert rows.place(2) == (f"{prefix}.idx", 3, None)
    assert (source.reached, source.progress) == (4, (12, 12))
    position = source.entry(3)
    digests = position.pop("xxh3")
    assert position == {"kind": "megatron", "path": f"{prefix}.idx", "rows": "document", "row": 3}
    assert [len(digest) for digest in digests] == [16, 16]


@pytest.mark.parametrize(
    ("sequences", "says"), [(10, "60 sequences"), (1000, "0 tokens in 60 sequences")], ids=["unread", "written"]
)
def test_too_long_rows_are_refused(sequences: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_source, "_PIECE_SEQUENCES", sequences)
    write(tmp_path / "a", "uint8", [[[1]], [[2] * 60], [[3]], [[]] * 60, [[4]]])
    first, long, second, empty, last = values(opened(tmp_path / "a", most=100))
    assert [first, second, last] == [{"input_ids": [1]}, {"input_ids": [3]}, {"input_ids": [4]}]
    assert long.startswith("60 tokens in 1 sequence: ") and empty.startswith(f"{says}: ")


def test_floats_that_are_no_numbers_refuse_their_row(tmp_path: Path) -> None:
    write(tmp_path / "a", "float32", [[[0.5]], [[1.0, float("nan")]], [[float("-inf")]]])
    good, nan, infinity = values(opened(tmp_path / "a"))
    assert good == {"input_ids": [0.5]}
    assert "token 1 is NaN" in nan and "token 0 is an infinity" in infinity


@pytest.mark.parametrize(
    ("at", "data", "says"),
    [
        (0, b"X", ""),  # magic
        (114, b"\3", ""),  # last document
        (98, b"\1", ""),  # a boundary
        (34 + 4 * 4 + 2 * 8, np.array([8], "<i8").tobytes(), "sequence 2, in document 2"),  # pointer of a sequence
    ],
)
def test_a_damaged_index(at: int, data: bytes, says: str, prefix: Path, tmp_path: Path, fails: Fails) -> None:
    path = Path(f"{prefix}.idx")
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)
    fails(run_arguments(tmp_path / "out", [path]), 4, f"{path}: expected ", says)


def test_files_that_are_not_there_or_cut(prefix: Path, tmp_path: Path) -> None:
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    os.truncate(data, 11)
    # The last sequence is empty, and begins behind what is left.
    assert "sequence 3 within the 11 bytes" in str(refusal(lambda: take(opened(prefix))))
    data.rename(tmp_path / "b.bin")
    assert refusal(opened, prefix).file == str(data)
    assert refusal(opened, tmp_path / "b").file == str(tmp_path / "b.idx")
    assert main(run_arguments(tmp_path / "out", [index.rename(tmp_path / "index")])) == 4
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.parametrize("change", ["replaced", "cut", "gone"])
def test_files_that_change_while_they_are_read(suffix: str, change: str, tmp_path: Path) -> None:
    write(tmp_path / "a", "int32", [[[number] * 600] for number in range(600)])
    write(tmp_path / "b", "int32", [[[number] * 599] for number in range(600)])
    source = opened(tmp_path / "a")
    rows = source.read()
    assert rows is not None
    assert len(rows.lines) < 512
    path = tmp_path / f"a{suffix}"
    if change == "cut":
        os.truncate(path, 1000)
    elif change == "replaced":
        (tmp_path / f"b{suffix}").rename(path)
    else:
        path.unlink()
    for error in (refusal(source.entry, rows.position(0)), refusal(take, source)):
        assert error.file == str(path)
        assert str(error.actual).startswith("no such file" if change == "gone" else "another one")


def test_what_was_read_by_an_earlier_run_must_stay(prefix: Path) -> None:
    position = opened(prefix).entry(2)
    for field, value in {"kind": "jsonl", "path": "b", "rows": "sequence", "row": -1, "xxh3": []}.items():
        assert "no position" in str(refusal(opened, prefix, position | {field: value}))
    for wrong in ({"row": True}, {"row": 5}, {"xxh3": [1, 2]}):
        assert "no position" in str(refusal(opened, prefix, position | wrong))
    write(prefix, "uint16", [*DOCUMENTS, [[7]]])
    assert refusal(opened, prefix, position).file == f"{prefix}.idx"
    # Of which nothing was read yet.
    assert len(values(opened(prefix, position=opened(prefix).entry(0)))) == 5


def test_prefixes_and_blend_files_on_the_command_line(here: Path) -> None:
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        write(Path(name), "uint8", [[[token]]] * 40)
    Path("blend.txt").write_text("3 a\n1 b\n")
    Path("blend.json").write_text('{"train": [3, "a", 1, "b"], "valid": ["c"]}')
    Path("plain.txt").write_text("a b c")
    arguments = {
        "one": ["megatron:a"],
        "text": ["megatron-blend:blend.txt"],
        "json": ["megatron-blend:blend.json"],
        "plain": ["megatron-blend:plain.txt"],
        "both": ["megatron-blend:blend.txt", "--weight", "0.5", "--source", "megatron:c", "--weight", "0.5"],
    }
    found = {}
    for name, source in arguments.items():
        assert main(run_arguments(Path(name), [], 40, "--source", *source)) == 0
        found[name] = [row["input_ids"][0] for row in StreamReader(Path(name))]
    assert found["one"] == [1] * 40
    assert found["plain"] == [1] * 40 + [2] * 40 + [3] * 40
    assert found["text"] == found["json"]
    assert found["text"][:40].count(1) == 30
    assert sorted(found["text"]) == [1] * 40 + [2] * 40
    assert [found["both"][:40].count(token) for token in (1, 2, 3)] == [15, 5, 20]
    assert [entry["path"] for entry in seal(Path("both"), 0)["source"]["sources"]] == ["a.idx", "b.idx", "c.idx"]


def test_refused_arguments(prefix: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails) -> None:
    monkeypatch.chdir(prefix.parent)
    Path("bad.txt").write_text("0 a 1 b")
    Path("good.txt").write_text("1 a 1 b")
    Path("rows.jsonl").write_text('{"id": 1}\n')
    for source, code, says in (
        ("megatron-blend:nowhere", 2, "--source: "),
        ("megatron-blend:bad.txt", 2, "--source: bad.txt: "),
        ("megatron-blend:good.txt rows.jsonl", 2, "--weight: rows.jsonl: "),
        ("megatron-blend:good.txt rows.jsonl --weight 1", 2, "--source: "),
        ("megatron:", 2, "--source: "),
        ("a.idx megatron:a", 4, "a.idx: expected every source once"),
        ("megatron:b", 4, "b.idx: expected a readable file"),
    ):
        fails(run_arguments(Path("out"), [], 4, "--source", *source.split()), code, f"error: {says}")
    assert not Path("out").exists()
