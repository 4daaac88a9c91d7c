"""Blends: the right stream at each position, each stream in its own order, the same on every rank."""

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from torch.utils.data import DataLoader

from lazyshard import BlendedDataset, LateRow, LazyShardedDataset, Order
from lazyshard.data.index_space import IndexReader
from lazyshard.errors import ChunkRetired, ConfigInvalid, LengthUnknown, WaitTimeout
from lazyshard.plan.blend import BlendTable
from lazyshard.stream.listing import retire
from tests.data.options import grouped
from tests.data.runs import Stream, blend, open_rank, read, take, write
from tests.data.test_stream_state import stateful
from tests.data.workers import PICKLED, ids
from tests.stream.streams import foreign, raised, refusal_of


@pytest.fixture
def streams(tmp_path: Path) -> Path:
    for stream in (Stream("a", 24, 3), Stream("b", 10, 2), Stream("c", 9, 4)):
        write(tmp_path, stream)
    return tmp_path


def test_what_a_blend_is(streams: Path) -> None:
    blended = blend(streams, {"a": 2, "b": 1})
    assert take(blended, 9) == ["a0", "b0", "a1", "a2", "b1", "a3", "a4", "b2", "a5"]
    assert blended.shares == (2 / 3, 1 / 3)
    assert blended.period == 3
    assert [str(dataset.directory) for dataset in blended.datasets] == [str(streams / "a"), str(streams / "b")]
    drawn = blended.draw(4)
    assert (drawn.dataset, drawn.draw.epoch, drawn.draw.sample) == (1, 0, 1)
    assert repr(blended).startswith("<BlendedDataset: 0.6667 of <LazyShardedDataset '")


@pytest.mark.parametrize(("layout", "window", "dp"), [("block", 2, 1), ("block", 0, 3), ("strided", 2, 3)])
def test_each_stream_comes_in_its_own_order_on_every_rank(streams: Path, layout: str, window: int, dp: int) -> None:
    count, weights = 24, {"a": 3.0, "b": 2.0, "c": 1.0}
    order = BlendTable((3, 2, 1)).streams(0, count)
    options: dict[str, Any] = {"layout": layout, "shuffle_window": window, "num_samples": dp * count, "batch_size": 4}
    lanes = []
    for rank in range(dp):
        blended = blend(streams, weights, rank, dp, **options)
        alone = [open_rank(streams / one, rank, dp, num_samples=dp * count, shuffle_window=window) for one in "abc"]
        own = list(map(iter, read(alone)))
        lanes.append([str(next(own[stream])) for stream in order])
        assert take(blended, count, 4) == lanes[-1]
        assert ids([blended[index] for index in blended.rank_indices]) == lanes[-1]
    every = ids(blend(streams, weights, 0, dp, **options).__getitems__(list(range(dp * count))))
    by_position: Any = zip(*lanes, strict=True)
    assert every == list(itertools.chain(*(lanes if layout == "block" else by_position)))


def test_any_order_of_asking_gives_the_same(streams: Path) -> None:
    blended = blend(streams, {"a": 3, "b": 2, "c": 1}, num_samples=60)
    expected = take(blended, 60)
    rng = random.Random(1)
    for _ in range(30):
        indices = rng.sample(range(60), rng.randint(1, 9))
        assert ids(blended.__getitems__(indices)) == [expected[index] for index in indices]
        start = rng.randrange(50)
        assert ids(blended.__getitems__(list(range(start, start + 9)))) == expected[start : start + 9]
        assert blended[start - 60]["id"] == expected[start]
    raised(IndexError, lambda: blended[60])


@pytest.mark.parametrize(("stream", "first", "all_of"), [("ended", 20, 48), ("bounded", 12, 48), ("live", None, None)])
def test_where_a_blend_ends(tmp_path: Path, stream: str, first: int | None, all_of: int | None) -> None:
    """Stream a has 24 samples; b has ended with 10, or is live: bounded by max_total_samples to 6, or by nothing."""
    write(tmp_path, Stream("a", 24, 3))
    write(tmp_path, Stream("b", 10, 2), end=stream == "ended")
    limits = {"a": None, "b": 6 if stream == "bounded" else None}
    ends: list[tuple[dict[str, Any], int | None]] = [({"stopping": "first_exhausted"}, first)]
    ends += [({"stopping": "all_exhausted"}, all_of), ({"num_samples": 36}, 36)]
    for options, expected in ends:
        members = [open_rank(tmp_path / one, max_total_samples=limit) for one, limit in limits.items()]
        blended = BlendedDataset([(member, 1.0) for member in members], batch_size=2, **grouped(options))
        if expected is None:
            raised(LengthUnknown, len, blended)
            continue
        if stream == "live":
            write(tmp_path, Stream("b", 18, 2))
        assert len(blended) == expected
        assert Counter(one[0] for one in take(blended, expected, 2)) == Counter(a=expected // 2, b=expected // 2)


def test_a_live_stream_is_waited_for_only_where_it_is_wanted(tmp_path: Path) -> None:
    write(tmp_path, Stream("a", 24, 3))
    write(tmp_path, Stream("b", 4, 2), end=False)
    blended = blend(tmp_path, {"a": 1, "b": 1}, num_samples=40, max_wait=0.2, batch_size=4)
    assert take(blended, 8, 4) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]
    assert ids(blended.__getitems__([8])) == ["a4"]
    raised(WaitTimeout, blended.__getitems__, [8, 9])
    write(tmp_path, Stream("b", 8, 2), end=False)
    assert ids(blended.__getitems__([8, 9, 10, 11])) == ["a4", "b4", "a5", "b5"]


