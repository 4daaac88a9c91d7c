"""Samples that cannot be read or encoded: replaced by others of their chunk, or raised, and never passed over."""

import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from lazyshard import BadRows, LazyShardedDataset, Map
from lazyshard.data.samples import substitutes
from lazyshard.errors import BadSample, ChunkCorrupt, RowInvalid
from tests.data.runs import open_rank
from tests.data.workers import first_error, loader
from tests.stream.streams import foreign, produce, raised, raising, refusal_of

Row = dict[str, Any]


def read_all(dataset: LazyShardedDataset) -> list[int]:
    return [dataset[i]["id"] for i in range(len(dataset))]


def refusing(*bad: int, error: Callable[[int], BaseException] = lambda i: KeyError(i)) -> Callable[[Row], Row]:
    def encode(row: Row) -> Row:
        if row["id"] in bad:
            raise error(row["id"])
        return row

    return encode


def damage(directory: Path, sample: int) -> int:
    """Changes a row without changing its length, and returns its offset."""
    chunk, row = divmod(sample, 4)
    path = directory / f"chunk_{chunk:05d}.jsonl"
    data = bytearray(path.read_bytes())
    at = data.index(b'{"id":%d}' % sample)
    data[at + 1] ^= 1
    path.write_bytes(data)
    assert row == bytes(data[:at]).count(b"\n")
    return at


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return produce(tmp_path / "s", 10, 4)


def test_substitutes_are_the_same_wherever_and_however_a_sample_is_read(stream: Path) -> None:
    damage(stream, 5)
    encode = refusing(1, 2, 9)
    expected = [0, 3, 0, 3, 4, 6, 6, 7, 8, 8]
    assert read_all(open_rank(stream, encode_fn=encode)) == expected
    for rank, dp, window in ((0, 1, 1), (1, 2, 0), (3, 5, 1)):
        dataset = open_rank(stream, rank, dp, encode_fn=encode, shuffle_window=window)
        wanted = [expected[dataset.draw(i).sample] for i in range(10)]
        assert [row["id"] for row in dataset.__getitems__(list(range(10)))] == wanted
        assert read_all(dataset) == wanted
        assert [row["id"] for row in dataset.__getitems__([9, 1, 0, 1])] == [wanted[i] for i in (9, 1, 0, 1)]
    dataset = open_rank(stream, encode_fn=encode)
    assert [i for batch in loader(dataset, dataset.rank_indices, 2, batch_size=3) for i in batch] == expected


def test_damaged_rows_are_replaced_without_an_encoder_too(stream: Path) -> None:
    damage(stream, 1)
    damage(stream, 4)
    dataset = open_rank(stream)
    for _ in range(2):
        assert read_all(dataset) == [0, 2, 2, 3, 7, 5, 6, 7, 8, 9]
    assert dataset.stats().bad_samples == 2


def test_substitute_is_another_row_of_the_chunk() -> None:
    for rows in range(1, 8):
        for row in range(rows):
            found = list(substitutes(8 * 5 + row, rows, 8))
            assert sorted(found) == [40 + other for other in range(rows) if other != row]
    found = list(substitutes(5000, 1000, 1000))
    assert sorted(found) == list(range(5001, 6000))
    # At random to begin with, so that no row stands for all bad ones near it; then one after another.
    assert found[:8] == [5207, 5878, 5541, 5592, 5736, 5742, 5132, 5636]
    assert found[8:19] == [5861, 5342, 5148, 5573, 5614, 5814, 5816, 5459, 5714, 5715, 5716]
    assert [list(substitutes(i, 4, 4)) for i in (0, 1, 2, 5)] == [[3, 2, 1], [2, 3, 0], [0, 1, 3], [6, 7, 4]]


