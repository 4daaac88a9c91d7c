"""The data set on a stream that is still being produced."""

from __future__ import annotations

import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyshard import ChunkWriter, LazyShardedDataset
from lazyshard.data.settings import LayoutName
from lazyshard.errors import LengthUnknown, WaitTimeout
from lazyshard.plan.course import Draw
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S, first_error, loader
from tests.stream.streams import HERE, produce

PRODUCER = """
import sys, time
from lazyshard import ChunkWriter
directory, per_chunk, total, pause, stop_at = sys.argv[1], *map(float, sys.argv[2:])
writer = ChunkWriter(directory, int(per_chunk))
for number in range(writer.published_samples, int(total)):
    if number == stop_at:
        print("here", flush=True)
        time.sleep(60)
    writer.write({"id": number})
    time.sleep(pause)
writer.close()
"""


@contextmanager
def producing(
    directory: Path, per_chunk: int, total: int, *, pause: float = 0.001, stop_at: int = -1
) -> Iterator[subprocess.Popen[str]]:
    """Runs a producer in a process of its own; it hangs before row `stop_at`."""
    command = [sys.executable, "-c", PRODUCER, *map(str, (directory, per_chunk, total, pause, stop_at))]
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            if stop_at < 0:
                assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def open_rank(directory: Path, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return LazyShardedDataset(directory, **grouped({"dp_rank": rank, "dp_size": dp, "max_wait": DEADLINE_S, **options}))


def iterate(dataset: Any) -> list[Any]:
    """Asks for 0, 1, 2 and so on until there is an IndexError, as `for` does: a thing that mypy has forgotten."""
    return list(dataset)


def draws(dataset: LazyShardedDataset) -> list[tuple[int, int]]:
    """Returns epoch and id of each sample of a rank, read in order."""
    return [(dataset.draw(index).epoch, dataset[index]["id"]) for index in dataset.rank_indices]


def draws_of_ranks(directory: Path, dp: int, **options: Any) -> list[list[tuple[int, int]]]:
    with ThreadPoolExecutor(dp) as pool:
        return list(pool.map(lambda rank: draws(open_rank(directory, rank, dp, **options)), range(dp)))


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"layout": "strided", "shuffle_window": 1}], ids=["block", "shuffled"])
def test_ranks_of_a_live_stream_read_every_sample_once(tmp_path: Path, dp: int, options: dict[str, Any]) -> None:
    # It appears after the readers have begun to wait for it.
    with producing(tmp_path / "s", 4, 50):
        ranks = draws_of_ranks(tmp_path / "s", dp, max_total_samples=50, **options)
    read = [i for rank in ranks for _, i in rank]
    assert {epoch for rank in ranks for epoch, _ in rank} == {0}
    assert [len(rank) for rank in ranks] == [50 // dp] * dp
    assert len(set(read)) == len(read) == 50 // dp * dp
    assert set(read) <= set(range(50))


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_on_a_live_stream_read_every_sample_once(tmp_path: Path, workers: int) -> None:
    with producing(tmp_path / "s", 4, 48):
        read: list[int] = []
        for rank in range(2):
            dataset = open_rank(tmp_path / "s", rank, 2, max_total_samples=48)
            for batch in loader(dataset, dataset.rank_indices, workers, batch_size=2):
                read += batch
    assert sorted(read) == list(range(48))


@pytest.mark.parametrize("shuffle_window", [0, 1])
def test_later_indices_go_on_with_the_next_epoch_at_the_same_place_in_every_rank(
    tmp_path: Path, shuffle_window: int
) -> None:
    with producing(tmp_path / "s", 4, 26):
        ranks = draws_of_ranks(tmp_path / "s", 3, max_total_samples=60, batch_size=2, shuffle_window=shuffle_window)
    # 26 samples make 4 steps of 3 * 2; 2 are left over.
    assert [[epoch for epoch, _ in rank] for rank in ranks] == [[0] * 8 + [1] * 8 + [2] * 4] * 3
    for epoch in (0, 1):
        read = Counter(i for rank in ranks for at, i in rank if at == epoch)
        assert read.total() == len(read) == 24


def test_smaller_maximum_ends_the_data_there(tmp_path: Path) -> None:
    with producing(tmp_path / "s", 4, 40):
        ranks = draws_of_ranks(tmp_path / "s", 2, max_total_samples=14)
    assert ranks == [
        [(0, i) for i in (0, 1, 2, 3, 8, 10, 12)],
        [(0, i) for i in (4, 5, 6, 7, 9, 11, 13)],
    ]


def test_whole_data_set_passes_from_rank_to_rank_where_the_stream_ended_early(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 16, 8, end=False)
    for layout in ("block", "strided"):
        copy = shutil.copytree(directory, tmp_path / layout)
        dataset = open_rank(copy, 0, 2, max_total_samples=20, layout=layout)
        assert len(dataset) == 20
        produce(copy, 16, 8)
        # 8 positions of each lane in epoch 0, 2 in epoch 1: a lane's rows go on past its last index.
        lanes = [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1], [8, 9, 10, 11, 12, 13, 14, 15, 8, 9]]
        expected = lanes[0] + lanes[1] if layout == "block" else [i for pair in zip(*lanes, strict=True) for i in pair]
        assert [row["id"] for row in iterate(dataset)] == expected
        assert [row["id"] for row in dataset.__getitems__(list(range(20)))] == expected
        dataset[19 if layout == "strided" else 18]
        with pytest.raises(IndexError, match=r"index must be in \[-20, 20\), got 20"):
            dataset[20]