@pytest.mark.parametrize(("start", "encode"), [("fork", None), (PICKLED, LateRow), (PICKLED, dict)])
def test_workers(streams: Path, start: str, encode: Any) -> None:
    expected = take(blend(streams, {"a": 2, "b": 1}, num_samples=60), 60)
    blended = blend(streams, {"a": 2, "b": 1}, num_samples=60, batch_size=4, encode_fn=encode)
    loader = DataLoader(
        blended, 4, sampler=blended.rank_indices, num_workers=2, collate_fn=list, multiprocessing_context=start
    )
    rows = [row for batch in loader for row in batch]
    assert (ids(rows), {type(row) for row in rows}) == (expected, {dict})


def test_large_rows_and_those_of_another_rank_are_what_is_drawn(tmp_path: Path) -> None:
    for stream, size in ((Stream("a", 8, 4), 100_000), (Stream("b", 8, 4), 0)):
        write(tmp_path, stream, size=size)
    blended = blend(tmp_path, {"a": 1, "b": 1}, 0, 2, batch_size=2)
    # In blocks: those of this rank, and those of the other one.
    lanes = [[f"{'ab'[at % 2]}{4 * rank + at // 2}" for at in range(8)] for rank in (0, 1)]
    assert ids(blended.__getitems__(list(range(16)))) == lanes[0] + lanes[1]


@pytest.mark.parametrize("foreign_first", [False, True])
def test_rows_that_nobody_has_checked_are_not_parsed_late(tmp_path: Path, streams: Path, foreign_first: bool) -> None:
    other = foreign(tmp_path / "other", b'{"id":"f0"}\n{"id":"f1"}\n', end=True)
    members = open_rank(streams / "a", encode_fn=LateRow), open_rank(other, samples_per_chunk=2, encode_fn=LateRow)
    parts = [(member, 1.0) for member in members]
    blended = BlendedDataset(parts[::-1] if foreign_first else parts, batch_size=4)

    def kinds(rows: list[Any]) -> list[Any]:
        return [(type(row).__name__, row["id"]) for row in rows]

    found = [pair for batch in DataLoader(blended, 4, num_workers=1, collate_fn=kinds) for pair in batch]
    assert sorted(found) == [("LateRow", "a0"), ("LateRow", "a1"), ("dict", "f0"), ("dict", "f1")]


def test_a_loader_with_a_state_goes_on_in_mid_epoch(streams: Path) -> None:
    def loader(state: Any = None) -> Any:
        return stateful(blend(streams, {"a": 2, "b": 1}, num_samples=40, batch_size=4), 2, 4, state)

    whole, begun = list(loader()), loader()
    assert list(itertools.islice(begun, 3)) == whole[:3]
    assert list(loader(begun.state_dict())) == whole[3:]


def test_a_bad_row_is_substituted_by_its_own_stream(streams: Path) -> None:
    path = streams / "a" / "chunk_00000.jsonl"
    path.write_bytes(path.read_bytes().replace(b"a1", b"x1", 1))
    blended = blend(streams, {"a": 1, "b": 1}, batch_size=8)
    read = take(blended, 8, 8)
    assert read[2] in ("a0", "a2")
    assert read[:2] + read[3:] == ["a0", "b0", "b1", "a2", "b2", "a3", "b3"]
    assert [stats.bad_samples for stats in blended.stats()] == [1, 0]


