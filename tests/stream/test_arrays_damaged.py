"""What people see of side files that are not as they were sealed: by the reader, the data set and the commands."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import xxhash

from lazyshard import BadRows, ChunkWriter, LazyShardedDataset, StreamReader, errors
from lazyshard.cli.main import main
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.inspection.verification import verify
from tests.data.options import grouped
from tests.stream.arrays import expected, produce, values
from tests.stream.damage import Damage, copy, cut, delete, each, edit, flip, put
from tests.stream.streams import raised, refusal_of

A0, A1, A2 = (f"chunk_0000{number}.arrays" for number in range(3))
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
    "a seal without arrays": (edit(S1, format=1), (errors.SealInvalid, {"field": "format"}, "invalid", S1, 2)),
    "a seal of a later format": (edit(S1, format=3), (errors.VersionUnsupported, {"actual": "3"}, "version", S1, 2)),
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
        caught = raised(errors.SealInvalid, reader, 0)
        assert (caught.field, caught.actual) == ("format", "2")