def test_bad_sample_is_counted_and_logged_once(stream: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = open_rank(stream, encode_fn=refusing(5))
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert read_all(dataset) == [0, 1, 2, 3, 4, 6, 6, 7, 8, 9]
    assert dataset.stats().bad_samples == 1
    (record,) = caplog.records
    facts = [f"{stream}/chunk_00001.jsonl: ", "row 1 (line 2, byte 9, sample 5)", "KeyError: 5", "1 of at most 100"]
    assert all(fact in record.getMessage() for fact in facts)


@pytest.mark.parametrize(("limit", "at"), [(0, 0), (1, 5), (2, 9)])
def test_more_bad_samples_than_allowed_are_raised_however_often_one_asks(stream: Path, limit: int, at: int) -> None:
    dataset = open_rank(stream, encode_fn=refusing(0, 5, 9), bad_rows=BadRows(limit=limit))
    for index, expected in list({0: 3, 5: 6}.items())[:limit]:
        assert [dataset[index]["id"] for _ in range(2)] == [expected] * 2
    for _ in range(2):
        error = raised(BadSample, lambda: dataset[at])
        assert (error.file, error.sample, error.chunk) == (f"{stream}/chunk_{at // 4:05}.jsonl", at, at // 4)
        assert (error.row, error.byte, error.count) == (at % 4, at % 4 * 9, limit + 1)
        assert isinstance(error.__cause__, KeyError)
    assert dataset[8] == {"id": 8}


def test_limit_is_that_of_each_process(stream: Path) -> None:
    dataset = open_rank(stream, encode_fn=refusing(1, 6), bad_rows=BadRows(limit=1))
    assert dataset[1] == {"id": 2}
    assert list(loader(dataset, [6], 1, batch_size=1)) == [[5]]
    assert dataset.stats().bad_samples == 2
    error = first_error(loader(dataset, [1, 6], 1, batch_size=1))
    assert isinstance(error, BadSample)
    assert (error.sample, error.count, error.row, error.byte) == (6, 2, 2, 18)
    assert "lazyshard-error-fields" not in str(error)


@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_row_is_raised_with_its_place(stream: Path, workers: int) -> None:
    byte = damage(stream, 6)
    dataset = open_rank(stream, bad_rows=BadRows("raise"))
    error = first_error(loader(dataset, dataset.rank_indices, workers, batch_size=2))
    assert isinstance(error, ChunkCorrupt)
    assert (error.file, error.chunk, error.row, error.byte) == (f"{stream}/chunk_00001.jsonl", 1, 2, byte)
    assert dataset[5] == {"id": 5}


@pytest.mark.parametrize(("row", "byte"), [(b"[1]", 10), (b'{"id":1,}', 17)])
def test_foreign_row_that_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture, row: bytes, byte: int) -> None:
    directory = foreign(tmp_path / "s", b'{"id":0}\n\n' + row + b'\n{"id":2}\n', end=True)
    error = raised(RowInvalid, read_all, open_rank(directory, samples_per_chunk=3, bad_rows=BadRows("raise")))
    assert (error.file, error.line, error.byte) == (f"{directory}/chunk_00000.jsonl", 3, byte)
    assert open_rank(directory, samples_per_chunk=3)[1] == {"id": 2}
    assert f"chunk_00000.jsonl: row 1 (line 3, byte {byte}, sample 1)" in caplog.text


@pytest.mark.parametrize(("action", "opened"), [("substitute", True), ("raise", False), ("raise", True)])
def test_chunk_that_was_cut_is_raised_whole(stream: Path, action: Any, opened: bool) -> None:
    dataset = open_rank(stream, bad_rows=BadRows(action), encode_fn=refusing(4))
    substituted = opened and action == "substitute"
    if opened:
        assert dataset[4 if substituted else 5]["id"] == (7 if substituted else 5)
    os.truncate(stream / "chunk_00001.jsonl", 5)
    for index in (7, 4):
        caught = raised(ChunkCorrupt, dataset.__getitem__, index)
        assert (caught.file, caught.row) == (f"{stream}/chunk_00001.jsonl", None)
    assert dataset.stats().bad_samples == substituted


def test_chunk_that_is_cut_while_a_substitute_is_sought_is_raised_whole(stream: Path) -> None:
    def cut(number: int) -> ValueError:
        os.truncate(stream / "chunk_00001.jsonl", 0)
        return ValueError("bad")

    dataset = open_rank(stream, encode_fn=refusing(4, error=cut))
    assert raised(ChunkCorrupt, lambda: dataset[4]).row is None
    assert dataset.stats().bad_samples == 1


@pytest.mark.parametrize("bad", [0, 2])
def test_errors_that_no_row_is_to_blame_for_pass_through(stream: Path, bad: int) -> None:
    for error in (KeyboardInterrupt, SystemExit, MemoryError):
        errors = {2: ValueError(), bad: error()}
        raised(error, open_rank(stream, encode_fn=refusing(*errors, error=errors.__getitem__)).__getitem__, 2)


@pytest.mark.parametrize("where", ["encode_fn", "steps"])
def test_want_of_memory_is_no_bad_sample_whatever_it_is_raised_as(stream: Path, where: str) -> None:
    errors: list[Exception] = [
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        zlib.error("Error -4 while decompressing data"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        orjson.JSONDecodeError("Not enough memory to allocate buffer for parsing", "", 0),
        ValueError("the image cannot be decoded"),
    ]
    errors[-1].__context__ = MemoryError()
    for error in errors:
        fail = refusing(2, error={2: error}.__getitem__)
        maker: dict[str, Any] = {where: fail if where == "encode_fn" else Map(fail)}
        raised(MemoryError, open_rank(stream, **maker).__getitem__, 2)


def test_any_error_of_the_encoder_makes_a_bad_sample_and_a_bad_substitute(stream: Path) -> None:
    no_text = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    # An image that is missing, say: the filesystem of the stream is not to blame.
    for error in (FileNotFoundError(), IndexError(), StopIteration(), TimeoutError(), no_text):
        encode = refusing(1, 2, 6, error=dict.fromkeys((1, 2, 6), error).__getitem__)
        dataset = open_rank(stream, encode_fn=encode)
        assert [dataset[i]["id"] for i in range(4)] == [0, 3, 0, 3]
        assert dataset.stats().bad_samples == 2
        caught = raised(BadSample, open_rank(stream, encode_fn=encode, bad_rows=BadRows("raise")).__getitem__, 6)
        assert (caught.sample, caught.chunk, caught.row, caught.byte) == (6, 1, 2, 18)


@pytest.mark.parametrize("failing", [0, 2])
def test_error_of_the_filesystem_is_no_bad_sample(stream: Path, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_rank(stream, encode_fn=refusing(2))
    read = dataset.reader.lines_published

    def lines(first: int, *rest: int) -> list[bytes]:
        return raising(OSError(5, "Input/output error"))() if first == failing else read(first, *rest)

    monkeypatch.setattr(dataset.reader, "lines_published", lines)
    refusal_of(OSError, "Input/output error", lambda: dataset[2])
    assert dataset.stats().bad_samples == (failing == 0)