def test_a_chunk_that_was_deleted_is_an_error_only_where_it_is_wanted(streams: Path) -> None:
    retire(streams / "a", 2, 8)
    blended = blend(streams, {"b": 3, "a": 1})
    assert ids(blended.__getitems__([0])) == ["b0"]
    raised(ChunkRetired, blended.__getitems__, [0, 1, 2, 3])
    caught = raised(ChunkRetired, lambda: list(DataLoader(blend(streams, {"a": 1}), 2, num_workers=1, collate_fn=list)))
    assert caught.chunks_before == 2


def test_who_comes_while_another_thread_merges_gets_all_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (Stream("a", 300, 50), Stream("b", 100, 50)):
        write(tmp_path, stream)
    expected = take(blend(tmp_path, {"a": 3, "b": 1}), 400)
    blended = blend(tmp_path, {"a": 3, "b": 1})
    assert ids(blended.__getitems__([0, 1, 2, 3])) == expected[:4]
    # Where what was merged ends, the next batch is merged anew.
    behind = len(blended._lanes.ahead[3])
    batch = list(range(behind, behind + 100))
    real = IndexReader.lines
    other: list[list[str]] = []

    def lines(self: IndexReader, *arguments: Any) -> list[bytes]:
        monkeypatch.setattr(IndexReader, "lines", real)
        other.append(ids(blended.__getitems__(batch)))
        return real(self, *arguments)

    monkeypatch.setattr(IndexReader, "lines", lines)
    assert [ids(blended.__getitems__(batch)), *other] == [expected[behind : behind + 100]] * 2


def opened(directory: Path, letter: str, rank: int = 0) -> LazyShardedDataset:
    return open_rank(directory / letter, rank, 2)


def used(dataset: LazyShardedDataset) -> LazyShardedDataset:
    assert len(dataset) == 24
    return dataset


@pytest.mark.parametrize(
    ("make", "error", "what"),
    [
        (lambda d: BlendedDataset([]), ValueError, "at least one data set"),
        (lambda d: BlendedDataset(cast("Any", [("a", 1)])), TypeError, "'a' is not a LazyShardedDataset"),
        (lambda d: BlendedDataset(cast("Any", {"a": 1})), TypeError, "pairs of a data set"),
        (lambda d: BlendedDataset([], order=cast("Any", "strided")), TypeError, "got 'strided'"),
        (lambda d: BlendedDataset([(opened(d, "a"), 1)], order=Order(seed=1)), ValueError, "seed"),
        (lambda d: blend(d, {"a": 1}, schedule=[5]), TypeError, r"got \[5\]"),
        (lambda d: blend(d, {"a": 1}, schedule=[(5, 1)]), TypeError, "got 1"),
        (lambda d: blend(d, {"a": 1}, schedule=[(5, ["x"])]), ValueError, "weights .*'x'"),
        (lambda d: blend(d, {"a": 1, "b": 1}, schedule=[(5, (1, 0))]), ValueError, "micro_batches_per_step"),
        (lambda d: blend(d, {"a": cast("Any", "x")}), ValueError, "weights .*'x'"),
        (lambda d: blend(d, {"a": 1, "b": 0}), ValueError, "weight .* got 0"),
        (lambda d: blend(d, {"a": 1}, micro_batches_per_step=0.5), ValueError, "micro_batches_per_step .* got 0.5"),
        (lambda d: blend(d, {"a": 1}, batch_size=0), ValueError, "batch_size .* got 0"),
        (lambda d: blend(d, {"a": 1}, num_samples=0), ValueError, "num_samples .* got 0"),
        (lambda d: blend(d, {"a": 1}, layout="other"), ValueError, "layout .* got 'other'"),
        (lambda d: blend(d, {"a": 1}, stopping="never"), ValueError, "stopping .* got 'never'"),
        (lambda d: blend(d, {"a": 1, "b": 1}, batch_size=50).rank, ValueError, "less than one batch of 50"),
        (lambda d: len(blend(d, {"a": 1}, num_samples=3, batch_size=4)), ValueError, "less than one batch of 4"),
        (
            lambda d: len(blend(d, {"a": 1, write(d, Stream("o", 1, 2)).name: 1}, 0, 2, num_samples=20)),
            ValueError,
            "o: the stream has 1 samples",
        ),
        (lambda d: BlendedDataset([(opened(d, "a"), 1), (opened(d, "a"), 1)]), ValueError, "the same stream"),
        (lambda d: BlendedDataset([(used(opened(d, "a")), 1)]), RuntimeError, "takes unused data sets"),
        (lambda d: len(BlendedDataset([(opened(d, "a"), 1), (opened(d, "b", 1), 1)])), ConfigInvalid, "the same rank"),
    ],
)
def test_what_cannot_be_is_refused(streams: Path, make: Any, error: type[Exception], what: str) -> None:
    refusal_of(error, what, make, streams)
