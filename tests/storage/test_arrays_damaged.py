"""What people see of side files that are not as they were sealed: by the reader, the data set and the commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import xxhash

from lazyshard import ChunkWriter, LazyShardedDataset, StreamReader
from lazyshard.cli.main import main
from lazyshard.errors import (
    ChunkCorrupt,
    ChunkMissing,
    FileRefused,
    LazyShardError,
    RowInvalid,
    SealInvalid,
    VersionUnsupported,
)
from lazyshard.format import Seal, SealedArrays
from lazyshard.storage.verification import verify
from tests.storage.arrays import expected, produce, values
from tests.storage.damage import Damage, copy, cut, delete, each, edit, flip, put

A0, A1, A2 = (f"chunk_0000{number}.arrays" for number in range(3))
C1 = "chunk_00001.jsonl"
S1 = f"{C1}.completed"

SEALED = "; the file was changed or damaged after it was sealed. Restore it from a copy"


def pipe(name: str) -> Damage:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return change


def hole(name: str, size: int) -> Damage:
    return lambda directory: os.truncate(directory / name, size)


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


CASES: list[tuple[str, Damage, type[LazyShardError], str, str, int]] = [
    (
        "shorter",
        cut(A1, 31),
        ChunkCorrupt,
        "{d}/chunk_00001.arrays: expected 32 bytes as sealed, found 31 bytes" + SEALED,
        "damage: chunk_00001.arrays: expected 32 bytes as sealed, found 31 bytes; restore the file from a copy",
        2,
    ),
    (
        "longer",
        cut(A1, 33),
        ChunkCorrupt,
        "{d}/chunk_00001.arrays: expected 32 bytes as sealed, found 33 bytes" + SEALED,
        "damage: chunk_00001.arrays: expected 32 bytes as sealed, found 33 bytes; restore the file from a copy",
        2,
    ),
    (
        "a hole of half a terabyte",
        hole(A1, 2**39),
        ChunkCorrupt,
        "{d}/chunk_00001.arrays: expected 32 bytes as sealed, found 549755813888 bytes" + SEALED,
        "damage: chunk_00001.arrays: expected 32 bytes as sealed, found 549755813888 bytes; restore the file "
        "from a copy",
        2,
    ),
    (
        "changed bytes",
        flip(A1, 17),
        ChunkCorrupt,
        "{d}/chunk_00001.arrays: row 1 (byte 16): expected XXH3 c4382ba83ba7dd5b as sealed, found d92c337ce9283eb4"
        + SEALED,
        "damage: chunk_00001.arrays: row 1 (byte 16): expected XXH3 c4382ba83ba7dd5b as sealed, found "
        "d92c337ce9283eb4; "
        "restore the file from a copy",
        3,
    ),
    (
        "missing",
        delete(A1),
        ChunkMissing,
        "{d}/chunk_00001.arrays: chunk 1 is published, but this file of it has not appeared within 0 s: "
        "restore it from a copy; `lazyshard verify` tells what else is missing",
        "damage: chunk_00001.arrays: expected the arrays of the rows of the chunk, found no such file "
        "although a seal is "
        "there; restore the file from a copy",
        2,
    ),
    (
        "a pipe",
        pipe(A1),
        FileRefused,
        "{d}/chunk_00001.arrays: expected a plain file, found a named pipe",
        "damage: chunk_00001.arrays: expected a plain file, found a named pipe; restore the file from a copy",
        2,
    ),
    (
        "of another chunk",
        copy(A0, A1),
        ChunkCorrupt,
        "{d}/chunk_00001.arrays: row 0 (byte 0): expected XXH3 5117cce561912388 as sealed, found bc3bb854128cf178"
        + SEALED,
        "damage: chunk_00001.arrays: row 0 (byte 0) and 1 more: expected XXH3 ",
        2,
    ),
    (
        "a seal without arrays",
        edit(S1, format=1),
        SealInvalid,
        "{d}/chunk_00001.jsonl.completed: field 'format': expected 2, as stream.json says, found 1; restore the file "
        "from a copy",
        "damage: chunk_00001.jsonl.completed: field 'format': expected 2, as stream.json says, found 1; "
        "restore the file "
        "from a copy",
        2,
    ),
    (
        "a seal of a later format",
        edit(S1, format=3),
        VersionUnsupported,
        "{d}/chunk_00001.jsonl.completed: written in stream format 3, this release of lazyshard reads formats 1 to 2; "
        "install a newer lazyshard",
        "damage: chunk_00001.jsonl.completed: expected stream format 2, found format 3; install a newer lazyshard",
        2,
    ),
    (
        "an array past the bytes of its row",
        described("float64", [3], 0),
        RowInvalid,
        "{d}/chunk_00001.jsonl: row 1 (line 2, byte 74): the array at 'x': expected an array within the 16 "
        "bytes of its "
        "row, found \"['float64', [3], 0], which ends at 24\"",
        "damage: chunk_00001.jsonl: row 1 (byte 74): expected a JSON object on a line, found the array at "
        "'x': expected "
        "an array within the 16 bytes of its row",
        3,
    ),
    (
        "a shape that overflows",
        described("float64", [2**31, 2**31, 2**31], 0),
        RowInvalid,
        "{d}/chunk_00001.jsonl: row 1 (line 2, byte 74): the array at 'x': expected a shape whose elements can be "
        "counted, found '[2147483648, 2147483648, 2147483648]'",
        "damage: chunk_00001.jsonl: row 1 (byte 74): expected a JSON object on a line, found the array at "
        "'x': expected "
        "a shape whose elements can be counted",
        3,
    ),
    (
        "a negative offset",
        described("uint8", [1], -8),
        RowInvalid,
        "{d}/chunk_00001.jsonl: row 1 (line 2, byte 74): the array at 'x': expected an offset that is a multiple of 8, "
        "found '-8'",
        "damage: chunk_00001.jsonl: row 1 (byte 74): expected a JSON object on a line, found the array at "
        "'x': expected "
        "an offset",
        3,
    ),
]


@pytest.mark.parametrize(
    ("damage", "error", "message", "told", "good"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_damage_is_told(
    damage: Damage,
    error: type[LazyShardError],
    message: str,
    told: str,
    good: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(produce(tmp_path, 5))
    reader = StreamReader(tmp_path, max_wait=0)
    found: list[Any] = []
    with pytest.raises(LazyShardError) as caught:
        for row in reader:
            found.append(values(row))
    assert (type(caught.value), str(caught.value)) == (error, message.format(d=tmp_path))
    assert found == expected(0, good)
    dataset = LazyShardedDataset(tmp_path, dp_rank=0, dp_size=1, max_wait=0, on_bad_sample="raise")
    with pytest.raises(error):
        dataset[good]
    assert main(["verify", str(tmp_path)]) == 5
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(told)], lines
    assert main(["inspect", str(tmp_path), str(good)]) in (3, 5)
    assert capsys.readouterr().err.startswith("lazyshard: error: ")


def test_row_with_bad_arrays_is_replaced_by_another_one(tmp_path: Path) -> None:
    flip(A1, 17)(produce(tmp_path, 6))
    for options in ({}, {"shuffle_window": 2}, {"encode_fn": values}):
        dataset: Any = LazyShardedDataset(tmp_path, dp_rank=0, dp_size=1, batch_size=3, **options)
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
    with pytest.raises(ChunkCorrupt, match=r"row 1 \(byte 16\): expected arrays of at most 2147483648 bytes in a row"):
        StreamReader(tmp_path).read(1)


def test_verification_tells_side_files_that_are_left_over_and_lost(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    each(delete(A0), put(A2, b"of a chunk that was never sealed"))(tmp_path)
    found = {(finding.kind, finding.file, finding.severity) for finding in verify(tmp_path).findings}
    assert found == {("arrays-missing", A0, "damage"), ("unpublished", A2, "leftover")}
    found = {(finding.kind, finding.file, finding.severity) for finding in verify(tmp_path, quick=True).findings}
    assert found == {("arrays-missing", A0, "damage"), ("unpublished", A2, "leftover")}


def test_producer_refuses_to_go_on_past_a_lost_side_file(tmp_path: Path) -> None:
    delete(A0)(produce(tmp_path, 4, end=False))
    with pytest.raises(ChunkMissing, match=r"chunk_00000.arrays: sealed, but its side file is missing"):
        ChunkWriter(tmp_path, arrays=True)


def test_stream_of_rows_alone_is_not_read_by_a_seal_with_arrays(tmp_path: Path) -> None:
    produce(tmp_path, 2)
    edit("stream.json", format=1)(tmp_path)
    with pytest.raises(SealInvalid, match=r"field 'format': expected 1, as stream.json says, found 2"):
        StreamReader(tmp_path).read(0)
    with pytest.raises(SealInvalid):
        LazyShardedDataset(tmp_path, dp_rank=0, dp_size=1)[0]
