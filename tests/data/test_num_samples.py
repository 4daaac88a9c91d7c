"""`num_samples`: as many indices as a training run has steps for, on over the ends of epochs; and what `repr` tells."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, LazyShardedDataset
from lazyshard.data.settings import LayoutName
from lazyshard.errors import LengthUnknown, WaitTimeout
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S, PICKLED, loader
from tests.stream.streams import produce

both_layouts = pytest.mark.parametrize("layout", ["block", "strided"])


def open_rank(directory: Path, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return LazyShardedDataset(directory, **grouped({"dp_rank": rank, "dp_size": dp, "max_wait": DEADLINE_S, **options}))


def read(dataset: LazyShardedDataset) -> list[int]:
    return [dataset[index]["id"] for index in dataset.rank_indices]


def drawn(dataset: LazyShardedDataset) -> list[tuple[int, int]]:
    """Epoch and sample of each index of a rank, and that it is the sample that is read."""
    draws = [dataset.draw(index) for index in dataset.rank_indices]
    assert read(dataset) == [draw.sample for draw in draws]
    return [(draw.epoch, draw.sample) for draw in draws]


def planned(course: Course, lane: int, total: int, epoch: int) -> list[tuple[int, int]]:
    """What a rank draws in one epoch."""
    course = course.in_epoch(epoch)
    return [(epoch, course.draw(lane, p, total).sample) for p in range(course.epoch_length(total))]


@both_layouts
@pytest.mark.parametrize("window", [0, 1])
def test_ended_stream_over_three_epochs_is_three_passes(tmp_path: Path, layout: LayoutName, window: int) -> None:
    stream = produce(tmp_path / "s", 23, 4)
    options: dict[str, Any] = {"batch_size": 2, "layout": layout, "shuffle_window": window}
    for rank in (0, 1):
        passes: list[int] = []
        one = open_rank(stream, rank, 2, **options)
        for epoch in range(3):
            one.set_epoch(epoch)
            passes += read(one)
        three = open_rank(stream, rank, 2, num_samples=60, **options)
        assert len(three) == 60
        assert read(three) == passes
        # From another epoch on it goes on from there.
        three.set_epoch(1)
        assert read(three)[:20] == passes[10:]


@both_layouts
@pytest.mark.parametrize("window", [0, 2])
def test_live_stream_that_ends_in_the_middle_of_a_window_goes_on_in_every_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: LayoutName, window: int
) -> None:
    stream = produce(tmp_path / "s", 36, 4, end=False)
    ranks = [
        open_rank(stream, rank, 3, batch_size=2, layout=layout, shuffle_window=window, num_samples=100)
        for rank in range(3)
    ]
    # 100 are 16 batches of each rank and some.
    assert [len(dataset) for dataset in ranks] == [96] * 3
    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(drawn, dataset) for dataset in ranks]
        # With windows of two stripes, 24 samples, this ends 5 samples into the third stripe of 12 a lane.
        produce(stream, 41, 4)
        found = [each.result(DEADLINE_S) for each in reading]
    course = Course(Rules(4, 4 * window), [Part(3, 2)])
    for rank, draws in enumerate(found):
        epochs = [pair for epoch in range(3) for pair in planned(course, rank, 41, epoch)]
        assert draws == epochs[:32]
    for epoch in (0, 1):
        samples = [sample for draws in found for at, sample in draws if at == epoch]
        assert len(samples) == len(set(samples)) == 36
    if window:
        # In another order each time.
        assert [sample for _, sample in found[0][:12]] != [sample for _, sample in found[0][12:24]]
    assert caplog.messages == []


def test_every_sample_comes_once_an_epoch_where_nothing_is_left_over(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 8, 4, end=False)
    ranks = [open_rank(stream, rank, 2, shuffle_window=1, num_samples=60) for rank in (0, 1)]
    assert [len(dataset.rank_indices) for dataset in ranks] == [30, 30]
    produce(stream, 20, 4)
    found = [drawn(dataset) for dataset in ranks]
    for epoch in range(3):
        assert sorted(sample for draws in found for at, sample in draws if at == epoch) == list(range(20))


def test_indices_are_read_before_the_stream_has_an_end(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 8, 4, end=False)
    with pytest.raises(LengthUnknown, match="or num_samples, how many to train on"):
        len(open_rank(stream))
    dataset = open_rank(stream, num_samples=100, max_wait=0)
    assert [dataset[i]["id"] for i in range(8)] == list(range(8))
    with pytest.raises(WaitTimeout):
        dataset[8]
    produce(stream, 10, 4)
    assert [dataset[i]["id"] for i in range(8, 12)] == [8, 9, 0, 1]
    assert dataset.leftover == 0


@both_layouts
@pytest.mark.parametrize("workers", [1, 3])
def test_loader_with_workers_goes_on_over_the_ends_of_epochs(tmp_path: Path, layout: LayoutName, workers: int) -> None:
    stream = produce(tmp_path / "s", 23, 4)
    batches: list[list[list[int]]] = []
    for rank in (0, 1):
        dataset = open_rank(stream, rank, 2, batch_size=3, layout=layout, shuffle_window=1, num_samples=48)
        batches.append(list(loader(dataset, dataset.rank_indices, workers, batch_size=3)))
        assert [i for batch in batches[-1] for i in batch] == read(dataset)
    # Three batches a rank and epoch; no batch mixes two.
    assert [len(each) for each in batches] == [8, 8]
    for epoch in (0, 1):
        samples = [i for each in batches for batch in each[3 * epoch : 3 * epoch + 3] for i in batch]
        assert len(samples) == len(set(samples)) == 18


def test_spawned_worker_has_the_same_length(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 6, 4)
    dataset = open_rank(stream, num_samples=10)
    batches = loader(dataset, dataset.rank_indices, 1, batch_size=5, multiprocessing_context=PICKLED)
    assert list(batches) == [[0, 1, 2, 3, 4], [5, 0, 1, 2, 3]]
    assert len(pickle.loads(pickle.dumps(dataset))) == len(copy.deepcopy(dataset)) == 10


@both_layouts
def test_in_epoch_tells_where_each_epoch_ends(tmp_path: Path, layout: LayoutName) -> None:
    stream = produce(tmp_path / "s", 12, 4, end=False)
    ranks = [open_rank(stream, rank, 2, batch_size=2, layout=layout, num_samples=1000) for rank in (0, 1)]
    assert [len(dataset) for dataset in ranks] == [1000, 1000]
    produce(stream, 18, 4)
    for dataset in ranks:
        for epoch in range(3):
            dataset.set_epoch(epoch)
            # 18 samples are four batches of two ranks.
            assert [dataset.in_epoch(index) for index in dataset.rank_indices[:20]] == [True] * 8 + [False] * 12


@pytest.mark.parametrize("live", [True, False])
def test_epoch_still_ends_at_max_total_samples(tmp_path: Path, live: bool) -> None:
    stream = produce(tmp_path / "s", 24, 4, end=not live)
    ranks = [open_rank(stream, rank, 2, max_total_samples=10, num_samples=20, max_wait=0) for rank in (0, 1)]
    first = [(0, i) for i in (0, 1, 2, 3, 8)] + [(1, i) for i in (0, 1, 2, 3, 8)]
    assert [drawn(dataset) for dataset in ranks] == [
        first,
        [(0, i) for i in (4, 5, 6, 7, 9)] + [(1, i) for i in (4, 5, 6, 7, 9)],
    ]


@pytest.mark.parametrize(("count", "length"), [(8, 8), (15, 8), (16, 16), (1, None), (7, None)])
def test_number_is_rounded_down_to_whole_batches_of_all_ranks(tmp_path: Path, count: int, length: int | None) -> None:
    stream = produce(tmp_path / "s", 40, 4)
    dataset = open_rank(stream, 1, 2, batch_size=4, num_samples=count)
    if length is None:
        with pytest.raises(
            ValueError, match=rf"num_samples is at least dp_size \* batch_size = 2 \* 4 = 8, got {count}"
        ):
            len(dataset)
        return
    assert len(dataset) == length
    assert dataset.rank_indices == range(length // 2, length)
    with pytest.raises(IndexError):
        dataset[length]


def test_fewer_than_an_epoch_are_its_beginning(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 40, 4)
    ranks = [open_rank(stream, rank, 2, num_samples=12, layout="strided") for rank in (0, 1)]
    assert [read(dataset) for dataset in ranks] == [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 12, 13]]


@both_layouts
@pytest.mark.parametrize("window", [0, 1])
def test_number_that_is_never_reached_costs_nothing(tmp_path: Path, layout: LayoutName, window: int) -> None:
    stream = produce(tmp_path / "s", 16, 4, end=False)
    options: dict[str, Any] = {"batch_size": 2, "layout": layout, "shuffle_window": window}
    dataset = open_rank(stream, 3, 4, num_samples=2**60, max_wait=0, **options)
    assert len(dataset) == 2**60
    indices = dataset.rank_indices
    assert len(indices) == 2**58
    assert sorted(dataset[index]["id"] for index in indices[:4]) == [12, 13, 14, 15]
    with pytest.raises(WaitTimeout):
        dataset[indices[-1]]
    produce(stream, 16, 4)
    # 4 positions an epoch.
    assert dataset.draw(indices[-1]).epoch == 2**56 - 1
    one = open_rank(stream, 3, 4, **options)
    one.set_epoch(2**56 - 1)
    assert [dataset[index]["id"] for index in indices[-4:]] == read(one)


@pytest.mark.parametrize("wrong", [0, -1, True, 8.0, "8", 2**63])
def test_number_that_cannot_be_is_refused_before_a_stream_is_waited_for(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"num_samples is an integer from 1 to 9223372036854775807, got "):
        LazyShardedDataset(tmp_path / "none", num_samples=wrong)


def test_stream_with_less_than_a_batch_has_no_epoch_to_go_on_with(tmp_path: Path) -> None:
    dataset = open_rank(produce(tmp_path / "s", 3, 4), 0, 2, batch_size=2, num_samples=8)
    with pytest.raises(IndexError, match="an epoch is empty"):
        dataset[0]


def test_another_batch_size_than_the_loaders_is_told_where_epochs_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = produce(tmp_path / "s", 16, 4)
    for count, told in ((16, 0), (32, 1)):
        dataset = open_rank(stream, batch_size=2, num_samples=count)
        assert len(dataset.__getitems__([0, 1, 2, 3])) == 4
        assert len(caplog.messages) == told
    assert "where an epoch ends, a batch may then mix it with the next" in caplog.messages[0]


def test_repr_tells_what_is_known_and_looks_at_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    stream = tmp_path / "s"
    with ChunkWriter(stream, 4) as writer:
        for number in range(6):
            writer.write({"id": number})
        dataset = LazyShardedDataset(stream, num_samples=8)
        assert repr(dataset) == (
            f"<LazyShardedDataset '{stream}', rank not known yet: 4 samples published so far, live>"
        )
        assert len(dataset) == 8
        assert "rank 0 of 1: 4 samples published so far, live" in repr(dataset)
        given = open_rank(stream, 1, 2)
        assert "rank 1 of 2: 4 samples" in repr(given)
    # Nobody has looked since.
    assert "4 samples published so far, live" in repr(dataset)
    dataset.published()
    assert repr(dataset) == f"<LazyShardedDataset '{stream}', rank 0 of 1: 6 samples published so far, ended>"
    assert repr(pickle.loads(pickle.dumps(dataset))) == repr(dataset)


def test_repr_of_one_whose_constructor_has_failed_does_not_raise() -> None:
    assert repr(LazyShardedDataset.__new__(LazyShardedDataset)) == "<LazyShardedDataset, not open>"
