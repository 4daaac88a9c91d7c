"""`LazyShardedDataset` by itself, in one process."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazyshard import BadRows, ChunkWriter, EncodeCache, LazyShardedDataset, LazyShardedSequences, Order, Pack
from lazyshard.data.rank import Rank
from lazyshard.data.shared import EPOCH
from lazyshard.errors import RankInvalid, StreamInvalid, StreamMismatch, StreamUnsealed
from lazyshard.plan.course import Draw
from lazyshard.stream import stream as foreign_streams
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S, loader
from tests.stream.streams import foreign, produce


def open_rank(directory: Path, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return LazyShardedDataset(directory, **grouped({"dp_rank": rank, "dp_size": dp, "max_wait": DEADLINE_S, **options}))


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


def iterate(dataset: Any) -> list[Any]:
    """Asks for 0, 1, 2 and so on until there is an IndexError, as `for` does: a thing that mypy has forgotten."""
    return list(dataset)


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return produce(tmp_path_factory.mktemp("stream") / "s", 10, 4)


@pytest.fixture(scope="module")
def long_chunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return produce(tmp_path_factory.mktemp("stream") / "s", 600, 600)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an int >= 1, got 0"),
        ({"batch_size": 1.0}, "batch_size must be an int >= 1, got 1.0"),
        ({"unit": "row"}, "unit is one of chunk, sample, batch, auto or a number from 1, got 'row'"),
        ({"unit": 0}, "unit is one of chunk, sample, batch, auto or a number from 1, got 0"),
        ({"unit": True}, "unit is one of chunk, sample, batch, auto or a number from 1, got True"),
        ({"layout": "blocks"}, "layout is one of block, strided, got 'blocks'"),
        ({"shuffle_window": -1}, "shuffle_window is a number of chunks, 0 or more, got -1"),
        ({"shuffle_window": 0.5}, "shuffle_window is a number of chunks, 0 or more, got 0.5"),
        ({"seed": -1}, "seed must be an int in "),
        ({"seed": 2**63}, "seed must be an int in "),
        ({"max_total_samples": 0}, "max_total_samples is an integer from 1, got 0"),
        ({"max_total_samples": 1e6}, "max_total_samples is an integer from 1, got 1000000.0"),
        ({"max_wait": -1}, "max_wait is 0 or more seconds, got -1"),
        ({"max_wait": float("nan")}, "max_wait is 0 or more seconds, got nan"),
    ],
)
def test_impossible_argument_is_refused_before_the_stream_is_waited_for(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_rank(tmp_path / "absent", **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BadRows("skip"), "action of bad rows is one of substitute, raise, got 'skip'"),  # type: ignore[arg-type]
        (lambda: BadRows(limit=-1), "limit of bad rows is an integer from 0, or None for no limit, got -1"),
        (lambda: BadRows(limit=1.5), "limit of bad rows .* got 1.5"),  # type: ignore[arg-type]
        (lambda: BadRows(limit=True), "limit of bad rows .* got True"),
        (lambda: EncodeCache(memory_bytes=-1), "memory_bytes is a number of bytes, 0 or more, got -1"),
        (lambda: EncodeCache(memory_bytes="20GB"), "memory_bytes is .* got '20GB'"),  # type: ignore[arg-type]
        (lambda: Order(micro_batches_per_step=0), "micro_batches_per_step is an integer from 1, got 0"),
    ],
)
def test_impossible_group_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "name", "group"),
    [
        (LazyShardedDataset, "order", "Order"),
        (LazyShardedDataset, "bad_rows", "BadRows"),
        (LazyShardedDataset, "cache", "EncodeCache"),
        (partial(LazyShardedSequences, form=Pack(4)), "bad_rows", "BadRows"),
    ],
)
@pytest.mark.parametrize("given", ["raise", None, {}])
def test_what_is_no_group_is_refused_before_the_stream_is_waited_for(
    tmp_path: Path, make: Callable[..., object], name: str, group: str, given: Any
) -> None:
    with pytest.raises(TypeError) as caught:
        make(tmp_path / "absent", **{name: given})
    expected = f"{name} is a lazyshard.{group}, got {given!r}; write {name}=lazyshard.{group}(...)"
    assert str(caught.value) == expected


@pytest.mark.parametrize("old", ["unit", "on_bad_sample", "max_error_count", "encode_cache", "late_parsing"])
def test_arguments_of_before_there_were_groups_are_refused(stream: Path, old: str) -> None:
    with pytest.raises(TypeError, match=old):
        LazyShardedDataset(stream, **{old: 1})  # type: ignore[arg-type]


def test_rank_outside_the_ranks_is_refused_before_the_stream_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RankInvalid, match="expected 0 <= dp_rank < dp_size, got dp_rank=2 and dp_size=2"):
        open_rank(tmp_path / "absent", 2, 2)


def test_encoder_that_is_no_function_is_refused(stream: Path) -> None:
    with pytest.raises(TypeError, match="encode_fn is a function of a row, got dict"):
        open_rank(stream, encode_fn={})


def test_wrong_samples_per_chunk_is_refused(stream: Path) -> None:
    assert open_rank(stream, samples_per_chunk=4).samples_per_chunk == 4
    with pytest.raises(StreamMismatch, match="has 4 samples per chunk, asked for 5"):
        open_rank(stream, samples_per_chunk=5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"unit": "sample"}, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ({"unit": "batch"}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"unit": 3}, [[0, 1, 2, 6], [3, 4, 5, 7]]),
        ({"layout": "strided"}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"shuffle_window": 1}, [[2, 3, 0, 1], [4, 5, 6, 7]]),
        ({"shuffle_window": 1, "seed": 1}, [[0, 3, 1, 2], [5, 4, 7, 6]]),
        ({"max_total_samples": 6}, [[0, 2], [1, 3]]),
        ({"max_total_samples": 1000}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_settings_decide_the_order_of_each_rank(
    stream: Path, options: dict[str, Any], expected: list[list[int]]
) -> None:
    orders = []
    for rank in range(2):
        dataset = open_rank(stream, rank, 2, batch_size=2, **options)
        orders.append(ids(dataset[i] for i in dataset.rank_indices))
        assert ids(dataset.__getitems__(list(dataset.rank_indices))) == orders[-1]
        assert [dataset.draw(i) for i in dataset.rank_indices] == [Draw(0, i) for i in orders[-1]]
    assert orders == expected


def test_length_and_indices_of_a_rank(stream: Path) -> None:
    assert [len(open_rank(stream, 0, dp)) for dp in (1, 2, 3, 10, 11)] == [10, 10, 9, 10, 0]
    assert open_rank(stream, 1, 3).rank_indices == range(3, 6)
    assert open_rank(stream, 1, 3, layout="strided").rank_indices == range(1, 9, 3)
    assert open_rank(stream, 1, 3).rank == Rank(1, 3)
    assert open_rank(stream).directory == stream


@pytest.mark.parametrize("layout", ["block", "strided"])
def test_iteration_ends_at_the_length(stream: Path, layout: str) -> None:
    dataset = open_rank(stream, 1, 2, layout=layout)
    assert len(iterate(dataset)) == 10
    assert sorted(ids(iterate(dataset))) == list(range(10))


@pytest.mark.parametrize("index", [10, -11, 10**20, np.int64(10), torch.tensor(10)])
def test_index_outside_is_refused(stream: Path, index: int) -> None:
    dataset = open_rank(stream)
    iterate(dataset)
    for use in (dataset.__getitem__, dataset.draw, lambda i: dataset.__getitems__([8, i])):
        with pytest.raises(IndexError, match=r"index must be in \[-10, 10\)"):
            use(index)


def test_negative_indices_count_from_the_end(stream: Path) -> None:
    dataset = open_rank(stream)
    assert ids(dataset[i] for i in range(-10, 0)) == list(range(10))
    assert ids(dataset.__getitems__([-2, -1, 0, 1])) == [8, 9, 0, 1]
    strided = open_rank(stream, 0, 2, layout="strided")
    assert ids(strided[i] for i in range(-10, 0)) == ids(strided[i] for i in range(10))


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.uint64, torch.int8, torch.uint8, torch.int64, bool])
def test_other_integer_types_are_indices(long_chunk: Path, kind: Any) -> None:
    def make(value: int) -> Any:
        return torch.tensor(value, dtype=kind) if isinstance(kind, torch.dtype) else kind(value)

    dataset = open_rank(long_chunk)
    # Read ahead from 200 on: far enough for a small integer to wrap into it.
    assert ids([dataset[200], dataset[201], dataset[202]]) == [200, 201, 202]
    assert dataset[make(1)] == {"id": 1}
    signed = kind in (np.int8, torch.int8)
    for value in (-100, -1, 127) if signed else (0, 1) if kind is bool else (3, 100):
        dataset[200], dataset[201]
        assert dataset[make(value)]["id"] == value % 600
        dataset[200], dataset[201]
        assert ids(dataset.__getitems__([make(value), make(1)])) == [value % 600, 1]
        assert dataset.draw(make(value)).sample == value % 600


@pytest.mark.parametrize("index", ["length", 1.0, slice(0, 2), None, (0, 1), torch.tensor([1, 2]), torch.tensor(1.0)])
def test_what_is_no_integer_is_refused(stream: Path, index: Any) -> None:
    dataset = open_rank(stream)
    for _ in range(2):
        uses: list[Callable[[Any], object]] = [
            dataset.__getitem__,
            dataset.draw,
            lambda i: dataset.__getitems__([i, 1]),
        ]
        for use in uses:
            with pytest.raises(TypeError, match=r"interpreted as an integer|converted to an index"):
                use(index)
        # Again with rows read ahead.
        dataset[0]


@pytest.mark.parametrize(
    "indices",
    [
        [],
        [3],
        [2, 2, 2],
        [9, 0, 5, 4],
        [2, 3, 4, 5],
        list(range(10)),
        (1, 2, 3),
        range(3, 7),
        np.arange(4, 8),
        torch.arange(4, 8),
        [np.int64(4), np.int64(5)],
        [torch.tensor(4), torch.tensor(5)],
    ],
    ids=str,
)
def test_batches_of_any_make_are_read(stream: Path, indices: Any) -> None:
    dataset = open_rank(stream)
    for _ in range(2):
        assert ids(dataset.__getitems__(indices)) == [int(i) for i in indices]
        # Again with rows read ahead.
        dataset[0]


def test_batches_and_single_rows_in_random_turn_are_right(long_chunk: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    directory = produce(tmp_path / "s", 103, 10)
    for layout, dp, window in [("block", 1, 0), ("block", 3, 0), ("strided", 3, 0), ("strided", 2, 2), ("block", 2, 1)]:
        dataset = open_rank(directory, 1 % dp, dp, layout=layout, shuffle_window=window)
        expected = [dataset.draw(i).sample for i in range(len(dataset))]
        start = 0
        for _ in range(300):
            start = rng.choice([start, rng.randrange(len(dataset))])
            indices = list(range(start, min(len(dataset), start + rng.randrange(12) * dp), rng.choice([1, dp])))
            assert ids(dataset.__getitems__(indices)) == [expected[i] for i in indices]
            if indices:
                start = indices[-1]
            assert dataset[start]["id"] == expected[start]


def test_rows_are_the_callers_own(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "s", 4) as writer:
        for i in range(4):
            writer.write({"id": i, "messages": [{"role": "user"}]})
    dataset = open_rank(tmp_path / "s")
    for read in (dataset.__getitem__, lambda i: dataset.__getitems__([i, i, i])[1]):
        for _ in range(3):
            row = read(1)
            assert row == {"id": 1, "messages": [{"role": "user"}]}
            row["messages"][0].clear()
            row.clear()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))], ids=["deepcopy", "pickle"])
def test_copy_reads_the_same_and_goes_its_own_way(
    stream: Path, copied: Callable[[LazyShardedDataset], LazyShardedDataset]
) -> None:
    dataset = open_rank(stream, 1, 2, shuffle_window=2, layout="strided")
    dataset.set_epoch(1)
    first = ids(iterate(dataset))
    twin = copied(dataset)
    assert (twin.rank, len(twin), twin.stream_id) == (dataset.rank, 10, dataset.stream_id)
    assert ids(iterate(twin)) == first
    twin.set_epoch(0)
    assert ids(iterate(dataset)) == first
    # Workers of the copy hear of its epochs.
    batches = loader(twin, twin.rank_indices, 1, batch_size=5, persistent_workers=True)
    orders = []
    for epoch in (0, 1, 0):
        twin.set_epoch(epoch)
        orders += list(batches)
    assert orders[0] == orders[2] != orders[1] == [first[i] for i in twin.rank_indices]


def test_two_data_sets_over_one_stream_do_not_meet(stream: Path) -> None:
    one, two = open_rank(stream, 0, 2), open_rank(stream, 1, 2, shuffle_window=1)
    two.set_epoch(3)
    assert [ids([one[i], one[i + 1]]) for i in (0, 2)] == [[0, 1], [2, 3]]
    assert sorted(ids(two[i] for i in two.rank_indices)) == [4, 5, 6, 7, 9]
    assert one.stats()[:2] == (0, 1)


def test_leftover_is_counted_and_logged_by_the_first_rank(stream: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lazyshard"):
        assert [open_rank(stream, rank, 3, batch_size=2).leftover for rank in range(3)] == [4, 4, 4]
        assert open_rank(stream, 0, 5, batch_size=2).leftover == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"{stream}: 10 samples; left over in each epoch: 4, fewer than dp_size * batch_size = 3 * 2"
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_end_that_leaves_its_last_chunk_over_is_proved_first(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_streams, "_MANY", 1)
    rows = [b'{"id":%d}\n' % number for number in range(8)]
    # Found by doubling steps: 6 chunks, of which two ranks with batches of two read four.
    (foreign(tmp_path, *rows, end=True) / "chunk_00006.jsonl.completed").unlink()
    with pytest.raises(StreamInvalid) as caught:
        list(open_rank(tmp_path, rank, 2, batch_size=2, samples_per_chunk=1).rank_indices)
    assert caught.value.chunk == 6
    (tmp_path / "chunk_00006.jsonl.completed").touch()
    assert len(open_rank(tmp_path, rank, 2, batch_size=2, samples_per_chunk=1).rank_indices) == 4


def test_epoch_must_be_a_number_from_0(stream: Path) -> None:
    dataset = open_rank(stream)
    dataset.set_epoch(2)
    with pytest.raises(ValueError, match="epoch is 0 or more, got -1"):
        dataset.set_epoch(-1)
    with pytest.raises(TypeError):
        dataset.set_epoch(1.5)  # type: ignore[arg-type]
    assert dataset.draw(0) == Draw(2, 0)


def test_epoch_set_between_two_pieces_of_a_batch_counts_from_the_next_batch(stream: Path) -> None:
    dataset = open_rank(stream, shuffle_window=2)
    before, after = (open_rank(stream, shuffle_window=2) for _ in range(2))
    after.set_epoch(1)
    read = dataset.reader.lines_published

    def interrupted(*arguments: int) -> list[bytes]:
        dataset._draws.numbers[EPOCH] = 1
        return read(*arguments)

    dataset.reader.lines_published = interrupted  # type: ignore[method-assign, assignment]
    batch = list(range(8))
    assert dataset.__getitems__(batch) == before.__getitems__(batch)
    assert dataset.__getitems__(batch) == after.__getitems__(batch) != before.__getitems__(batch)


@pytest.mark.parametrize("samples", [0, 5])
def test_stream_of_less_than_a_batch_for_each_rank_has_no_index(tmp_path: Path, samples: int) -> None:
    directory = produce(tmp_path / "s", samples, 4)
    dataset = open_rank(directory, 0, 3, batch_size=2)
    assert (len(dataset), list(dataset.rank_indices), dataset.leftover) == (0, [], samples)
    assert iterate(dataset) == dataset.__getitems__([]) == []
    with pytest.raises(IndexError, match=r"index must be in \[0, 0\), got 0"):
        dataset[0]


def test_foreign_directory_is_read_with_samples_per_chunk(tmp_path: Path) -> None:
    chunks = [b'{"id":0}\n\n{"id":1}\n', b'\xef\xbb\xbf{"id":2}\n{"id":3}\n', b'{"id":4}']
    directory = foreign(tmp_path / "s", *chunks, end=True)
    with pytest.raises(ValueError, match="samples_per_chunk must be given"):
        open_rank(directory)
    for layout, expected in (("block", [0, 1, 2, 3]), ("strided", [0, 2, 1, 3])):
        dataset = open_rank(directory, 0, 2, samples_per_chunk=2, layout=layout)
        assert ids(iterate(dataset)) == expected
        assert (dataset.stream_id, dataset.leftover) == (None, 1)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "chunk_00000.jsonl").write_bytes(chunks[0])
    with pytest.raises(StreamUnsealed, match="lazyshard-producer run --source"):
        open_rank(tmp_path / "bare", samples_per_chunk=2)
