"""The data set on a stream whose producer deletes what is done with, and the whole of it in two processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lazyshard import BlendedDataset, ChunkWriter, StreamReader
from lazyshard.errors import ChunkRetired, WaitTimeout
from lazyshard.stream.retention import retire
from tests.data.runs import open_rank
from tests.data.workers import PICKLED, first_error, loader
from tests.stream.streams import produce


@pytest.mark.parametrize(("shuffle_window", "start"), [(0, None), (2, None), (0, PICKLED)])
def test_sample_of_a_retired_chunk_is_an_error_at_once(tmp_path: Path, shuffle_window: int, start: str | None) -> None:
    produce(tmp_path, 12)
    retire(tmp_path, 2, 6)
    dataset = open_rank(tmp_path, shuffle_window=shuffle_window)
    options: dict[str, Any] = {"batch_size": 1} | ({"multiprocessing_context": start} if start else {})
    for index in range(1 if start else 4):
        error = first_error(loader(dataset, [index], int(start is not None), **options))
        assert type(error) is ChunkRetired
        assert error.chunk in (0, 1) and error.chunks_before == 2
        assert error.file == str(tmp_path / f"chunk_{error.chunk:05}.jsonl.completed")
    assert sorted(dataset[index]["id"] for index in range(4, 12)) == list(range(4, 12))
    assert dataset.stats().bad_samples == 0


def test_chunk_that_goes_while_a_substitute_is_looked_for_is_no_bad_sample(tmp_path: Path) -> None:
    produce(tmp_path, 12)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 1:
            # And the reader has closed it meanwhile.
            retire(tmp_path, 2, 6)
            dataset.reader._chunks.close_below(sys.maxsize)
            raise ValueError("bad")
        return row

    dataset = open_rank(tmp_path, encode_fn=encode)
    assert dataset[0] == {"id": 0}
    with pytest.raises(ChunkRetired):
        dataset[1]
    assert dataset.stats().bad_samples == 0
    assert dataset[4] == {"id": 4}


@pytest.mark.parametrize(("by", "shuffle_window"), [("index", 0), ("set_epoch", 2), ("worker", 2)])
def test_second_pass_over_what_is_gone_says_how_to_keep_it(tmp_path: Path, by: str, shuffle_window: int) -> None:
    produce(tmp_path, 12)
    retire(tmp_path, 4, 6)
    dataset = open_rank(tmp_path, num_samples=24, shuffle_window=shuffle_window)
    assert sorted(dataset[index]["id"] for index in range(8, 12)) == [8, 9, 10, 11]
    if by == "set_epoch":
        dataset.set_epoch(1)
    error = first_error(loader(dataset, [0 if by == "set_epoch" else 12], int(by == "worker"), batch_size=1))
    assert type(error) is ChunkRetired
    assert (error.chunk in range(2), error.chunks_before) == (True, 4)
    assert "epoch 1" in str(error) and "--retain all" in str(error)


def test_a_loop_that_does_not_ask_where_the_epoch_ends_is_told_to(tmp_path: Path) -> None:
    produce(tmp_path, 8, end=False)
    dataset = open_rank(tmp_path, max_total_samples=100, batch_size=2)
    assert len(dataset) == 100
    produce(tmp_path, 12)
    retire(tmp_path, 4, 6)
    with pytest.raises(ChunkRetired, match=r"epoch 1.*in_epoch\(index\)"):
        dataset[12]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_over_a_blend_that_asks_where_the_epoch_ends_comes_to_its_end_though_the_beginning_is_deleted(
    tmp_path: Path, workers: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A loop with a sampler, which asks about each batch of 2 when it has it; nothing is told of the next epoch."""
    live = produce(tmp_path / "a", 130, end=False)
    members = [open_rank(live), open_rank(produce(tmp_path / "b", 400))]
    blend = BlendedDataset([(member, 0.5) for member in members], batch_size=2, num_samples=600)
    indices = blend.rank_indices
    trained: list[int] = []
    for step, batch in enumerate(loader(blend, indices, workers, batch_size=2)):
        if not blend.in_epoch(indices[step * 2]):
            break
        trained += batch
        if step == 50:
            produce(live, 138)
            retire(live, 40, 69)
    assert sorted(trained) == sorted([*range(138)] * 2)
    assert "next epoch" not in capfd.readouterr().err + caplog.text


def test_a_reader_closes_what_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.stream.reader._LET_GO_S", 0.0)
    with ChunkWriter(tmp_path, 1) as writer:
        for number in range(4):
            writer.write({"id": number})
        writer.heartbeat()
        reader = StreamReader(tmp_path, max_wait=0.05)

        def deleted_and_open() -> int:
            links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
            return sum(str(link).startswith(str(tmp_path)) and str(link).endswith("(deleted)") for link in links)

        reader.read(0)
        reader.read(1)
        retire(tmp_path, 1, 4)
        assert deleted_and_open() == 1
        reader.read(2)
        assert deleted_and_open() == 0
        retire(tmp_path, 3, 4)
        assert deleted_and_open() == 2
        with pytest.raises(WaitTimeout):
            reader.read(4)
        assert deleted_and_open() == 0
