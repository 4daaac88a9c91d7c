"""Blends: the right stream at each position, each stream in its own order, the same on every rank."""

from __future__ import annotations

import itertools
import os
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import BlendedDataset, LateRow, LazyShardedDataset
from lazyshard.data.blend_space import BlendReader
from lazyshard.data.index_reader import IndexReader
from lazyshard.errors import ChunkRetired, LengthUnknown, RankInvalid, WaitTimeout
from lazyshard.format.records import Retired
from lazyshard.plan.blend import BlendTable
from tests.data.blends import Stream, blend, ids, take, write
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S, PICKLED
from tests.stream.streams import foreign

pytestmark = [pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")]


@pytest.fixture
def streams(tmp_path: Path) -> Path:
    for stream in (Stream("a", 24, 3), Stream("b", 10, 2), Stream("c", 9, 4)):
        write(tmp_path, stream)
    return tmp_path


def alone(directory: Path, letter: str, rank: int, dp: int, count: int, **options: Any) -> list[str]:
    """What a stream gives a rank by itself."""
    dataset = LazyShardedDataset(
        directory / letter, dp_rank=rank, dp_size=dp, num_samples=dp * count, **grouped(layout="strided", **options)
    )
    return ids([dataset[index] for index in dataset.rank_indices])


def test_what_a_blend_is(streams: Path) -> None:
    blended = blend(streams, {"a": 2, "b": 1})
    assert take(blended, 9) == ["a0", "b0", "a1", "a2", "b1", "a3", "a4", "b2", "a5"]
    assert blended.shares == (2 / 3, 1 / 3)
    assert blended.period == 3
    assert [str(dataset.directory) for dataset in blended.datasets] == [str(streams / "a"), str(streams / "b")]
    drawn = blended.draw(4)
    assert (drawn.dataset, drawn.draw.epoch, drawn.draw.sample) == (1, 0, 1)
    assert repr(blended).startswith("<BlendedDataset: 0.6667 of <LazyShardedDataset '")


@pytest.mark.parametrize("layout", ["block", "strided"])
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_each_stream_comes_in_its_own_order_at_the_same_positions_on_every_rank(
    streams: Path, layout: str, window: int, dp: int
) -> None:
    count = 40
    order = BlendTable((3, 2, 1)).streams(0, count)
    for rank in range(dp):
        blended = blend(
            streams,
            {"a": 3, "b": 2, "c": 1},
            rank,
            dp,
            layout=layout,
            shuffle_window=window,
            num_samples=dp * count,
            batch_size=4,
        )
        own = {letter: iter(alone(streams, letter, rank, dp, count, shuffle_window=window)) for letter in "abc"}
        expected = [next(own["abc"[stream]]) for stream in order]
        assert take(blended, count, 4) == expected
        assert ids([blended[index] for index in blended.rank_indices]) == expected


def test_any_order_of_asking_gives_the_same(streams: Path) -> None:
    blended = blend(streams, {"a": 3, "b": 2, "c": 1}, num_samples=60)
    expected = take(blended, 60)
    rng = random.Random(1)
    for _ in range(60):
        indices = rng.sample(range(60), rng.randint(1, 9))
        assert ids(blended.__getitems__(indices)) == [expected[index] for index in indices]
        start = rng.randrange(50)
        assert ids(blended.__getitems__(list(range(start, start + 9)))) == expected[start : start + 9]
        assert blended[start - 60]["id"] == expected[start]
    with pytest.raises(IndexError):
        blended[60]


def test_who_reads_all_indices_gets_what_each_draws(streams: Path, caplog: pytest.LogCaptureFixture) -> None:
    for layout in ("block", "strided"):
        blended = blend(streams, {"a": 3, "b": 1}, 0, 2, layout=layout)
        every = list(range(len(blended)))
        drawn = [blended.draw(index) for index in every]
        expected = [f"{'ab'[one.dataset]}{one.draw.sample}" for one in drawn]
        assert ids([blended[index] for index in every]) == expected
        assert ids(blended.__getitems__(every)) == expected
    assert "rank 0 of 2 was asked for index 1, which is rank 1's" in caplog.text


def test_indices_from_the_end(streams: Path) -> None:
    expected = take(blend(streams, {"a": 1, "b": 1}), 20)
    assert blend(streams, {"a": 1, "b": 1}, num_samples=20)[-1]["id"] == expected[-1]
    blended = blend(streams, {"a": 1, "b": 1}, num_samples=20)
    assert ids([blended[index] for index in (-2, -1, 0, 1, -1, -20)]) == [
        *expected[-2:],
        *expected[:2],
        expected[-1],
        "a0",
    ]


def test_in_epoch_answers_for_the_whole_batch(tmp_path: Path) -> None:
    for stream in (Stream("a", 13, 5), Stream("b", 40, 5)):
        write(tmp_path, stream)
    blended = blend(tmp_path, {"a": 0.6, "b": 0.4}, num_samples=200, batch_size=4)
    indices = blended.rank_indices
    assert [blended.in_epoch(indices[at]) for at in range(0, 28, 4)] == [True] * 5 + [False] * 2
    assert all(blended.draw(index).draw.epoch == 0 for index in indices[:20])


def test_other_ranks_indices_are_theirs(streams: Path) -> None:
    first, second = (blend(streams, {"a": 1, "b": 1}, rank, 2, num_samples=24) for rank in range(2))
    assert ids([first[index] for index in range(24)]) == ids([second[index] for index in range(24)])


def test_another_epoch_is_of_every_stream(streams: Path) -> None:
    blended = blend(streams, {"a": 1, "b": 1}, shuffle_window=4, batch_size=2)
    first = take(blended, 20)
    blended.set_epoch(1)
    second = take(blended, 20)
    assert first != second
    assert sorted(one for one in first if one[0] == "b") == sorted(one for one in second if one[0] == "b")
    again = blend(streams, {"a": 1, "b": 1}, shuffle_window=4, batch_size=2)
    again.set_epoch(1)
    assert take(again, 20) == second


STOPPING = {
    ("ended", "first_exhausted"): (20, Counter(a=10, b=10)),
    ("ended", "all_exhausted"): (48, Counter(a=24, b=24)),
    ("ended", "num_samples"): (36, Counter(a=18, b=18)),
    ("bounded", "first_exhausted"): (12, Counter(a=6, b=6)),
    ("bounded", "all_exhausted"): (48, Counter(a=24, b=24)),
    ("bounded", "num_samples"): (36, Counter(a=18, b=18)),
    ("live", "first_exhausted"): None,
    ("live", "all_exhausted"): None,
    ("live", "num_samples"): (36, Counter(a=18, b=18)),
}
"""Stream a has 24 samples; b has ended with 10, or is live: bounded by max_total_samples to 6, or by nothing."""


@pytest.mark.parametrize(("stream", "stopping"), STOPPING)
def test_where_a_blend_ends(tmp_path: Path, stream: str, stopping: str) -> None:
    write(tmp_path, Stream("a", 24, 3))
    write(tmp_path, Stream("b", 10, 2), end=stream == "ended")
    options: dict[str, Any] = {"num_samples": 36} if stopping == "num_samples" else {"stopping": stopping}
    limit = 6 if stream == "bounded" else None
    parts = [
        (LazyShardedDataset(tmp_path / "a", dp_rank=0, dp_size=1, max_wait=DEADLINE_S), 1.0),
        (LazyShardedDataset(tmp_path / "b", dp_rank=0, dp_size=1, max_wait=DEADLINE_S, max_total_samples=limit), 1.0),
    ]
    blended = BlendedDataset(parts, batch_size=2, **grouped(options))
    expected = STOPPING[stream, stopping]
    if expected is None:
        with pytest.raises(LengthUnknown, match="a stream in it is still being produced: pass num_samples"):
            len(blended)
        return
    if stream == "live":
        write(tmp_path, Stream("b", 18, 2))
    assert (len(blended), Counter(one[0] for one in take(blended, len(blended), 2))) == expected


def test_what_repeats_repeats_whole(streams: Path) -> None:
    drawn = Counter(take(blend(streams, {"a": 1, "b": 1}, stopping="all_exhausted"), 47))
    assert {one: drawn[one] for one in drawn if one[0] == "a"} == {f"a{i}": 1 for i in range(24)}
    assert sorted(drawn[f"b{i}"] for i in range(10)) == [2] * 7 + [3] * 3


@pytest.mark.parametrize(("stopping", "last"), [("first_exhausted", 11), ("all_exhausted", 23)])
def test_all_ranks_see_where_a_blend_without_a_length_ends(streams: Path, stopping: Any, last: int) -> None:
    for rank in range(2):
        blended = blend(streams, {"a": 1, "b": 1}, rank, 2, num_samples=1000, stopping=stopping)
        within = [blended.in_epoch(index) for index in blended.rank_indices[:100]]
        assert within == [True] * last + [False] * (100 - last)


@pytest.mark.parametrize("stopping", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("batch", [2, 3, 5])
def test_a_blend_without_a_length_ends_where_one_with_a_length_does(streams: Path, stopping: Any, batch: int) -> None:
    options: dict[str, Any] = {"stopping": stopping, "batch_size": batch}
    blended = blend(streams, {"a": 2, "b": 1}, 1, 2, num_samples=1200, **options)
    most = len(blend(streams, {"a": 2, "b": 1}, 1, 2, **options).rank_indices)
    assert [blended.in_epoch(index) for index in blended.rank_indices[:90]] == [True] * most + [False] * (90 - most)


def test_a_live_stream_is_waited_for_only_where_it_is_wanted(tmp_path: Path) -> None:
    write(tmp_path, Stream("a", 24, 3))
    write(tmp_path, Stream("b", 4, 2), end=False)
    blended = blend(tmp_path, {"a": 1, "b": 1}, num_samples=40, max_wait=0.2, batch_size=4)
    assert take(blended, 8, 4) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]
    assert ids(blended.__getitems__([8])) == ["a4"]
    with pytest.raises(WaitTimeout):
        blended.__getitems__([8, 9])
    write(tmp_path, Stream("b", 8, 2), end=False)
    assert ids(blended.__getitems__([8, 9, 10, 11])) == ["a4", "b4", "a5", "b5"]


@pytest.mark.parametrize(
    ("start", "options"),
    [
        ("fork", {}),
        (PICKLED, {}),
        ("fork", {"encode_fn": LateRow}),
        ("fork", {"encode_fn": dict}),
    ],
)
def test_workers(streams: Path, start: str, options: dict[str, Any]) -> None:
    expected = take(blend(streams, {"a": 2, "b": 1}, num_samples=60), 60)
    blended = blend(streams, {"a": 2, "b": 1}, num_samples=60, batch_size=4, **options)
    loader = DataLoader(
        blended, 4, sampler=blended.rank_indices, num_workers=2, collate_fn=list, multiprocessing_context=start
    )
    assert ids([row for batch in loader for row in batch]) == expected
    assert {type(row) for batch in loader for row in batch} == {dict}


def test_large_rows(tmp_path: Path) -> None:
    write(tmp_path, Stream("a", 8, 4), size=100_000)
    write(tmp_path, Stream("b", 8, 4))
    for late in (False, True):
        blended = blend(tmp_path, {"a": 1, "b": 1}, batch_size=4, encode_fn=LateRow if late else None)
        loader = DataLoader(blended, 4, num_workers=1, collate_fn=list)
        rows = [row for batch in loader for row in batch]
        assert ids(rows) == take(blend(tmp_path, {"a": 1, "b": 1}), 16)
        assert {len(row.get("blob", "")) for row in rows if row["id"][0] == "a"} == {100_000}


@pytest.mark.parametrize("foreign_first", [False, True])
def test_rows_that_nobody_has_checked_are_not_parsed_late(tmp_path: Path, streams: Path, foreign_first: bool) -> None:
    other = foreign(tmp_path / "other", b'{"id":"f0"}\n[1]\n{"id":"f2"}\n{"id":"f3"}\n', end=True)
    parts = [
        (LazyShardedDataset(streams / "a", dp_rank=0, dp_size=1, encode_fn=LateRow), 1.0),
        (LazyShardedDataset(other, dp_rank=0, dp_size=1, samples_per_chunk=4, encode_fn=LateRow), 1.0),
    ]
    blended = BlendedDataset(parts[::-1] if foreign_first else parts, batch_size=4)

    def kinds(rows: list[Any]) -> list[Any]:
        return [(type(row).__name__, row) for row in rows]

    found = [pair for batch in DataLoader(blended, 4, num_workers=1, collate_fn=kinds) for pair in batch]
    of_ours = [kind for kind, row in found if row["id"][0] == "a"]
    of_others = [(kind, row["id"]) for kind, row in found if row["id"][0] == "f"]
    assert of_ours == ["LateRow"] * 4
    assert [kind for kind, _ in of_others] == ["dict"] * 4
    assert of_others[0][1] == "f0"
    assert of_others[1][1] in ("f0", "f2", "f3"), "another row of its chunk in the place of the bad one"


def test_a_loader_with_a_state_goes_on_in_mid_epoch(streams: Path) -> None:
    def loader() -> StatefulDataLoader[Any]:
        blended = blend(streams, {"a": 2, "b": 1}, num_samples=40, batch_size=4)
        return StatefulDataLoader(blended, 4, sampler=list(blended.rank_indices), num_workers=2, collate_fn=list)

    whole = [ids(batch) for batch in loader()]
    begun = loader()
    assert [ids(batch) for batch in itertools.islice(begun, 3)] == whole[:3]
    later = loader()
    later.load_state_dict(begun.state_dict())
    assert [ids(batch) for batch in later] == whole[3:]


def test_a_bad_row_is_substituted_by_its_own_stream(streams: Path) -> None:
    with open(streams / "a" / "chunk_00000.jsonl", "r+b") as file:
        os.pwrite(file.fileno(), b"x", file.read().index(b"a1"))
    blended = blend(streams, {"a": 1, "b": 1}, batch_size=8)
    read = take(blended, 8, 8)
    assert read[0] == "a0"
    assert read[2] in ("a0", "a2")
    assert [one for place, one in enumerate(read) if place != 2] == ["a0", "b0", "b1", "a2", "b2", "a3", "b3"]
    assert [stats.bad_samples for stats in blended.stats()] == [1, 0]


def test_a_chunk_that_was_deleted_is_an_error_only_where_it_is_wanted(streams: Path) -> None:
    stream_id = str(blend(streams, {"a": 1}).datasets[0].stream_id)
    (streams / "a" / "retired.json").write_bytes(Retired(stream_id, 2, 0.0).encode())
    for chunk in range(2):
        (streams / "a" / f"chunk_{chunk:05d}.jsonl").unlink()
        (streams / "a" / f"chunk_{chunk:05d}.jsonl.completed").unlink()
    blended = blend(streams, {"b": 3, "a": 1})
    assert ids(blended.__getitems__([0])) == ["b0"]
    with pytest.raises(ChunkRetired):
        blended.__getitems__([0, 1, 2, 3])
    with pytest.raises(ChunkRetired) as caught:
        list(DataLoader(blend(streams, {"a": 1}), 2, num_workers=1, collate_fn=list))
    assert caught.value.chunks_before == 2


def test_a_blend_of_one_and_of_many(tmp_path: Path) -> None:
    letters = [f"s{i}_" for i in range(12)]
    for i, letter in enumerate(letters):
        write(tmp_path, Stream(letter, 5 * i + 5, 20))
    assert take(blend(tmp_path, {"s9_": 7}), 4) == [f"s9_{i}" for i in range(4)]
    blended = blend(tmp_path, {letter: float(i + 1) for i, letter in enumerate(letters)}, batch_size=10)
    assert (blended.period, len(blended)) == (78, 390)
    assert sorted(take(blended, 390, 10)) == sorted(f"s{i}_{number}" for i in range(12) for number in range(5 * i + 5))


def test_a_foreign_directory_can_be_blended(tmp_path: Path, streams: Path) -> None:
    other = foreign(tmp_path / "other", b'{"id":"f0"}\n{"id":"f1"}\n', end=True)
    blended = BlendedDataset(
        [
            (LazyShardedDataset(streams / "a", dp_rank=0, dp_size=1), 1),
            (LazyShardedDataset(other, dp_rank=0, dp_size=1, samples_per_chunk=2), 1),
        ]
    )
    assert take(blended, 4) == ["a0", "f0", "a1", "f1"]


def test_copies_read_the_same(streams: Path) -> None:
    blended = blend(streams, {"a": 1, "b": 1}, num_samples=40)
    expected = take(blended, 40, 4)
    copy: BlendedDataset = pickle.loads(pickle.dumps(blended))
    assert take(copy, 40, 4) == expected
    blended.set_epoch(1)
    assert pickle.loads(pickle.dumps(blended)).epoch == 1


def test_who_comes_while_another_thread_merges_lines_gets_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (Stream("a", 300, 50), Stream("b", 100, 50)):
        write(tmp_path, stream)
    expected = take(blend(tmp_path, {"a": 3, "b": 1}), 400)
    blended = blend(tmp_path, {"a": 3, "b": 1})
    behind = len(blended._reader.merged.lines) or 256
    assert ids(blended.__getitems__(list(range(4)))) == expected[:4]
    assert len(blended._reader.merged.lines) == behind, "the next batch is merged anew"
    real = IndexReader.lines_from
    other: list[list[str]] = []

    def lines_from(self: IndexReader, index: int, *, wait: bool) -> list[bytes]:
        monkeypatch.setattr(IndexReader, "lines_from", real)
        other.append(ids(blended.__getitems__(list(range(behind, behind + 100)))))
        return real(self, index, wait=wait)

    monkeypatch.setattr(IndexReader, "lines_from", lines_from)
    assert ids(blended.__getitems__(list(range(behind, behind + 100)))) == expected[behind : behind + 100]
    assert other == [expected[behind : behind + 100]]


def test_what_is_read_ahead_is_bounded(streams: Path) -> None:
    write(streams, Stream("d", 2000, 500), size=1000)
    write(streams, Stream("e", 2000, 500), size=60_000)
    for letter, most in (("d", 256), ("e", 40)):
        blended = blend(streams, {letter: 1, "a": 1}, num_samples=400)
        reader: BlendReader = blended._reader
        for index in range(300):
            blended[index]
            assert len(reader.merged.lines) <= most or index < 260


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda d: BlendedDataset([]), ValueError, "a blend is one of at least one data set, none was given"),
        (lambda d: BlendedDataset(cast("Any", [("a", 1)])), TypeError, "'a' is no LazyShardedDataset"),
        (lambda d: BlendedDataset(cast("Any", {"a": 1})), TypeError, "pairs of a data set and its weight"),
        (lambda d: BlendedDataset(cast("Any", None)), TypeError, "pairs of a data set and its weight.*; got None"),
        (
            lambda d: BlendedDataset([], order=cast("Any", "strided")),
            TypeError,
            "order is a lazyshard.Order, got 'stri",
        ),
        (lambda d: blend(d, {"a": 1}, schedule=[5]), TypeError, "a schedule takes pairs of a step and the weights"),
        (lambda d: blend(d, {"a": 1}, schedule=[(5, 1)]), TypeError, "a schedule takes pairs.*; got 1"),
        (lambda d: blend(d, {"a": 1}, schedule=[(5, ["x"])]), ValueError, "a weight is a number, got 'x'"),
        (lambda d: blend(d, {"a": cast("Any", "x")}), ValueError, "a weight is a number, got 'x'"),
        (lambda d: blend(d, {"a": 1}, micro_batches_per_step=0), ValueError, "micro_batches_per_step is an integer"),
        (lambda d: blend(d, {"a": 1, "b": 0}), ValueError, "a weight is a finite number above 0, got 0"),
        (lambda d: blend(d, {"a": 1}, batch_size=0), ValueError, "batch_size is an integer from 1, got 0"),
        (lambda d: blend(d, {"a": 1}, num_samples=0), ValueError, "num_samples is an integer from 1, got 0"),
        (lambda d: blend(d, {"a": 1}, layout="other"), ValueError, "layout is one of block, strided, got 'other'"),
        (
            lambda d: blend(d, {"a": 1}, stopping="never"),
            ValueError,
            "stopping is one of first_exhausted, all_exhausted, got 'never'",
        ),
        (
            lambda d: blend(d, {"a": 1}, micro_batches_per_step=0.5),
            ValueError,
            "micro_batches_per_step is an integer from 1, got 0.5",
        ),
        (
            lambda d: blend(d, {"a": 1, "b": 1}, batch_size=50).rank,
            ValueError,
            "less than one batch of 50 for each of 1",
        ),
        (lambda d: len(blend(d, {"a": 1}, num_samples=3, batch_size=4)), ValueError, "less than one batch of 4"),
    ],
)
def test_settings_that_cannot_be_are_refused(streams: Path, make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(streams)


def test_streams_too_short_to_be_repeated_are_refused(streams: Path) -> None:
    write(streams, Stream("o", 1, 2))
    with pytest.raises(ValueError, match=r"o: the stream has 1 samples, fewer than one for each of 2 ranks"):
        len(blend(streams, {"a": 1, "o": 1}, 0, 2, num_samples=20))


def test_data_sets_that_cannot_be_blended_are_refused(streams: Path) -> None:
    def opened(letter: str, **options: Any) -> LazyShardedDataset:
        return LazyShardedDataset(streams / letter, **grouped({"dp_rank": 0, "dp_size": 2, **options}))

    with pytest.raises(ValueError, match="two data sets of a blend are of the same stream"):
        BlendedDataset([(opened("a"), 1), (opened("a"), 1)])
    used = opened("a")
    assert len(used) == 24
    with pytest.raises(RuntimeError, match="a blend takes data sets that are new"):
        BlendedDataset([(used, 1)])
    mixed = BlendedDataset([(opened("a"), 1), (opened("b", dp_rank=1), 1)])
    with pytest.raises(RankInvalid, match="the data sets of a blend are of one rank"):
        len(mixed)
