"""Rows of a data set: read window by window, as few calls as chunks; how they cross processes, late or as arrays."""

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch.utils.data import DataLoader, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

import lazyshard
from lazyshard import ChunkWriter, EncodeCache, LateRow, LazyShardedDataset, LazyShardedStream, as_tensor
from lazyshard.data import index_space as window_reader
from lazyshard.data.index_space import IndexSpace
from lazyshard.errors import ChunkCorrupt
from lazyshard.format.records import chunk_name, seal_name
from lazyshard.plan.course import Draw
from lazyshard.store.files import read_seal
from lazyshard.stream import chunk, scattered
from tests.data.runs import open_rank
from tests.data.workers import DEADLINE_S, PICKLED, ids, loader
from tests.stream.arrays import expected, produce, values
from tests.stream.streams import produce as produce_rows
from tests.stream.streams import publish_rows, raised, refusal_of

SAMPLES, PER_CHUNK = 120, 10


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return produce_rows(tmp_path / "s", SAMPLES, PER_CHUNK)


def open_windows(directory: Path, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return open_rank(directory, 0, dp, **{"shuffle_window": 3, "seed": 5, **options})


def preads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Places of what is read of chunks from now on, line by line and whole: first byte, and the one behind the last."""
    found: list[tuple[int, int]] = []

    def noted(call: Callable[..., Any], size_of: Callable[[Any], int]) -> Callable[..., Any]:
        def read(fd: int, into: Any, at: int) -> Any:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(".jsonl"):
                found.append((at, at + size_of(into)))
            return call(fd, into, at)

        return read

    monkeypatch.setattr(os, "pread", noted(os.pread, int))
    monkeypatch.setattr(os, "preadv", noted(os.preadv, lambda into: len(into[0])))
    return found


def sizes(reads: list[tuple[int, int]]) -> list[int]:
    return [stop - start for start, stop in reads]


def chunk_sizes(dataset: LazyShardedDataset) -> list[int]:
    return [dataset.reader.chunk(number).offset(PER_CHUNK) for number in range(SAMPLES // PER_CHUNK)]


def drawn(dataset: LazyShardedDataset) -> list[int]:
    return [dataset.draw(index).sample for index in range(len(dataset))]


@pytest.mark.parametrize(("batch", "most"), [(4, scattered.HELD_BYTES), (1, scattered.HELD_BYTES), (4, 0), (1, 0)])
def test_rows_are_those_drawn(stream: Path, batch: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scattered, "HELD_BYTES", most)
    options: dict[str, Any] = {"layout": "strided", "encode_fn": dict if batch == 1 else None}
    dataset, other = (open_windows(stream, 2, num_samples=3 * SAMPLES, **options) for _ in range(2))
    every, indices = drawn(other), list(dataset.rank_indices)
    got = [i for at in range(0, len(indices), batch) for i in ids(dataset.__getitems__(indices[at : at + batch]))]
    assert got == [every[index] for index in indices]
    assert bool(dataset._lanes._scattered._held) == bool(most)


def test_a_window_is_read_in_as_many_calls_as_it_has_chunks(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_windows(stream, batch_size=4)
    dataset[0]
    chunks = chunk_sizes(dataset)
    reads = preads(monkeypatch)
    for start in range(30, SAMPLES, 4):
        dataset.__getitems__(list(range(start, min(start + 4, SAMPLES))))
    whole = [size for size in sizes(reads) if size in chunks]
    # Rows of the first batch are read by themselves: it is not clear yet that this continues.
    assert sorted(whole) == sorted(chunks[3:])
    assert len(reads) - len(whole) == 4


def test_workers_that_step_over_each_other_hold_chunks_too(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_windows(stream)
    expected = drawn(dataset)
    reads = preads(monkeypatch)
    for start in range(0, SAMPLES, 8):
        assert ids(dataset.__getitems__([start, start + 1])) == expected[start : start + 2]
    # Two batches until it is clear that this continues; from then on each chunk that is met is read once.
    met = {expected[index] // PER_CHUNK for start in range(16, SAMPLES, 8) for index in (start, start + 1)}
    assert len(reads) == 2 * 2 + len(met)


def test_who_jumps_about_reads_no_chunk_whole(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_windows(stream, shuffle_window=1)
    expected = drawn(dataset)
    reads = preads(monkeypatch)
    # Never twice in a row forward by less than a window.
    for index in [at for first in range(40) for at in (first + 80, first + 40, first)]:
        assert dataset[index]["id"] == expected[index]
    assert len(reads) == 120 and max(sizes(reads)) < min(chunk_sizes(dataset))


@pytest.mark.parametrize("window", [0, 3])
def test_large_rows_are_read_one_by_one(stream: Path, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunk, scattered, window_reader):
        monkeypatch.setattr(module, "LARGE_ROW_BYTES", 1)
    dataset = open_windows(stream, shuffle_window=window, batch_size=4)
    expected = drawn(dataset)
    reads = preads(monkeypatch)
    for start in range(0, SAMPLES, 4):
        assert ids(dataset.__getitems__(list(range(start, start + 4)))) == expected[start : start + 4]
        assert len(dataset._lanes.ahead[3]) <= 1
    assert sizes(reads) == [len(dataset.reader.line(sample)) for sample in expected]


@pytest.mark.parametrize(("layout", "window"), [("block", 0), ("strided", 0), ("block", 3)])
def test_threads_that_share_a_data_set_get_their_own_rows(tmp_path: Path, layout: str, window: int) -> None:
    directory = produce_rows(tmp_path / "s", 200, 10)
    for attempt in range(3):
        dataset, other = (open_rank(directory, 0, 2, layout=layout, shuffle_window=window) for _ in range(2))
        expected = drawn(other)
        together = threading.Barrier(4)

        def work(number: int, dataset: Any = dataset, together: Any = together, expected: Any = expected) -> None:
            together.wait(DEADLINE_S)
            for start in [*range(number * 50, 200, 5), *range(0, number * 50, 5)]:
                assert ids(dataset.__getitems__(list(range(start, start + 5)))) == expected[start : start + 5]
                assert dataset[start]["id"] == expected[start]

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, (number + attempt) % 4) for number in range(4)]:
                done.result(DEADLINE_S)


def test_thread_that_comes_while_another_settles_the_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_rank(produce_rows(tmp_path / "s", 8, 4), 0, 2, layout="strided")
    settling, other_is_done = threading.Event(), threading.Event()
    real = IndexSpace.__init__

    def slow(self: IndexSpace, *arguments: Any) -> None:
        if threading.current_thread().name == "first":
            settling.set()
            assert other_is_done.wait(DEADLINE_S)
        real(self, *arguments)

    monkeypatch.setattr(IndexSpace, "__init__", slow)
    first = threading.Thread(target=lambda: dataset[0], name="first")
    first.start()
    assert settling.wait(DEADLINE_S)
    try:
        assert ids(dataset.__getitems__([0, 1, 2, 3])) == [0, 4, 1, 5]
        space = dataset._space()
    finally:
        other_is_done.set()
        first.join(DEADLINE_S)
    assert dataset._space() is space


def test_thread_that_waits_for_the_end_is_not_told_of_anothers_open_end(tmp_path: Path) -> None:
    directory = produce_rows(tmp_path / "s", 4, 4, end=False)
    dataset = open_rank(directory, 0, 2, max_total_samples=16, unit="sample")
    space, reader = dataset._space(), dataset.reader
    real = reader.wait_for

    def interrupted(samples: int) -> Any:
        published = real(samples)
        reader.wait_for = real  # type: ignore[method-assign]
        # Another thread meanwhile meets the end, which came in between.
        produce_rows(directory, 6, 4)
        assert space.draw(3) == Draw(1, 0)
        return published

    reader.wait_for = interrupted  # type: ignore[method-assign]
    assert space.draw(0) == Draw(0, 0)
    assert space.draw(3) == Draw(1, 0)


RANKS, BATCH, ROWS = 8, 4, 320


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = ({"id": number, "text": "x" * number} for number in range(ROWS))
    return publish_rows(tmp_path_factory.mktemp("one") / "s", ROWS, rows)


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Half-open ranges in order, neighbours made one; fails where two overlap."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        assert not found or found[-1][1] <= start, "bytes that were read twice"
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


@pytest.mark.parametrize(
    ("unit", "options", "least", "most"),
    [
        # Forty rows of each rank. No rank has a chunk, so they come one by one.
        ("chunk", {"shuffle_window": 1}, 1, 40),
        ("sample", {}, 40, 40),
        ("batch", {"layout": "strided"}, 10, 10),
        ("auto", {}, 10, 10),
        # An eighth of the file each, read ahead up to its end.
        (40, {}, 1, 9),
        (40, {"layout": "strided"}, 1, 9),
    ],
)
def test_each_rank_reads_the_bytes_of_its_rows_once(
    one_file: Path, unit: Any, options: dict[str, Any], least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = preads(monkeypatch)
    everything: list[tuple[int, int]] = []
    for rank in range(RANKS):
        dataset = open_rank(one_file, rank, RANKS, batch_size=BATCH, unit=unit, max_wait=0, **options)
        found.clear()
        drawn = [number for batch in loader(dataset, dataset.rank_indices, 0, batch_size=BATCH) for number in batch]
        chunk = dataset.reader.chunk(0)
        assert joined(found) == joined([(chunk.offset(number), chunk.offset(number + 1)) for number in drawn])
        assert least <= len(found) <= most
        assert dataset.stats().chunks_opened == 1
        everything += found
    assert joined(everything) == [(0, chunk.offset(len(chunk)))]


def kinds(rows: list[Any]) -> list[tuple[str, Any]]:
    """Collates: tells, of each row, what it is in the worker, and sends it on."""
    return [(type(row).__name__, row) for row in rows]


def late(directory: Path, sizes: list[int], window: int = 0) -> LazyShardedDataset:
    publish_rows(directory, 2, ({"id": i, "blob": chr(97 + i) * size, "more": [0]} for i, size in enumerate(sizes)))
    return open_rank(directory, encode_fn=LateRow, batch_size=2, shuffle_window=window)


def test_a_row_is_a_mapping_that_nobody_parses_who_only_sends_it() -> None:
    line = b'{"id":7,"deep":[1,2]}\n'
    row = LateRow(line)
    assert row == {"id": 7, "deep": [1, 2]}
    assert (row["id"], len(row), list(row), "deep" in row, "other" in row) == (7, 2, ["id", "deep"], True, False)
    assert repr(row) == "LateRow({'id': 7, 'deep': [1, 2]})"
    refusal_of(KeyError, "other", lambda: row["other"])
    sent = pickle.dumps(LateRow(line))
    assert line in sent
    assert type(pickle.loads(sent)) is dict
    row["deep"].append(3)
    assert pickle.loads(pickle.dumps(row)) == {"id": 7, "deep": [1, 2, 3]}
    assert default_collate([LateRow(b'{"name":"a"}'), LateRow(b'{"name":"b"}')]) == {"name": ["a", "b"]}


SIZES = [200_000, 10, 70_000, 80_000, 10, 300_000, 65_000, 66_000]


@pytest.mark.parametrize(
    ("start", "window", "sizes"),
    [("fork", 0, SIZES), ("fork", 2, [1] * 12), (PICKLED, 2, SIZES), (PICKLED, 0, [1] * 12)],
)
def test_rows_are_late_in_workers_and_dicts_behind(tmp_path: Path, start: str, window: int, sizes: list[int]) -> None:
    dataset = late(tmp_path / "s", sizes, window)
    options: dict[str, Any] = {"num_workers": 2, "collate_fn": kinds, "multiprocessing_context": start}
    found = [pair for batch in DataLoader(dataset, 2, sampler=dataset.rank_indices, **options) for pair in batch]
    assert {kind for kind, _ in found} == {"LateRow"}
    assert {type(row) for _, row in found} == {dict}
    assert sorted((row["id"], row["blob"]) for _, row in found) == [(i, chr(97 + i) * n) for i, n in enumerate(sizes)]
    assert dataset[0] == found[0][1]
    assert type(dataset[0]) is dict
    iterable: Any = StatefulDataLoader(lazyshard.LazyShardedIterable(dataset), batch_size=2, **options)
    assert [pair for batch in iterable for pair in batch] == found


def test_of_a_large_row_only_the_place_crosses(tmp_path: Path) -> None:
    (batch,) = DataLoader(late(tmp_path, [70_000, 10]), 2, num_workers=1, collate_fn=sizes_sent)
    (_, between, kept, _), (_, other, *_) = batch
    assert between < 1_000, "a row of 70,000 bytes is to cross as a place"
    assert kept > 70_000, "what is pickled for another time or place holds the row itself"
    assert other < 1_000


def test_of_a_large_row_that_was_looked_at_the_row_crosses(tmp_path: Path) -> None:
    def changed(rows: list[Any]) -> list[Any]:
        rows[0]["more"].append(1)
        return rows

    (batch,) = DataLoader(late(tmp_path, [70_000, 1]), 2, num_workers=1, collate_fn=changed)
    assert batch == [{"id": 0, "blob": "a" * 70_000, "more": [0, 1]}, {"id": 1, "blob": "b", "more": [0]}]


def test_a_large_row_is_refused_that_was_changed_after_its_worker_had_read_it(tmp_path: Path) -> None:
    path, dataset = tmp_path / "chunk_00000.jsonl", late(tmp_path, [70_000, 70_000])

    def damaging(rows: list[Any]) -> list[Any]:
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), b"!", 40_000)
        return rows

    (batch,) = DataLoader(dataset, 2, num_workers=1, collate_fn=damaging)
    # Not raised by the loader, which would have lost the batch and wait for it.
    caught = raised(ChunkCorrupt, lambda: batch[0]["id"])
    assert (caught.file, caught.row, caught.byte, batch[1]["id"]) == (str(path), 0, 0, 1)


PHOTO = b"\xff\xd8\xff" + bytes(range(256)) * 300


def late_photos(directory: Path, **options: Any) -> LazyShardedDataset:
    rows = ({"id": i, "photo": PHOTO + b"." * i, "x": np.arange(3 + i)} for i in range(5))
    others = {"id": 5, "photo": b"small"}, {"id": 6}, {"id": 7, "photo": b""}
    publish_rows(directory, 3, [*rows, *others], arrays=True)
    return open_rank(directory, encode_fn=LateRow, batch_size=2, **options)


def sizes_sent(rows: list[Any]) -> list[tuple[str, int, int, Any]]:
    return [(type(row).__name__, len(ForkingPickler.dumps(row)), len(pickle.dumps(row)), row) for row in rows]


@pytest.mark.parametrize(("start", "window"), [("fork", 0), (PICKLED, 2)])
def test_photos_and_arrays_are_read_by_the_process_that_looks_at_them(tmp_path: Path, start: str, window: int) -> None:
    dataset = late_photos(tmp_path / "s", shuffle_window=window)
    indices = dataset.rank_indices
    found = loader(dataset, indices, 2, batch_size=2, collate_fn=sizes_sent, multiprocessing_context=start)
    rows = {}
    for kind, between, kept, row in (one for batch in found for one in batch):
        assert kind == "LateRow"
        assert between < 1_000, "of a photo of 76,803 bytes only the place is to cross"
        assert (kept > len(PHOTO)) == (row["id"] < 5), "what is pickled for another time holds the photo itself"
        rows[row["id"]] = row
    assert [rows[i].get("photo") for i in range(8)] == [*(PHOTO + b"." * i for i in range(5)), b"small", None, b""]
    assert [rows[i]["x"].tolist() for i in range(5)] == [list(range(3 + i)) for i in range(5)]
    rows[0]["x"][0] = 7
    assert {type(dataset[index]) for index in indices} == {dict}


@pytest.mark.parametrize("lie", [False, True])
def test_a_bad_photo_is_found_by_the_worker_which_takes_another_row(tmp_path: Path, lie: bool) -> None:
    dataset = late_photos(tmp_path)
    if lie:
        # By a faulty program, which seals it.
        data = (tmp_path / chunk_name(0)).read_bytes().replace(b"[76803,", b"[96803,", 1)
        (tmp_path / chunk_name(0)).write_bytes(data)
        seal, digests = read_seal(tmp_path, 0), list(map(xxhash.xxh3_64_intdigest, data.splitlines(keepends=True)))
        (tmp_path / seal_name(0)).write_bytes(replace(seal, digests=np.array(digests, np.uint64)).encode())
    else:
        with open(tmp_path / "chunk_00000.arrays", "r+b") as file:
            os.pwrite(file.fileno(), b"!", 40_000)
    found = [row["id"] for batch in loader(dataset, None, 2, batch_size=2, collate_fn=kinds) for _, row in batch]
    assert (found[0] in (1, 2), found[1:]) == (True, [1, 2, 3, 4, 5, 6, 7])
    assert dataset.stats().bad_samples == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle_window": 2}, {"shuffle_window": 20}, {"unit": 1}, {"cache": EncodeCache(memory_bytes=1 << 20)}],
    ids=str,
)
def test_every_order_gives_rows_with_their_arrays(options: dict[str, Any], tmp_path: Path) -> None:
    found = open_rank(produce(tmp_path, 40), batch_size=4, **options)
    for epoch in range(2):
        found.set_epoch(epoch)
        one_by_one = [values(found[index]) for index in found.rank_indices]
        batches = [list(map(values, found.__getitems__(list(range(at, at + 4))))) for at in range(0, 40, 4)]
        assert sorted(one_by_one) == expected(0, 40)
        assert [row for batch in batches for row in batch] == one_by_one


def test_workers_send_arrays_that_can_be_written_to(tmp_path: Path) -> None:
    one = open_rank(produce(tmp_path, 8), batch_size=4)
    batches = loader(one, None, 1, batch_size=4, collate_fn=list, multiprocessing_context=PICKLED)
    rows = [row for batch in batches for row in batch]
    assert [values(row) for row in rows] == expected(0, 8)
    for row in rows:
        row["x"][0] = 7


def test_encoded_batches_are_tensors_made_without_a_warning(tmp_path: Path) -> None:
    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "x": as_tensor(row["x"]), "n": as_tensor(row["n"][0])}

    batches = list(DataLoader(open_rank(produce(tmp_path, 8), encode_fn=encode, batch_size=4), batch_size=4))
    assert [batch["x"].tolist() for batch in batches] == [[[n, -1] for n in range(at, at + 4)] for at in (0, 4)]
    assert [batch["n"].dtype for batch in batches] == [torch.float16] * 2


def test_steps_iterable_form_and_blend_give_arrays(tmp_path: Path) -> None:
    one, other = produce(tmp_path / "one", 8), produce_rows(tmp_path / "other", 8)
    found = open_rank(one, steps=[lazyshard.Filter(lambda row: int(row["x"][0]) % 2 == 0)])
    assert {values(row)[0] for row in found.__getitems__(list(range(4)))} == {0, 2}
    assert [values(row) for row in LazyShardedStream(open_rank(one))] == expected(0, 8)
    blend = lazyshard.BlendedDataset([(open_rank(one), 0.5), (open_rank(other), 0.5)], num_samples=16, batch_size=4)
    rows = blend.__getitems__(list(range(16)))
    assert sorted(values(row) for row in rows if "x" in row) == expected(0, 8)
    assert sorted(row["id"] for row in rows if "x" not in row) == list(range(8))


def test_tensor_shares_the_memory_of_its_array(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 1, arrays=True) as writer:
        bits = torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.int16).numpy().view(lazyshard.BFLOAT16)
        writer.write({"x": np.arange(3), "b": bits})
    row = open_rank(tmp_path)[0]
    tensor, brain = as_tensor(row["x"]), as_tensor(row["b"])
    row["x"][0] = 9
    assert tensor.tolist() == [9, 1, 2]
    row["x"].flags.writeable = False
    as_tensor(row["x"])[0] = 5
    assert row["x"].tolist() == [9, 1, 2]
    assert (brain.dtype, brain.tolist()) == (torch.bfloat16, [1.5, -2.0])
