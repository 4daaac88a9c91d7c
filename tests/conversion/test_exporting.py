"""`lazyshard export`: as Megatron Core reads what it writes, rows that cannot be exported, and the command itself."""

import json
import os
import re
import signal
import struct
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard.cli.export import ExportSettings, export, read_row
from lazyshard.cli.main import main
from lazyshard.conversion import indexed
from lazyshard.conversion.indexed import DTYPES, IndexedReader, IndexHeader, check_boundaries, check_sequences
from lazyshard.errors import ConfigInvalid, FileInvalid, FileRefused, RowInvalid, StreamInvalid, StreamMissing
from tests.cli.commands import lazyshard
from tests.conversion import megatron_core
from tests.conversion.megatron_core import Content, content, corpora, write
from tests.stream.streams import foreign, forked, names, publish_rows, raised, recorded, refusal_of


def stream(directory: Path, rows: Iterable[dict[str, Any]], per_chunk: int = 3, *, end: bool = True) -> Path:
    return publish_rows(directory, per_chunk, rows, end=end)


@pytest.fixture(autouse=True)
def megatron() -> None:
    megatron_core.module()


def ids(*rows: Sequence[float]) -> list[dict[str, Any]]:
    return [{"input_ids": row} for row in rows]


def exported(folder: Path, rows: Iterable[dict[str, Any]], **options: Any) -> Content:
    export(stream(folder / "s", rows), folder / "a", ExportSettings(**options))
    return content(folder / "a")


@settings(max_examples=40)
@given(corpora())
def test_megatron_core_reads_what_the_rows_hold(corpus: tuple[str, Any, Any]) -> None:
    dtype, documents, modes = corpus
    rows = [{"input_ids": [*chain(*document)], "lengths": list(map(len, document))} for document in documents]
    chosen = ExportSettings(dtype=dtype, lengths="lengths")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = megatron_core.build(folder / "modes", dtype, documents, modes=modes)
        assert content(folder / "modes") == expected
        megatron_core.build(folder / "theirs", dtype, documents)
        theirs = [(folder / f"theirs{suffix}").read_bytes() for suffix in (".bin", ".idx")]
        write(folder / "written", dtype, documents)
        assert [(folder / f"written{suffix}").read_bytes() for suffix in (".bin", ".idx")] == theirs
        source, prefix = stream(folder / "s", rows), folder / "ours"
        if not any(any(document) for document in documents):
            raised(StreamInvalid, export, source, prefix, chosen)
            return
        made = export(source, prefix, chosen)
        assert megatron_core.read(prefix) == expected
        assert (made["documents"], made["sequences"]) == (len(documents), len(expected.sequences))
        files = [Path(made["data"]), Path(made["index"])]
        assert made["size"] == sum(file.stat().st_size for file in files)
        assert [file.read_bytes() for file in files] == theirs


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([[0, 65498]], "uint16"),
        ([[0, 65499]], "int32"),
        ([[5], [65498], [65499], [7]], "int32"),
        ([[5], [-100], [6]], "int32"),
    ],
)
def test_type_that_megatron_core_would_choose(rows: list[list[float]], dtype: str, tmp_path: Path) -> None:
    found = exported(tmp_path, ids(*rows))
    assert (found.dtype, found.sequences) == (dtype, rows)
    if max(map(max, rows)) > 0 <= min(map(min, rows)):
        chosen = megatron_core.module().DType.optimal_dtype(int(max(map(max, rows))) + 1)
        assert np.dtype(chosen).name == dtype


def test_documents_of_rows_of_a_key_and_of_the_stream(tmp_path: Path) -> None:
    rows = [row | {"document": number} for row, number in zip(ids([1], [2, 3], [4], [5]), (0, 0, 2, 0), strict=True)]
    source = stream(tmp_path / "s", rows)
    for boundaries, expected in (("row", [0, 1, 2, 3, 4]), ("stream", [0, 4]), ("key:document", [0, 2, 3, 4])):
        prefix = tmp_path / boundaries.replace(":", "-")
        export(source, prefix, ExportSettings(boundaries=boundaries))
        assert content(prefix) == Content("uint16", [[1], [2, 3], [4], [5]], expected)