def test_live_stream_without_a_maximum_has_no_length(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 6, 4, end=False)
    dataset = open_rank(directory)
    for use in (lambda: len(dataset), lambda: dataset[0], lambda: dataset.rank_indices, lambda: pickle.dumps(dataset)):
        with pytest.raises(LengthUnknown, match="pass max_total_samples") as caught:
            use()
        assert caught.value.directory == str(directory)
        assert isinstance(caught.value, TypeError)
    assert dataset.leftover is None
    produce(directory, 7, 4)
    ended = open_rank(directory, 0, 2)
    assert (len(dataset), len(ended), ended.leftover) == (7, 6, 1)


def test_length_does_not_change_when_the_stream_ends(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, 4, end=False)
    dataset = open_rank(directory, max_total_samples=10)
    assert len(dataset) == 10
    produce(directory, 6, 4)
    assert [row["id"] for row in iterate(dataset)] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert len(dataset) == len(pickle.loads(pickle.dumps(dataset))) == 10
    assert len(open_rank(directory, max_total_samples=10)) == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_producer_that_stops_makes_a_wait_timeout_with_its_fields(tmp_path: Path, workers: int) -> None:
    directory = produce(tmp_path / "s", 4, 4, end=False)
    dataset = open_rank(directory, max_wait=0.2, max_total_samples=8)
    error = first_error(loader(dataset, dataset.rank_indices, workers, batch_size=4))
    assert isinstance(error, WaitTimeout)
    assert (error.directory, error.chunk, error.state) == (str(directory), 1, "idle")
    assert error.waited is not None and error.waited >= 0.2
    who = "rank 0 of 1, worker 0: " if workers else "rank 0 of 1: "
    assert f"{who}waiting for chunk 1 of {directory}" in str(error)
    assert "lazyshard-error-fields" not in str(error)


def test_no_stream_makes_a_wait_timeout(tmp_path: Path) -> None:
    with pytest.raises(WaitTimeout, match="no stream there yet"):
        open_rank(tmp_path / "s", max_wait=0.05)


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


def test_producer_killed_and_started_again_costs_no_sample(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: draws_of_ranks(directory, 2, max_total_samples=22, shuffle_window=1))
        with producing(directory, 4, 22, stop_at=11) as first:
            assert first.stdout is not None and first.stdout.readline() == "here\n"
            first.send_signal(signal.SIGKILL)
            assert first.wait(DEADLINE_S) == -signal.SIGKILL
        assert not reading.done()
        with producing(directory, 4, 22):
            ranks = reading.result(DEADLINE_S)
    assert sorted(i for rank in ranks for _, i in rank) == list(range(22))
    assert {epoch for rank in ranks for epoch, _ in rank} == {0}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dp=st.integers(1, 4),
    batch=st.integers(1, 3),
    total=st.integers(0, 40),
    limit=st.integers(12, 60),
    unit=st.sampled_from(["chunk", "sample", "batch", 3]),
    layout=st.sampled_from(["block", "strided"]),
    window=st.integers(0, 2),
    epoch=st.integers(0, 2),
)
def test_decisions_taken_while_the_stream_grows_are_those_taken_after_its_end(
    tmp_path_factory: pytest.TempPathFactory,
    dp: int,
    batch: int,
    total: int,
    limit: int,
    unit: Any,
    layout: LayoutName,
    window: int,
    epoch: int,
) -> None:
    directory = tmp_path_factory.mktemp("grows") / "s"
    writer = ChunkWriter(directory, 4)
    ranks = [
        open_rank(
            directory,
            rank,
            dp,
            batch_size=batch,
            unit=unit,
            layout=layout,
            shuffle_window=window,
            max_total_samples=limit,
            max_wait=0,
        )
        for rank in range(dp)
    ]
    for dataset in ranks:
        dataset.set_epoch(epoch)
        len(dataset)
    met: list[list[tuple[Draw, Any]]] = [[] for _ in ranks]

    def go_on() -> list[int]:
        """Reads in every rank as far as it gets, and returns how far that is."""
        for dataset, seen in zip(ranks, met, strict=True):
            try:
                for index in dataset.rank_indices[len(seen) :]:
                    row = dataset[index]
                    seen.append((dataset.draw(index), row["id"]))
            except WaitTimeout:
                pass
        return [len(seen) for seen in met]

    for number in range(total):
        writer.write({"id": number})
        if number % 4 == 3:
            assert len(set(go_on())) == 1
    writer.close()
    length = min(total, limit) // (dp * batch)
    if not length:
        with pytest.raises(IndexError, match="epoch is empty"):
            go_on()
        return
    assert go_on() == [len(ranks[0]) // dp] * dp

    for rank, seen in enumerate(met):
        for draw, read in seen:
            assert read == draw.sample
        # As one sees it who comes after the end, whose indices are those of one epoch.
        late = open_rank(
            directory, rank, dp, batch_size=batch, unit=unit, layout=layout, shuffle_window=window,
            max_total_samples=limit,
        )  # fmt: skip
        expected = []
        for later in range(epoch, epoch + len(seen) // (length * batch) + 1):
            late.set_epoch(later)
            expected += [(late.draw(index), late[index]["id"]) for index in late.rank_indices]
        assert seen == expected[: len(seen)]
    for turn in {draw.epoch for seen in met for draw, _ in seen}:
        samples = [draw.sample for seen in met for draw, _ in seen if draw.epoch == turn]
        assert len(samples) == len(set(samples))
        assert all(sample < min(total, limit) for sample in samples)


def test_messages_of_a_wait_name_no_more_than_one_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = produce(tmp_path / "s", 4, 4, end=False)
    for rank in (0, 1):
        with pytest.raises(WaitTimeout) as caught:
            open_rank(directory, rank, 2, max_total_samples=16, max_wait=0)[8 * rank]
        assert re.findall(r"rank \d of 2", str(caught.value)) == [f"rank {rank} of 2"]
