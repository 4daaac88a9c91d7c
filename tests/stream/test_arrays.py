"""Streams whose rows hold arrays, written and read, streams of encoded rows, and damaged ones."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import xxhash

from lazyshard import BadRows, ChunkWriter, LazyShardedDataset, StreamReader, errors
from lazyshard.cli.main import main
from lazyshard.errors import ChunkCorrupt, RowInvalid, StreamMismatch
from lazyshard.format.batch import check_lines
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.inspection.verification import verify
from lazyshard.store.files import OpenFile
from lazyshard.stream import list_kept
from lazyshard.stream.listing import retire
from tests.data.options import grouped
from tests.stream.arrays import expected, produce, row, values
from tests.stream.damage import Damage, copy, cut, delete, each, edit, flip, put
from tests.stream.streams import fail_when, names, publish_rows, raised, refusal_of

A0, A1, A2, A3 = (f"chunk_0000{number}.arrays" for number in range(4))


def read(directory: Path) -> list[Any]:
    return [values(found) for found in StreamReader(directory, max_wait=0)]


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_come_back_with_their_arrays(overlap: bool, tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2, arrays=True, overlap=overlap) as writer:
        assert writer.arrays
        for number in range(5):
            given = row(number)
            assert writer.write(given) is given
    assert read(tmp_path) == expected(0, 5)
    assert (tmp_path / A0).read_bytes() == bytes.fromhex(
        "00000000 ffffffff 0000 000000000000 01000000 ffffffff 003c 000000000000"
    )
    lines = (tmp_path / "chunk_00001.jsonl").read_bytes().splitlines()
    assert lines[0] == b'{"id":2,"x":{"$array":["int32",[2],0]},"n":[{"$array":["float16",[],8]}]}'
    assert not list_kept(tmp_path).leftovers
    # Arrays are writable views of one buffer for each row.
    reader = StreamReader(tmp_path)
    one, again = reader.read(0), reader.read(0)
    assert one["x"].base is one["n"][0].base
    one["x"][:] = 9
    assert again["x"].tolist() == reader.read(0)["x"].tolist() == [0, -1]
    assert one["n"][0] == 0


def test_bytes_come_back_and_earlier_releases_refuse_their_chunks(tmp_path: Path) -> None:
    stream, shared = tmp_path / "stream", tmp_path / "shared"
    rows: list[dict[str, Any]] = [{"id": number} for number in range(6)]
    rows[0]["images"], rows[5]["a"] = [b"GIF89a", b""], b"\0"
    publish_rows(stream, 2, rows[:4], end=False, arrays=True)
    publish_rows(shared, 2, rows, arrays=True, writer="a", writers=1)
    publish_rows(stream, 2, rows[4:], arrays=True)
    for directory in (stream, shared):
        assert list(StreamReader(directory)) == rows
        seals = [json.loads((directory / f"chunk_0000{number}.jsonl.completed").read_bytes()) for number in range(3)]
        assert [seal["format"] for seal in seals] == [3, 2, 3]
        assert json.loads((directory / "stream.json").read_bytes())["format"] == 2
    side = stream / A2
    side.write_bytes(b"\1" + side.read_bytes()[1:])
    error = raised(ChunkCorrupt, StreamReader(stream).read, 5)
    assert (error.file, error.chunk, error.row) == (str(side), 2, 1)


def test_lines_go_through_unchanged_and_the_key_that_stands_for_arrays_is_refused(tmp_path: Path) -> None:
    lines = b'{"id": 0}\n{"id": 1 }\n{"id":"\\u0024 array"}\n'
    with ChunkWriter(tmp_path, 3, arrays=True) as writer:
        writer.write(b'{"id": 0}\r\n')
        writer.write_lines([b'{"id": 1 }', b'{"id":"\\u0024 array"}\n'])
        for bad in ({"a": {"$array": 1}}, b'{"a":{"$array":1}}', b'{"a":{"\\u0024array":1}}'):
            raised(RowInvalid, writer.write, bad)
        assert raised(RowInvalid, writer.write_lines, [b'{"id":4}', b'{"$array":1}', b'{"id":2}']).index == 1
        writer.write(row(3))
    assert (tmp_path / "chunk_00000.jsonl").read_bytes() == lines
    assert (tmp_path / A0).read_bytes() == b""
    found = list(StreamReader(tmp_path))
    assert found[:4] == [{"id": 0}, {"id": 1}, {"id": "$ array"}, {"id": 4}]
    assert values(found[4]) == expected(3, 4)[0]


def test_array_in_a_stream_without_arrays_is_refused_and_its_files_are_as_ever(tmp_path: Path) -> None:
    source = StreamReader(produce(tmp_path / "source", 2))
    lines = check_lines(source.lines_published(0, 2, 2))
    with_arrays = type(lines)(lines.data, lines.ends, lines.digests, arrays=source.arrays_published(0, 2))
    target = tmp_path / "target"
    with ChunkWriter(target, 2) as writer:
        refusal_of(RowInvalid, "arrays=True", writer.write, row(0))
        refusal_of(ValueError, "arrays", writer.write_lines, with_arrays)
        writer.write({"a": {"$array": ["int32", [1], 0]}})
    assert list(StreamReader(target)) == [{"a": {"$array": ["int32", [1], 0]}}]
    assert A0 not in names(target)
    assert (target / "stream.json").read_bytes().startswith(b'{"format":1,')
    assert b"arrays" not in (target / "chunk_00000.jsonl.completed").read_bytes()


def test_producer_of_a_stream_without_arrays_leaves_others_files_alone(tmp_path: Path) -> None:
    for _ in range(2):
        ChunkWriter(tmp_path, 1).close(end=False)
        for name in (A0, A1):
            (tmp_path / name).write_bytes(b"somebody's")
    with ChunkWriter(tmp_path, 1) as writer:
        for number in range(3):
            writer.write({"id": number})
        assert retire(tmp_path, 2, 3) == 2
    assert [(tmp_path / name).read_bytes() for name in (A0, A1)] == [b"somebody's"] * 2


def test_side_file_that_is_stale_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StreamReader(produce(tmp_path, 2))
    preadv, failures = os.preadv, [errno.ESTALE, errno.ENOTCONN]

    def forgetful(fd: int, buffers: Any, offset: int) -> int:
        if failures:
            raise OSError(failures.pop(), "forgotten")
        return preadv(fd, [buffers[0][:5]], offset)

    monkeypatch.setattr(os, "preadv", forgetful)
    assert values(reader.read(1)) == expected(1, 2)[0]


def test_part_of_a_copy_that_is_stale_is_read_of_the_side_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, side = tmp_path / "copy", tmp_path / "side"
    copy.write_bytes(b"rowsarrays")
    side.write_bytes(b"arrays")
    file = OpenFile(os.open(copy, os.O_RDONLY), side, 6, 4)
    failures = [True]
    assert file.read(1, 9) == b"rrays"
    fail_when(monkeypatch, "pread", lambda *_: failures and failures.pop(), OSError(errno.ESTALE, "forgotten"))
    assert [file.read(0, 6), file.read(1, 9)] == [b"arrays", b"rrays"]


def test_retiring_and_the_next_start_delete_side_files_without_a_chunk(tmp_path: Path) -> None:
    produce(tmp_path, 9, end=False)
    assert retire(tmp_path, 2, 4) == 2
    assert [name for name in names(tmp_path) if name.endswith(".arrays")] == [A2, A3]
    (tmp_path / A1).write_bytes(b"brought back by a power cut")
    assert retire(tmp_path, 2, 4) == 1
    assert A1 not in names(tmp_path)
    (tmp_path / A0).write_bytes(b"brought back")
    assert list_kept(tmp_path).leftovers == [A0]
    (tmp_path / "chunk_00004.arrays").write_bytes(b"of a chunk that was never sealed")
    ChunkWriter(tmp_path, arrays=True).close(end=False)
    assert [name for name in names(tmp_path) if name.endswith(".arrays")] == [A2, A3]


FACTS: dict[str, Any] = {"kind": "function", "function": "m:f", "size": 256}


def test_going_on_with_another_encoding_or_without_arrays_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    encoded, raw, rows = tmp_path / "encoded", tmp_path / "raw", tmp_path / "rows"
    with ChunkWriter(encoded, 2, arrays=True, encoding=FACTS) as writer:
        writer.write(row(0), tokens=1)
        writer.close(end=False)
    produce(raw, 2, end=False)
    ChunkWriter(rows, 2).close(end=False)
    assert (StreamReader(encoded).encoding, StreamReader(raw).encoding) == (FACTS, None)
    before = sorted(path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file())
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (encoded, {"arrays": True, "encoding": FACTS | {"size": 512}}, "size is 256 there and 512 here"),
        (encoded, {"arrays": True}, "its rows are encoded"),
        (encoded, {}, "its rows are encoded"),
        (raw, {"arrays": True, "encoding": FACTS}, "its rows are not encoded"),
        (raw, {}, "arrays"),
        (rows, {"arrays": True}, "arrays"),
    ]
    for directory, options, told in refused:
        refusal_of(StreamMismatch, told, ChunkWriter, directory, **options)
    assert sorted(path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()) == before
    ChunkWriter(encoded, arrays=True, encoding=FACTS).close()
    wrong: list[dict[str, Any]] = [{"arrays": True, "encoding": {"a": []}}, {"encoding": FACTS}]
    for options in wrong:
        refusal_of(ValueError, "encoding", ChunkWriter, tmp_path / "a", 2, **options)
    assert not (tmp_path / "a").exists()


C1 = "chunk_00001.jsonl"
S1 = f"{C1}.completed"

Told = tuple[type[errors.LazyShardError], dict[str, object], str, str, int]
IN_ROW: Told = (errors.RowInvalid, {"line": 2, "byte": 74}, "row", C1, 3)


def described(*arrays: object, data: bytes = b"\2" * 16) -> Damage:
    """Row 1 of chunk 1 describes its arrays so, with a seal to which nothing is wrong."""

    def change(directory: Path) -> None:
        lines = (directory / C1).read_bytes().splitlines(keepends=True)
        lines[1] = orjson.dumps({"id": 3, "x": {"$array": arrays}}) + b"\n"
        old = (directory / A1).read_bytes()[:16]
        (directory / C1).write_bytes(b"".join(lines))
        (directory / A1).write_bytes(old + data)
        digests = [xxhash.xxh3_64_intdigest(part) for part in (*lines, old, data)]
        ends = np.cumsum([0, *map(len, lines)]).astype(np.uint64)
        sealed = SealedArrays(np.array([0, 16, 16 + len(data)], np.uint64), np.array(digests[2:], np.uint64))
        (directory / S1).write_bytes(Seal(1, ends, np.array(digests[:2], np.uint64), arrays=sealed).encode())

    return change


PIPE: Damage = each(delete(A1), lambda place: os.mkfifo(place / A1))

CASES: dict[str, tuple[Damage, Told]] = {
    # The damage; what a reader raises; kind and file that verification finds; the first sample that is not read.
    "shorter": (cut(A1, 31), (errors.ChunkCorrupt, {"actual": "31 bytes"}, "size", A1, 2)),
    "longer": (cut(A1, 33), (errors.ChunkCorrupt, {"actual": "33 bytes"}, "size", A1, 2)),
    "half a terabyte": (cut(A1, 2**39), (errors.ChunkCorrupt, {"actual": "549755813888 bytes"}, "size", A1, 2)),
    "changed bytes": (flip(A1, 17), (errors.ChunkCorrupt, {"row": 1, "byte": 16}, "digest", A1, 3)),
    "missing": (delete(A1), (errors.ChunkMissing, {"chunk": 1}, "arrays-missing", A1, 2)),
    "a pipe": (PIPE, (errors.FileRefused, {"kind": "a named pipe"}, "not-a-file", A1, 2)),
    "of another chunk": (copy(A0, A1), (errors.ChunkCorrupt, {"row": 0, "byte": 0}, "digest", A1, 2)),
    "a seal without arrays": (edit(S1, format=1), (errors.ChunkCorrupt, {"field": "format"}, "invalid", S1, 2)),
    "a seal of a later format": (edit(S1, format=4), (errors.VersionUnsupported, {"actual": "4"}, "version", S1, 2)),
    "an array past the bytes of its row": (described("float64", [3], 0), IN_ROW),
    "a shape that overflows": (described("float64", [2**31, 2**31, 2**31], 0), IN_ROW),
    "a negative offset": (described("uint8", [1], -8), IN_ROW),
}


@pytest.mark.parametrize(("damage", "told"), CASES.values(), ids=CASES)
def test_damage_is_told(damage: Damage, told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error, fields, kind, file, good = told
    damage(produce(tmp_path, 5))
    found: list[Any] = []
    with pytest.raises(errors.LazyShardError) as caught:
        for row in StreamReader(tmp_path, max_wait=0):
            found.append(values(row))
    assert type(caught.value) is error
    assert {name: getattr(caught.value, name) for name in ("file", *fields)} == {"file": str(tmp_path / file), **fields}
    assert found == expected(0, good)
    dataset = LazyShardedDataset(tmp_path, dp_rank=0, dp_size=1, max_wait=0, bad_rows=BadRows("raise"))
    raised(error, lambda: dataset[good])
    assert [(one.severity, one.kind, one.file) for one in verify(tmp_path).findings] == [("damage", kind, file)]
    assert main(["verify", str(tmp_path)]) == 5
    assert main(["inspect", str(tmp_path), str(good)]) in (3, 5)
    assert capsys.readouterr().err.startswith("lazyshard: error: ")


def test_row_with_bad_arrays_is_replaced_by_another_one(tmp_path: Path) -> None:
    flip(A1, 17)(produce(tmp_path, 6))
    for options in ({}, {"shuffle_window": 2}, {"encode_fn": values}):
        dataset: Any = LazyShardedDataset(tmp_path, dp_rank=0, dp_size=1, batch_size=3, **grouped(options))
        found = [row if "encode_fn" in options else values(row) for row in dataset.__getitems__(list(range(6)))]
        assert sorted(found) == expected(0, 3) + expected(2, 3) + expected(4, 6)
        assert dataset.stats().bad_samples == 1


def test_row_of_arrays_as_large_as_none_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    produce(tmp_path, 2)
    size = 2**40
    seal = Seal.decode((tmp_path / "chunk_00000.jsonl.completed").read_bytes(), 0)
    assert seal.arrays is not None
    sealed = SealedArrays(np.array([0, 16, size], np.uint64), seal.arrays.digests)
    os.truncate(tmp_path / A0, size)
    data = Seal(0, seal.offsets, seal.digests, arrays=sealed).encode()
    (tmp_path / "chunk_00000.jsonl.completed").write_bytes(data)
    caught = raised(errors.ChunkCorrupt, StreamReader(tmp_path).read, 1)
    assert (caught.row, caught.byte) == (1, 16)
    assert "2147483648" in str(caught.expected)


def test_verification_and_producer_tell_side_files_that_are_left_over_lost_and_cut(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    each(delete(A0), put(A2, b"of a chunk that was never sealed"))(tmp_path)
    for quick in (False, True):
        found = {(finding.kind, finding.file, finding.severity) for finding in verify(tmp_path, quick=quick).findings}
        assert found == {("arrays-missing", A0, "damage"), ("unpublished", A2, "leftover")}
    refusal_of(errors.ChunkMissing, A0, ChunkWriter, tmp_path, arrays=True)
    copy(A1, A0)(tmp_path)
    cut(A1, 8)(tmp_path)
    refusal_of(errors.ChunkCorrupt, A1, ChunkWriter, tmp_path, arrays=True)


def test_stream_of_rows_alone_is_not_read_by_a_seal_with_arrays(tmp_path: Path) -> None:
    edit("stream.json", format=1)(produce(tmp_path, 2))
    for reader in (StreamReader(tmp_path).read, LazyShardedDataset(tmp_path, dp_rank=0, dp_size=1).__getitem__):
        caught = raised(errors.ChunkCorrupt, reader, 0)
        assert (caught.field, caught.actual) == ("format", "2")