def test_rows_of_several_sequences_beside_rows_of_one(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [1, 2, 3], "lengths": [2, 0, 1]},
        {"input_ids": [4]},
        {"input_ids": [], "lengths": []},
    ]
    found = exported(tmp_path, rows, lengths="lengths")
    assert found == Content("uint16", [[1, 2], [], [3], [4]], [0, 3, 4, 4])


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ({"text": "x"}, {}, "'text'"),
        ({"input_ids": "1 2"}, {}, "'1 2'"),
        ({"input_ids": [1, 2.0]}, {}, r"'input_ids'\[1\] is float 2.0"),
        ({"input_ids": [True]}, {}, r"'input_ids'\[0\] is bool True"),
        ({"input_ids": [2**63]}, {}, "9223372036854775808"),
        ({"input_ids": [2**31]}, {}, "2147483648 .* int32, .*; give --dtype int64"),
        ({"input_ids": [70000]}, {"dtype": "uint16"}, "70000 .* uint16, which holds 0 to 65535"),
        ({"input_ids": [1e300]}, {"dtype": "float32"}, "float32"),
        ({"input_ids": [1, 2], "lengths": [1]}, {"lengths": "lengths"}, "1, but the row has 2"),
        ({"input_ids": [1], "lengths": [2, -1]}, {"lengths": "lengths"}, "1, but the row has 1"),
        ({"input_ids": [1]}, {"boundaries": "key:doc"}, "'doc'"),
    ],
)
def test_rows_that_cannot_be_exported(row: Any, options: Any, says: str, tmp_path: Path) -> None:
    good = {"input_ids": [1], "doc": 1}
    source = stream(tmp_path / "s", [good, good, good, good, row])
    error = refusal_of(RowInvalid, rf"sample 4: .*{says}", export, source, tmp_path / "a", ExportSettings(**options))
    assert (error.line, error.file) == (2, str(source / "chunk_00001.jsonl"))
    assert names(tmp_path) == ["s"]


def test_what_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(StreamMissing, export, tmp_path, tmp_path / "a", ExportSettings())
    good = stream(tmp_path / "good", ids([1]))
    for source in (stream(tmp_path / "live", ids([1]), end=False), stream(tmp_path / "empty", [])):
        raised(StreamInvalid, export, source, tmp_path / "a", ExportSettings())
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.indexed_dataset", None)
    refusal_of(ImportError, r"lazyshard\[megatron\]", export, good, tmp_path / "a", ExportSettings())
    assert names(tmp_path) == ["empty", "good", "live"]


