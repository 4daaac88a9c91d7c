"""`LazyShardedSequences`: each row once, as many sequences on each rank, whatever the ranks and workers."""

from __future__ import annotations

import itertools
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate

from lazyshard import BadRows, ChunkWriter, LateRow, LazyShardedSequences, Pack, Pad, Split
from lazyshard.errors import (
    BadSample,
    ChunkCorrupt,
    ChunkRetired,
    LengthsMissing,
    SkipSample,
    TooManyBadSamples,
    WaitTimeout,
)
from lazyshard.stream.retire import retire
from tests.data.sequence_runs import dealt, expected, loader_of, open_sequences, tokens_of_row, write_rows, written
from tests.plan.test_splitting import megatron
from tests.stream.lengths import put_lengths
from tests.stream.streams import foreign, produce

LENGTHS = [6, 4, 2, 7, 3, 5, 1, 9, 8, 2, 2, 4, 6]

forms = st.sampled_from([
    Pack(9),
    Pack(30),
    Pad(9, token=-1),
    Split(size=5),
    Split(size=7, bos=-1, eos=-2),
    Split(size=30, eos=-2),
    Split(size=4, overlap=1),
])  # fmt: skip


def drawn(directory: Path, form: Any, dp: int = 1, workers: int = 0, **options: Any) -> list[list[list[list[int]]]]:
    """What each rank's loader gives."""
    size = options.get("batch_size", 1)
    ranks = [open_sequences(directory, form, rank, dp, **options) for rank in range(dp)]
    return [list(loader_of(one, workers, size)) for one in ranks]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=25),
    form=forms,
    window=st.integers(1, 4),
    dp=st.integers(1, 4),
    batch_size=st.integers(1, 3),
    seed=st.one_of(st.none(), st.integers(0, 3)),
    epoch=st.integers(0, 1),
)
def test_ranks_draw_the_sequences_of_all_windows_in_turn(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    form: Any,
    window: int,
    dp: int,
    batch_size: int,
    seed: int | None,
    epoch: int,
) -> None:
    directory = write_rows(tmp_path_factory.mktemp("s"), lengths)
    whole = expected(lengths, form, 3 * window, seed, epoch)
    for rank, micro_batches in enumerate(dealt(whole, dp, batch_size)):
        sequences = open_sequences(directory, form, rank, dp, batch_size=batch_size, window=window, seed=seed)
        sequences.set_epoch(epoch)
        assert list(map(written, sequences)) == list(itertools.chain(*micro_batches))


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=25),
    form=forms,
    dp=st.integers(1, 4),
    batch_size=st.integers(1, 3),
)
def test_completed_every_row_is_drawn_and_ranks_are_equal(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], form: Any, dp: int, batch_size: int
) -> None:
    directory = write_rows(tmp_path_factory.mktemp("s"), lengths)
    whole = expected(lengths, form, 6)
    ranks = [
        list(map(written, open_sequences(directory, form, rank, dp, batch_size=batch_size, at_end="complete")))
        for rank in range(dp)
    ]
    micro = dp * batch_size
    assert {len(rank) for rank in ranks} == {-(-len(whole) // micro) * batch_size}
    steps = range(0, len(ranks[0]), batch_size)
    in_turn = [one for first in steps for rank in ranks for one in rank[first : first + batch_size]]
    full = len(whole) // micro * micro
    assert in_turn[:full] == whole[:full]
    left = in_turn[full:]
    if isinstance(form, Pack):
        rows = list(itertools.chain(*whole[full:]))
        different = left[: min(len(left), max(len(rows), len(whole) - full))]
        assert list(itertools.chain(*different)) == rows
    else:
        different = whole[full:]
    assert left == [different[place % len(different)] for place in range(len(left))]


def test_packs_are_lists_of_encoded_rows(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": row["input_ids"][:], "labels": [-100] * len(row["input_ids"])}

    (first, *_) = LazyShardedSequences(directory, encode, form=Pack(10), window=2, dp_rank=0, dp_size=1)
    assert first == [
        {"input_ids": [0, 1, 2, 3, 4, 5], "labels": [-100] * 6, "length": 6},
        {"input_ids": [100, 101, 102, 103], "labels": [-100] * 4, "length": 4},
    ]
    assert drawn(directory, Pack(10))[0] == [[[0, 1]], [[3, 4]], [[2, 5]], [[6, 7]], [[8, 9]], [[10, 11]], [[12]]]


def test_split_sequences_have_labels_and_positions_of_every_row(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", [3, 2, 6])

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": np.array(row["input_ids"], np.int32), "labels": [-token for token in row["input_ids"]]}

    form = Split(size=5, bos=7, eos=8, every_bos=9)
    found = list(LazyShardedSequences(directory, encode, form=form, dp_rank=0, dp_size=1, at_end="complete"))
    assert [{name: values.tolist() for name, values in one.items()} for one in found] == [
        {"input_ids": [7, 0, 1, 2, 8], "labels": [7, 0, -1, -2, 8], "position_ids": [0, 1, 2, 3, 4]},
        {"input_ids": [7, 100, 101, 8, 7], "labels": [7, -100, -101, 8, 7], "position_ids": [0, 1, 2, 3, 0]},
        {"input_ids": [9, 200, 201, 202, 203], "labels": [9, -200, -201, -202, -203], "position_ids": [0, 1, 2, 3, 4]},
        {"input_ids": [9, 204, 205, 8], "labels": [9, -204, -205, 8], "position_ids": [0, 1, 2, 3]},
    ]
    assert {values.dtype for one in found for values in one.values()} == {np.dtype(np.int64)}


def test_padded_rows_are_collated_as_they_are(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", [3, 2])

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"labels": row["input_ids"]}

    sequences = LazyShardedSequences(directory, encode, form=Pad(4, token=9), batch_size=2, dp_rank=0, dp_size=1)
    (batch,) = DataLoader(sequences, batch_size=2, collate_fn=default_collate)
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[0, 1, 2, 9], [100, 101, 9, 9]],
        "labels": [[0, 1, 2, -100], [100, 101, -100, -100]],
        "attention_mask": [[1, 1, 1, 0], [1, 1, 0, 0]],
    }


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_take_micro_batches_in_turn(tmp_path: Path, workers: int) -> None:
    lengths = [1 + 7 * number % 9 for number in range(40)]
    directory = write_rows(tmp_path / "s", lengths)
    for form in (Pack(12), Split(size=12, eos=-1)):
        options: dict[str, Any] = {"batch_size": 2, "seed": 3}
        assert drawn(directory, form, 2, workers, **options) == dealt(expected(lengths, form, 6, 3), 2, 2)


def test_a_spawned_worker_finds_all_in_the_pickle(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    sequences = pickle.loads(pickle.dumps(open_sequences(directory, Pack(10))))
    assert list(map(written, sequences)) == expected(LENGTHS, Pack(10), 6)


def test_sequences_are_drawn_as_soon_as_their_window_is_published(tmp_path: Path) -> None:
    whole = expected(LENGTHS, Pack(10), 6)
    write_rows(tmp_path / "s", LENGTHS[:6], end=False)
    ranks = [iter(open_sequences(tmp_path / "s", Pack(10), rank, 3, max_wait=0)) for rank in range(3)]
    assert [written(next(rank)) for rank in ranks] == whole[:3]
    for rank in ranks:
        # The sequences of the next step are not all known.
        with pytest.raises(WaitTimeout, match="waiting for chunk 3"):
            next(rank)
    write_rows(tmp_path / "s", LENGTHS)
    assert drawn(tmp_path / "s", Pack(10), 3) == dealt(whole, 3, 1)


@pytest.mark.parametrize("overlap", [0, 1])
def test_split_sequences_are_megatrons(tmp_path: Path, overlap: int) -> None:
    lengths = [1 + 5 * number % 11 for number in range(20)]
    directory = write_rows(tmp_path / "s", lengths)
    order = np.arange(len(lengths), dtype=np.int32)
    cuts = megatron().build_sample_idx_int32(np.array(lengths, np.int32), order, 8, 1, sum(lengths), True, overlap)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    line = list(itertools.chain(*(tokens_of_row(number, length) for number, length in enumerate(lengths))))
    places = [int(starts[document] + offset) for document, offset in cuts]
    found = [line[place : place + 8 + overlap] for place in places[:-1]]
    ranks = drawn(directory, Split(size=8, overlap=overlap), 2)
    in_turn = [one for step in zip(*ranks, strict=True) for batch in step for one in batch]
    # What is left over behind them Megatron does not draw.
    assert len(in_turn) >= len(found) - 1
    assert in_turn[: len(found)] == found[: len(in_turn)]


def test_what_is_left_over_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    with caplog.at_level(logging.WARNING, "lazyshard"):
        drawn(directory, Pack(10), 2, batch_size=2)
    (said,) = caplog.messages
    assert said.endswith(
        "7 sequences; left over at the end of the epoch: 3, fewer than dp_size * batch_size = 2 * 2; at_end='drop': "
        "they are not drawn"
    )


@pytest.mark.parametrize("form", [Pack(8), Pad(8)])
def test_a_row_that_is_too_long_is_refused_or_left_out_on_all_ranks(
    tmp_path: Path, form: Any, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    for rank in range(2):
        with pytest.raises(
            BadSample, match=r"row 1 .*sample 7\): ValueError: it has 9 tokens, .* at most 8: take long"
        ) as bad:
            list(open_sequences(directory, form, rank, 2))
        assert bad.value.sample == 7
    ranks = [open_sequences(directory, form, rank, 2, too_long="drop") for rank in range(2)]
    without = [length if length <= 8 else 0 for length in LENGTHS]
    assert [list(map(written, rank)) for rank in ranks] == [
        list(itertools.chain(*one)) for one in dealt(expected(without, form, 6), 2, 1)
    ]
    assert [rank.stats().dropped for rank in ranks] == [1, 0]
    assert "sample 7" in caplog.text


class Encode:
    """Fails for some rows."""

    def __init__(self, *bad: int, skipped: int = -1) -> None:
        self.bad = bad
        self.skipped = skipped

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] in self.bad:
            raise OSError("no such image")
        if row["id"] == self.skipped:
            raise SkipSample("not today")
        return row


def encoding(directory: Path, form: Any, encode: Any, **options: Any) -> LazyShardedSequences:
    return LazyShardedSequences(directory, encode, form=form, dp_rank=0, dp_size=1, window=2, **options)


def test_bad_rows_are_left_out_of_their_packs(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    sequences = encoding(directory, Pack(10), Encode(5, skipped=6))
    assert [written(one) for one in sequences] == [[0, 1], [3, 4], [2], [7], [8, 9], [10, 11], [12]]
    assert sequences.stats()[:1] + sequences.stats()[3:5] == (1, 1, 0)


def test_another_sequence_of_the_window_takes_the_place_of_one_of_which_nothing_is_left(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    found = [written(one) for one in encoding(directory, Pack(10), Encode(3, 4))]
    assert found[1] in ([0, 1], [2, 5])
    assert found[:1] + found[2:] == [[0, 1], [2, 5], [6, 7], [8, 9], [10, 11], [12]]
    # The last window has one sequence.
    with pytest.raises(BadSample, match=r"sample 12.*nothing is left of its sequence"):
        list(encoding(directory, Pack(10), Encode(12)))


def test_bad_rows_are_raised_on_demand_and_when_there_are_too_many(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    with pytest.raises(BadSample, match=r"sample 5\): OSError: no such image"):
        list(encoding(directory, Pack(10), Encode(5), bad_rows=BadRows("raise")))
    with pytest.raises(TooManyBadSamples, match="2 bad samples in this process, their limit is 1"):
        list(encoding(directory, Pack(10), Encode(5, 8), bad_rows=BadRows(limit=1)))


def test_nothing_is_left_out_of_what_is_cut(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    for encode in (Encode(5), Encode(skipped=5)):
        with pytest.raises(BadSample, match=r"sample 5\)"):
            list(encoding(directory, Split(size=8), encode))


def test_rows_that_are_longer_than_measured_are_told(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)

    def longer(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"input_ids": row["input_ids"] + [0] * (row["id"] == 1)}

    says = r"sample 1\): ValueError: it has 5 tokens as encoded here, and 4 as sealed"
    with pytest.raises(BadSample, match=says):
        list(encoding(directory, Split(size=8), longer))
    with pytest.raises(BadSample, match=says + ".*for which its sequence has no room"):
        list(encoding(directory, Pack(10), longer, bad_rows=BadRows("raise")))
    assert written(next(iter(encoding(directory, Pack(10), longer)))) == [0]


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ({"text": "a"}, "has no input_ids, only 'text'"),
        ({"input_ids": [[1]]}, r"whole numbers in one dimension, found numbers of shape \(1, 1\)"),
        ({"input_ids": ["a"]}, "whole numbers in one dimension, found text, such as 'a'"),
        ({"input_ids": [3, -2]}, r"input_ids\[1\] is -2, expected a token id from 0 to 2147483647"),
        ({"input_ids": [1], "labels": []}, "1 input_ids and 0 labels"),
    ],
)
def test_what_has_no_tokens_is_told(tmp_path: Path, sample: Any, says: str) -> None:
    directory = write_rows(tmp_path / "s", [1])
    with pytest.raises(BadSample, match=says):
        list(encoding(directory, Split(size=8), lambda row: sample))


def test_a_damaged_row_is_left_out_too(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    path = directory / "chunk_00000.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"id":1,', b'"id":7,'))
    assert written(next(iter(open_sequences(directory, Pack(10))))) == [0]
    with pytest.raises(ChunkCorrupt, match="row 1"):
        next(iter(open_sequences(directory, Pack(10), bad_rows=BadRows("raise"))))


def test_lengths_have_to_be_known(tmp_path: Path) -> None:
    produce(tmp_path / "s", 4)
    with pytest.raises(LengthsMissing, match=r"of chunk 0 are in tokens is not known.*lazyshard-producer run --source"):
        list(open_sequences(tmp_path / "s", Pack(10)))
    put_lengths(tmp_path / "s", [3, 4], [5, 0])
    assert list(map(written, open_sequences(tmp_path / "s", Pack(10)))) == [[0], [1, 2]]
    with pytest.raises(LengthsMissing, match="lazyshard-producer run --source"):
        LazyShardedSequences(foreign(tmp_path / "f", b"{}\n"), form=Pack(10), dp_rank=0, dp_size=1)


def test_deleted_chunks_are_told(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    retire(directory, 1, 5)
    with pytest.raises(ChunkRetired):
        list(open_sequences(directory, Pack(10)))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"encode_fn": LateRow}, ValueError, "LateRow hands out rows unparsed"),
        ({"form": 8192}, TypeError, r"form is Pack\(SIZE\)"),
        ({"at_end": "pad"}, ValueError, "at_end is one of drop, complete"),
        ({"too_long": "cut"}, ValueError, "too_long is one of raise, drop"),
        ({"batch_size": 0}, ValueError, "batch_size is 1 or more, got 0"),
        ({"window": 0}, ValueError, "window is 1 or more, got 0"),
        ({"max_wait": -1}, ValueError, "max_wait is 0 or more seconds, got -1"),
        ({"seed": -1}, ValueError, "seed is 0 or more, got -1"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        open_sequences(write_rows(tmp_path / "s", [1]), **{"form": Pack(4), **options})


def test_a_window_has_ten_thousand_rows_if_not_said_otherwise(tmp_path: Path) -> None:
    ChunkWriter(tmp_path / "s", 3000).close()
    assert LazyShardedSequences(tmp_path / "s", form=Pack(9), dp_rank=0, dp_size=1).window == 4
