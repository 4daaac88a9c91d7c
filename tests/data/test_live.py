"""The data set on a stream that is still being produced, and on over the ends of epochs; and `unit="auto"` there."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard import ChunkWriter, LazyShardedDataset
from lazyshard.data.settings import LayoutName
from lazyshard.errors import LengthUnknown, StateMismatch, WaitTimeout
from lazyshard.plan.course import Draw
from lazyshard.stream import read_reading
from tests.data.runs import open_rank, open_ranks, read
from tests.data.workers import DEADLINE_S, loader
from tests.plan import oracle
from tests.stream.streams import HERE, produce, raised, refusal_of

PRODUCER = """
import sys, time
from lazyshard import ChunkWriter
with ChunkWriter(sys.argv[1], int(sys.argv[2])) as writer:
    for number in range(int(sys.argv[3])):
        writer.write({"id": number})
        time.sleep(0.001)
"""


@contextmanager
def producing(directory: Path, per_chunk: int, total: int) -> Iterator[None]:
    command = [sys.executable, "-c", PRODUCER, *map(str, (directory, per_chunk, total))]
    with subprocess.Popen(command, cwd=HERE) as process:
        try:
            yield
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def test_live_stream_without_a_maximum_has_no_length(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 6, 4, end=False)
    dataset = open_rank(directory)
    for use in (lambda: len(dataset), lambda: dataset[0], lambda: dataset.rank_indices, lambda: pickle.dumps(dataset)):
        caught = refusal_of(LengthUnknown, r"max_total_samples.*num_samples", use)
        assert caught.directory == str(directory)
        assert isinstance(caught, TypeError)
    assert dataset.leftover is None
    produce(directory, 7, 4)
    ended = open_rank(directory, 0, 2)
    assert (len(dataset), len(ended), ended.leftover) == (7, 6, 1)


def test_wait_is_counted_once_however_many_workers_there_are(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    with producing(directory, 4, 8):
        # A Python takes its time to start.
        dataset = open_rank(directory, max_total_samples=8)
        assert [dataset[i]["id"] for i in range(8)] == list(range(8))
    waited = dataset.stats().waited_s
    assert waited > 0
    for _ in range(2):
        assert len(list(loader(dataset, dataset.rank_indices, 2, batch_size=2))) == 4
    assert dataset.stats().waited_s == waited


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_decisions_while_it_grows_are_the_oracles(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    dp, batch = data.draw(st.integers(1, 4), label="dp"), data.draw(st.integers(1, 3), label="batch size")
    total, limit = data.draw(st.integers(0, 40), label="samples"), data.draw(st.integers(12, 60), label="limit")
    unit, size = data.draw(st.sampled_from([("chunk", 4), ("sample", 1), ("batch", batch), (3, 3)]), label="unit")
    layout, chunks = data.draw(st.sampled_from(["block", "strided"])), data.draw(st.integers(0, 2), label="window")
    options: Any = {"batch_size": batch, "max_total_samples": limit, "unit": unit, "shuffle_window": chunks}
    directory, end = tmp_path_factory.mktemp("grows") / "s", min(total, limit)
    writer = ChunkWriter(directory, 4)
    ranks = open_ranks(directory, dp, max_wait=0, layout=layout, **options)
    assert {len(dataset) for dataset in ranks} == {limit // (dp * batch) * dp * batch}
    met: list[list[tuple[Draw, Any]]] = [[] for _ in ranks]

    def go_on() -> list[int]:
        for dataset, seen in zip(ranks, met, strict=True):
            with suppress(WaitTimeout):
                for index in dataset.rank_indices[len(seen) :]:
                    row = dataset[index]
                    seen.append((dataset.draw(index), row["id"]))
        return [len(seen) for seen in met]

    for number in range(total):
        writer.write({"id": number})
        if number % 4 == 3:
            assert len(set(go_on())) == 1
    writer.close()
    if end < dp * batch:
        raised(IndexError, go_on)
        return
    assert go_on() == [len(ranks[0]) // dp] * dp
    window = -(-chunks * 4 // size) * size
    (lanes,) = oracle.course_of_draws(size, window, 0, [(dp, batch, len(met[0]), [])], end)
    assert [[tuple(draw) for draw, _ in seen] for seen in met] == lanes
    assert all(found == draw.sample for seen in met for draw, found in seen)


@pytest.mark.parametrize("layout", ["block", "strided"])
def test_in_epoch_tells_where_each_epoch_ends(tmp_path: Path, layout: LayoutName) -> None:
    stream = produce(tmp_path / "s", 12, 4, end=False)
    ranks = [open_rank(stream, rank, 2, batch_size=2, layout=layout, num_samples=1000) for rank in (0, 1)]
    assert [len(dataset) for dataset in ranks] == [1000, 1000]
    produce(stream, 18, 4)
    open_in_epoch = open_rank(stream, 0, 2, batch_size=2, layout=layout)
    assert all(map(open_in_epoch.in_epoch, open_in_epoch.rank_indices))
    for dataset in ranks:
        for epoch in range(3):
            dataset.set_epoch(epoch)
            assert [dataset.in_epoch(index) for index in dataset.rank_indices[:20]] == [True] * 8 + [False] * 12


def test_number_is_rounded_down_to_whole_batches_of_all_ranks(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 40, 4)
    for count, length in ((8, 8), (15, 8), (16, 16)):
        dataset = open_rank(stream, 1, 2, batch_size=4, num_samples=count)
        assert len(dataset) == length
        assert dataset.rank_indices == range(length // 2, length)
        raised(IndexError, dataset.__getitem__, length)
    refusal_of(ValueError, r"2 \* 4 = 8, got 7", len, open_rank(stream, 1, 2, batch_size=4, num_samples=7))


@pytest.mark.parametrize(("layout", "window"), [("block", 1), ("strided", 0)])
def test_number_that_is_never_reached_costs_nothing(tmp_path: Path, layout: LayoutName, window: int) -> None:
    stream = produce(tmp_path / "s", 16, 4, end=False)
    options: dict[str, Any] = {"batch_size": 2, "layout": layout, "shuffle_window": window}
    dataset = open_rank(stream, 3, 4, num_samples=2**60, max_wait=0, **options)
    assert len(dataset) == 2**60
    indices = dataset.rank_indices
    assert len(indices) == 2**58
    assert sorted(dataset[index]["id"] for index in indices[:4]) == [12, 13, 14, 15]
    raised(WaitTimeout, lambda: dataset[indices[-1]])
    produce(stream, 16, 4)
    # 4 positions an epoch.
    assert dataset.draw(indices[-1]).epoch == 2**56 - 1
    one = open_rank(stream, 3, 4, **options)
    one.set_epoch(2**56 - 1)
    assert [dataset[index]["id"] for index in indices[-4:]] == read([one])[0]


def test_repr_tells_what_is_known_and_looks_at_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    dataset = LazyShardedDataset(produce(tmp_path, 4, 4, end=False), num_samples=8)
    assert all(fact in repr(dataset) for fact in (str(tmp_path), "rank not known", "4 samples", "live"))
    assert len(dataset) == 8
    produce(tmp_path, 6, 4)
    assert all(fact in repr(dataset) for fact in ("rank 0 of 1", "4 samples", "live"))
    dataset.published()
    assert all(fact in repr(dataset) for fact in ("6 samples", "ended"))
    assert "LazyShardedDataset" in repr(LazyShardedDataset.__new__(LazyShardedDataset))


def units(ranks: list[LazyShardedDataset]) -> set[int]:
    found = {rank.unit for rank in ranks}
    assert {rank.state_dict()["unit"] for rank in ranks} == found
    return found


def test_live_stream_with_a_small_maximum_is_read_at_once_and_samples_may_be_left_out_before(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, 4, end=False)
    options: dict[str, Any] = {"batch_size": 2, "max_total_samples": 7, "max_wait": 0}
    assert read(open_ranks(directory, 2, unit="auto", **options), 2) == [[0, 1], [2, 3]]
    raised(WaitTimeout, read, open_ranks(directory, 2, unit="chunk", **options), 2)
    ranks = open_ranks(produce(directory, 12, 4), 4, unit="auto")
    for rank in ranks:
        rank.skip(samples=[(2, 6)])
    assert sorted(i for lane in read(ranks) for i in lane) == [0, 1, 6, 7, 8, 9, 10, 11]


def test_live_stream_that_does_not_tell_yet_is_waited_for_and_what_was_waited_for_is_said(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, 4, end=False)
    ranks = open_ranks(directory, 2, unit="auto", max_total_samples=8, max_wait=0, consumer="sft")
    for number, dataset in reversed([*enumerate(ranks)]):
        assert read_reading(directory, "sft") is None
        assert refusal_of(WaitTimeout, rf"^rank {number} of 2: ", len, dataset).chunk == 1
    mark = read_reading(directory, "sft")
    assert mark is not None and mark.needs_chunks == 2
    produce(directory, 8, 4)
    assert read([dataset]) == [[0, 1, 2, 3]]


# Three full chunks. With four ranks they are not enough, with two they are.
@pytest.mark.parametrize(("before", "after"), [(4, 1), (2, 4), (2, 2)])
def test_run_keeps_the_unit_with_which_it_began(tmp_path: Path, before: int, after: int) -> None:
    directory = produce(tmp_path / "s", 15, 4)
    begun = open_ranks(directory, before, unit="auto", batch_size=2)
    expected = 2 if before == 4 else 4
    assert units(begun) == {expected}
    seen = [i for lane in read(begun, 2) for i in lane]
    state = begun[0].state_dict(len(seen))
    ranks = open_ranks(directory, after, state, unit="auto", batch_size=1)
    assert units(ranks) == {expected}
    seen += [i for lane in read(ranks) for i in lane]
    assert len(set(seen)) == len(seen) > 15 - after
    for rank in ranks:
        rank.set_epoch(1)
    assert units(ranks) == {expected}
    refusal_of(StateMismatch, '"auto"', open_ranks, directory, after, state, unit="sample")


def test_run_that_began_while_the_stream_was_live_keeps_its_unit_once_it_has_ended(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 8, 4, end=False)
    options: dict[str, Any] = {"unit": "auto", "max_total_samples": 100}
    state = open_ranks(directory, 2, **options)[0].state_dict(4)
    assert state["unit"] == 4
    produce(directory, 9, 4)
    # Three ranks have no full chunk each; who begins now takes batches.
    assert units(open_ranks(directory, 3, **options)) == {1}
    resumed = open_ranks(directory, 3, state, **options)
    assert units(resumed) == {4}
    assert read(resumed) == read(open_ranks(directory, 3, state, max_total_samples=100))