def test_foreign_directory_and_a_report_of_all_chunks(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    source = foreign(tmp_path / "s", b'{"input_ids":[1]}\n{"input_ids":[2]}\n', b'{"input_ids":[3]}\n', end=True)
    export(source, tmp_path / "a", ExportSettings(), report=lambda *what: told.append(what))
    assert content(tmp_path / "a").sequences == [[1], [2], [3]]
    assert told == [("exporting", done, 2) for done in (0, 1, 2)]


@pytest.mark.parametrize(("suffix", "meanwhile"), [(".bin", False), (".idx", False), (".idx", True)])
def test_file_replaced_when_told(suffix: str, meanwhile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, there = stream(tmp_path / "s", ids([1, 2])), tmp_path / f"a{suffix}"
    if meanwhile:
        monkeypatch.setattr("lazyshard.cli.export.read_row", partial(_beside, there, read_row))
    else:
        there.write_bytes(b"precious")
    refusal_of(ConfigInvalid, there.name, export, source, tmp_path / "a", ExportSettings())
    assert (names(tmp_path), there.read_bytes()) == ([there.name, "s"], b"precious")
    export(source, tmp_path / "a", ExportSettings(force=True))
    assert content(tmp_path / "a").sequences == [[1, 2]]
    assert names(tmp_path) == ["a.bin", "a.idx", "s"]


def _beside(there: Path, read: Any, *arguments: Any) -> Any:
    there.write_bytes(b"precious")
    return read(*arguments)


def test_both_are_on_the_device_before_they_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = stream(tmp_path / "s", ids([1, 2]))
    (tmp_path / "t").mkdir()
    calls = recorded(monkeypatch)
    export(source, tmp_path / "t" / "a", ExportSettings())
    done = [call for call in calls if not call.startswith("unlink")]
    assert done == ["sync temporary", "sync temporary", "rename a.bin", "sync t", "rename a.idx", "sync t"]


ROWS: Final = ids([1, 2], [3], [4, 5, 6])


@pytest.mark.full
def test_export_and_export_again(tmp_path: Path) -> None:
    source, prefix = stream(tmp_path / "s", ROWS), tmp_path / "a"
    done = lazyshard("export", source, prefix)
    assert (done.returncode, done.stderr) == (0, "")
    holds = f"{prefix}.bin and .idx hold 3 documents, 3 sequences, 6 tokens of uint16; 114 bytes"
    assert re.fullmatch(rf"exported: {re.escape(holds)} \(\d+\.\d s\)\n", done.stdout)
    done = lazyshard("export", source, prefix)
    assert (done.returncode, done.stdout, f"{prefix}.bin" in done.stderr) == (3, "", True)
    done = lazyshard("export", source, prefix, "--force", "--dtype", "int32", "--json")
    counts = {"samples": 3, "documents": 3, "sequences": 3, "tokens": 6, "size": 126}
    files = {"data": f"{prefix}.bin", "index": f"{prefix}.idx", "dtype": "int32"}
    assert (done.returncode, json.loads(done.stdout)) == (0, files | counts)


@pytest.mark.full
@pytest.mark.parametrize(("by", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_stopped_and_run_again(by: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ids(*([number] for number in range(10)))
    source, prefix, calls = stream(tmp_path / "s", rows), tmp_path / "a", count()

    def stopped(*given: Any) -> Any:
        if next(calls) == 5:
            os.kill(os.getpid(), by)
        return read_row(*given)

    def run() -> None:
        monkeypatch.setattr("lazyshard.cli.export.read_row", stopped)
        os._exit(main(["export", str(source), str(prefix)]))

    assert forked(run) == code
    left = [name for name in names(tmp_path) if name != "s"]
    # Of a killed one its own file is left, under a name that no other export takes.
    assert [bool(re.fullmatch(r"\.a\.bin\.[0-9a-f]{16}", name)) for name in left] == [True] * (code < 0)
    assert main(["export", str(source), str(prefix)]) == 0
    assert content(prefix).sequences == [row["input_ids"] for row in rows]
    assert names(tmp_path) == [*left, "a.bin", "a.idx", "s"]


GOLDEN = b"MMIDIDX\0\0" + b"\1\0\0\0\0\0\0\0" + b"\x08" + b"\3\0\0\0\0\0\0\0" + b"\2\0\0\0\0\0\0\0"
"""Version 1, uint16, 3 sequences, 2 boundaries."""

THREE = IndexHeader(DTYPES["uint16"], 3, 1)
SIZE = 34 + 3 * 4 + 3 * 8 + 2 * 8


def index(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def packed(version: int = 1, code: int = 8, sequences: int = 3, boundaries: int = 2) -> bytes:
    return struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, sequences, boundaries)


@pytest.mark.parametrize(
    ("head", "size", "says"),
    [
        (b"", 0, "expected an index"),
        (b'{"id": 1}\n' * 4, 40, "found b'{\"id\": 1}'"),
        (b"TNTIDX\0\0" + bytes(40), 48, "fairseq"),
        (GOLDEN[:20], 20, "34 bytes, found 20 bytes"),
        (packed(version=2), SIZE, "version 1, found version 2"),
        (packed(code=9), SIZE, "from 1 to 8, found code 9"),
        (packed(boundaries=0), 70, "found none"),
        (GOLDEN, SIZE - 1, "expected 86 bytes, or 89 with modes, for 3 sequences and 1 documents, found 85"),
        (packed(boundaries=2**64 - 1), SIZE, "18446744073709551614"),
    ],
)
def test_no_index(head: bytes, size: int, says: str) -> None:
    error = raised(FileInvalid, IndexHeader.decode, head, size, "a.idx")
    assert str(error).startswith("a.idx: expected ") and says in str(error)


@given(st.binary(max_size=2 * indexed.HEADER_BYTES), st.integers(0, 2**64))
def test_no_bytes_break_it(tail: bytes, size: int) -> None:
    for head in (tail, GOLDEN[:17] + tail[:17]):
        try:
            header = IndexHeader.decode(head, size, "a.idx")
        except FileInvalid:
            continue
        assert size - header.starts[-1] in (0, header.sequences)


@pytest.mark.parametrize(
    ("boundaries", "first", "documents", "found"),
    [((1, 2), 0, 1, "1"), ((0, 2), 0, 1, "2"), ((0, 4), 0, 1, "4"), ((4, 3, 9), 2, 5, "boundary 3 .* 4 to 9, found 3")],
)
def test_boundaries_that_cannot_be(boundaries: tuple[int, ...], first: int, documents: int, found: str) -> None:
    header = IndexHeader(DTYPES["int32"], 9, 5)
    check_boundaries(index(0, 0, 4, 4, 9, 9), 0, header, "a.idx")
    given = index(*boundaries), first, THREE if documents == 1 else header, "a.idx"
    refusal_of(FileInvalid, rf"^a\.idx: .*{found}", check_boundaries, *given)


@pytest.mark.parametrize(
    ("length", "pointer", "end"), [(-1, 0, ""), (1, -2, ""), (1, 9, "byte 11"), (0, 11, ""), (2**31 - 1, 2**63 - 1, "")]
)
def test_sequences_outside_of_the_data(length: int, pointer: int, end: str) -> None:
    check_sequences(index(5, 0, 1), index(0, 10, 8), 0, THREE, 10, "a.idx")
    error = raised(FileInvalid, check_sequences, index(5, length), index(0, pointer), 7, THREE, 10, "a.idx")
    assert f"found {length} tokens of uint16 at byte {pointer}" in str(error) and end in str(error)
    assert error.sequence == 8


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    write(tmp_path / "a", "int32", [[[number]] for number in range(1000)])
    return tmp_path / "a"


def test_opening_reads_no_more_of_a_large_file(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = Mock(wraps=os.pread)
    monkeypatch.setattr(os, "pread", pread)
    reader = IndexedReader(f"{pair}.idx")
    assert sum(call.args[1] for call in pread.call_args_list) == 34 + 8 + 8 + 4 + 8
    pread.reset_mock()
    reader.tokens(400, 3)
    assert [call.args[1] for call in pread.call_args_list] == [12]


def test_files_that_were_cut_or_are_none(pair: Path, tmp_path: Path) -> None:
    index, data = tmp_path / "a.idx", tmp_path / "a.bin"
    reader = IndexedReader(str(index))
    os.truncate(data, 3998)
    assert raised(FileInvalid, IndexedReader, index).sequence == 999
    os.truncate(data, 10)
    refusal_of(FileInvalid, r"a\.bin: .* 12 bytes at byte 8.* byte 10", reader.tokens, 8, 3)
    data.unlink()
    raised(FileNotFoundError, IndexedReader, index)
    os.mkfifo(data)
    raised(FileRefused, IndexedReader, index)
    os.truncate(index, 2000)
    refusal_of(FileInvalid, r"a\.idx: .* 20042 bytes", reader.sequences, 400, 600)
    refusal_of(FileInvalid, r"\.idx", IndexedReader, index.rename(tmp_path / "index"))
