"""`LazyShardedSequences`: each row once, as many sequences on each rank; mistakes are told as soon as they are seen."""

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate

from lazyshard import BadRows, ChunkWriter, LateRow, LazyShardedSequences, Pack, Pad, Split, errors
from lazyshard.errors import BadSample, ChunkCorrupt, LengthUnknown, SkipSample, StreamMismatch
from lazyshard.format.batch import encode_pack
from lazyshard.stream.listing import retire
from tests.data.runs import LENGTHS, all_written, dealt, expected, forms, loader_of, open_sequences, write_rows, written
from tests.stream.streams import foreign, produce, publish_rows, put_lengths, raised, refusal_of


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "s", LENGTHS)


def drawn(directory: Path, form: Any, dp: int = 1, workers: int = 0, **options: Any) -> list[list[list[list[int]]]]:
    size = options.get("batch_size", 1)
    ranks = [open_sequences(directory, form, rank, dp, **options) for rank in range(dp)]
    return [list(loader_of(one, workers, size)) for one in ranks]


def values_of(sequence: dict[str, Any]) -> dict[str, Any]:
    return {name: values.tolist() for name, values in sequence.items()}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=25), forms, st.integers(1, 4), st.integers(1, 3))
def test_completed_every_row_is_drawn_and_ranks_are_equal(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], form: Any, dp: int, batch_size: int
) -> None:
    directory = write_rows(tmp_path_factory.mktemp("s"), lengths)
    whole, micro = expected(lengths, form, 6), dp * batch_size
    options = {"batch_size": batch_size, "at_end": "complete"}
    ranks = [all_written(open_sequences(directory, form, rank, dp, **options)) for rank in range(dp)]
    assert {len(rank) for rank in ranks} == {-(-len(whole) // micro) * batch_size}
    steps = range(0, len(ranks[0]), batch_size)
    in_turn = [one for first in steps for rank in ranks for one in rank[first : first + batch_size]]
    full = len(whole) // micro * micro
    assert in_turn[:full] == whole[:full]
    different, left = whole[full:], in_turn[full:]
    if isinstance(form, Pack):
        rows = list(itertools.chain(*different))
        different = left[: min(len(left), max(len(rows), len(different)))]
        assert list(itertools.chain(*different)) == rows
    assert left == [different[place % len(different)] for place in range(len(left))]


def test_packs_are_lists_of_encoded_rows(stream: Path) -> None:
    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": row["input_ids"][:], "labels": [-100] * len(row["input_ids"])}

    (first, *_) = LazyShardedSequences(stream, encode, form=Pack(10), window=2, dp_rank=0, dp_size=1)
    assert first == [
        {"input_ids": [0, 1, 2, 3, 4, 5], "labels": [-100] * 6, "length": 6},
        {"input_ids": [100, 101, 102, 103], "labels": [-100] * 4, "length": 4},
    ]


def test_split_sequences_have_labels_and_positions_of_every_row(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", [3, 2, 6])

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": np.array(row["input_ids"], np.int32), "labels": [-token for token in row["input_ids"]]}

    form = Split(size=5, bos=7, eos=8, every_bos=9)
    found = list(LazyShardedSequences(directory, encode, form=form, dp_rank=0, dp_size=1, at_end="complete"))
    assert list(map(values_of, found)) == [
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
    assert values_of(batch) == {
        "input_ids": [[0, 1, 2, 9], [100, 101, 9, 9]],
        "labels": [[0, 1, 2, -100], [100, 101, -100, -100]],
        "attention_mask": [[1, 1, 1, 0], [1, 1, 0, 0]],
    }


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_and_copies_take_micro_batches_in_turn(tmp_path: Path, workers: int) -> None:
    lengths = [1 + 7 * number % 9 for number in range(40)]
    directory = write_rows(tmp_path / "s", lengths)
    for form in (Pack(12), Split(size=12, eos=-1)):
        options: dict[str, Any] = {"batch_size": 2, "seed": 3}
        whole = dealt(expected(lengths, form, 6, 3), 2, 2)
        assert drawn(directory, form, 2, workers, **options) == whole
        copy = pickle.loads(pickle.dumps(open_sequences(directory, form, 1, 2, **options)))
        assert all_written(copy) == list(itertools.chain(*whole[1]))
    sequences = open_sequences(write_rows(tmp_path / "t", [10] * 12), Pack(10), batch_size=2)
    assert list(loader_of(sequences, 2, 4)) == [[[0], [1], [4], [5]], [[2], [3], [6], [7]], [[8], [9]], [[10], [11]]]


def test_what_is_left_over_is_told(stream: Path, caplog: pytest.LogCaptureFixture) -> None:
    drawn(stream, Pack(10), 2, batch_size=2)
    (said,) = caplog.messages
    assert "7 sequences; left over at the end of the epoch: 3, fewer than" in said


@pytest.mark.parametrize("form", [Pack(8), Pad(8)])
def test_too_long_row_is_refused_or_left_out(stream: Path, form: Any, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(2):
        run = open_sequences(stream, form, rank, 2)
        assert refusal_of(BadSample, r"too_long='drop'", list, run).sample == 7
    ranks = [open_sequences(stream, form, rank, 2, too_long="drop") for rank in range(2)]
    without = [length if length <= 8 else 0 for length in LENGTHS]
    whole = [list(itertools.chain(*one)) for one in dealt(expected(without, form, 6), 2, 1)]
    assert [all_written(rank) for rank in ranks] == whole
    assert [rank.stats().dropped for rank in ranks] == [1, 0]
    assert "sample 7" in caplog.text
    # One of the first chunk is told at once.
    assert raised(BadSample, open_sequences, stream, type(form)(5)).sample == 0
    open_sequences(stream, type(form)(5), too_long="drop")
    open_sequences(stream, Split(5))


class Encode:
    def __init__(self, *bad: int, skipped: int = -1) -> None:
        self.bad = bad
        self.skipped = skipped

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] in self.bad:
            raise OSError("no such image")
        if row["id"] == self.skipped:
            raise SkipSample("not today")
        return row


def longer(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"input_ids": row["input_ids"] + [0] * (row["id"] == 1)}


def encoding(directory: Path, form: Any, encode: Any, **options: Any) -> LazyShardedSequences:
    return LazyShardedSequences(directory, encode, form=form, dp_rank=0, dp_size=1, window=2, **options)


def test_bad_rows_are_left_out_of_their_packs(stream: Path) -> None:
    sequences = encoding(stream, Pack(10), Encode(5, skipped=6))
    assert all_written(sequences) == [[0, 1], [3, 4], [2], [7], [8, 9], [10, 11], [12]]
    assert sequences.stats()[:1] + sequences.stats()[3:5] == (1, 1, 0)
    assert written(next(iter(encoding(stream, Pack(10), longer)))) == [0]
    # A sequence without usable rows is replaced by another one of its window.
    found = all_written(encoding(stream, Pack(10), Encode(3, 4)))
    assert found[1] in ([0, 1], [2, 5])
    assert found[:1] + found[2:] == [[0, 1], [2, 5], [6, 7], [8, 9], [10, 11], [12]]


@pytest.mark.parametrize(
    ("form", "encode", "options", "sample", "says"),
    [
        (Pack(10), Encode(12), {}, 12, "no row of its sequence"),
        (Pack(10), Encode(5), {"bad_rows": BadRows("raise")}, 5, "no such image"),
        (Pack(10), longer, {"bad_rows": BadRows("raise")}, 1, "5 tokens .* but 4 as sealed .*exceeds the room"),
        (Split(8), Encode(5), {}, 5, "no such image"),
        (Split(8), Encode(skipped=5), {}, 5, "not today"),
        (Split(8), longer, {}, 1, "5 tokens .* but 4 as sealed"),
        (Split(8), lambda row: {"text": "a"}, {}, 0, "only 'text'"),
        (Split(8), lambda row: {"input_ids": [[1]]}, {}, 0, r"shape \(1, 1\)"),
        (Split(8), lambda row: {"input_ids": ["a"]}, {}, 0, "text, such as 'a'"),
        (Split(8), lambda row: {"input_ids": [0.5]}, {}, 0, "such as 0.5"),
        (Split(8), lambda row: {"input_ids": None}, {}, 0, "such as None"),
        (Split(8), lambda row: {"input_ids": [3, -2]}, {}, 0, r"input_ids\[1\] is -2"),
        (Split(8), lambda row: {"input_ids": [1], "labels": []}, {}, 0, "1 input_ids and 0 labels"),
    ],
)
def test_rows_that_make_nothing(stream: Path, form: Any, encode: Any, options: Any, sample: int, says: str) -> None:
    assert refusal_of(BadSample, says, lambda: list(encoding(stream, form, encode, **options))).sample == sample


def test_too_many_bad_rows_and_damaged_ones(stream: Path) -> None:
    bad = raised(BadSample, lambda: list(encoding(stream, Pack(10), Encode(5, 8), bad_rows=BadRows(limit=1))))
    assert bad.count == 2
    path = stream / "chunk_00000.jsonl"
    whole = path.read_bytes()
    for row, left in ((1, 0), (0, 1)):
        # The first row, too, by which packs are known, says nothing yet.
        path.write_bytes(whole.replace(b'"id":%d,' % row, b'"id":7,'))
        assert written(next(iter(open_sequences(stream, Pack(10))))) == [left]
        corrupt = raised(ChunkCorrupt, lambda: next(iter(open_sequences(stream, Pack(10), bad_rows=BadRows("raise")))))
        assert corrupt.row == row


def test_lengths_have_to_be_known(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4)
    ways = (f"run --source {directory} ", "--measure TOKENIZER", "--encode", "ChunkWriter.write(row, tokens=N)")
    missing = raised(LengthUnknown, open_sequences, directory, Pack(10))
    assert [way for way in ways if way not in str(missing)] == []
    raised(LengthUnknown, LazyShardedSequences, foreign(tmp_path / "f", b"{}\n"), form=Pack(10), dp_rank=0, dp_size=1)
    put_lengths(directory, [3, 4])
    sequences = open_sequences(directory, Pack(10))
    put_lengths(directory, [5, 0], first=1)
    assert all_written(sequences) == [[0], [1, 2]]


def test_where_the_first_chunks_are_deleted_the_first_that_is_left_is_looked_at(stream: Path) -> None:
    state = open_sequences(stream, Pack(10)).state_dict(3)
    retire(stream, 2, 5)
    again = open_sequences(stream, Pack(10))
    raised(errors.ChunkRetired, lambda: list(again))
    again.load_state_dict(state)
    assert all_written(again) == expected(LENGTHS, Pack(10), 6)[3:]
    assert raised(BadSample, open_sequences, stream, Pack(5)).sample == 7


def write_packs(directory: Path, *, end: bool = True) -> Path:
    writer = ChunkWriter(directory, 1)
    writer.write(encode_pack([b'{"input_ids":[1]}\n', b'{"input_ids":[2,3]}\n'], [1, 2]), tokens=3)
    writer.close(end)
    return directory


@pytest.mark.parametrize("form", [Pack(10), Split(10), Pad(10)])
def test_a_stream_of_packs_is_refused(tmp_path: Path, form: Any) -> None:
    row = {"pack": [{"input_ids": np.arange(3)}], "lengths": [3]}
    arrays = publish_rows(tmp_path / "arrays", 1, [row], [3], arrays=True, encoding={"by": "hand"})
    for directory in (write_packs(tmp_path / "s"), arrays):
        assert raised(StreamMismatch, open_sequences, directory, form).actual == "packs"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_live_stream_of_packs_is_refused_at_its_first_chunk(tmp_path: Path, workers: int) -> None:
    ChunkWriter(tmp_path / "s", 1).close(end=False)
    sequences = open_sequences(tmp_path / "s", Pack(10), window=9)
    write_packs(tmp_path / "s", end=False)
    assert raised(StreamMismatch, lambda: next(iter(loader_of(sequences, workers)))).actual == "packs"


def test_the_first_chunk_stays_open_in_no_process_that_does_not_draw(stream: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    sequences = open_sequences(stream, Pack(10))
    opened = [path for path in set(Path("/proc/self/fd").iterdir()) - before if path.exists()]
    assert [path for path in opened if str(stream) in str(path.readlink())] == []
    assert sequences.stats().chunks_opened == 0


def test_a_form_takes_its_size_by_position_and_numbers_of_numpy(tmp_path: Path) -> None:
    ten: Any = np.int64(10)
    assert Split(ten, eos=ten) == Split(size=10, eos=10)
    assert repr(Pad(ten)) == "Pad(size=10, token=0)"
    # A window has ten thousand rows if not said otherwise.
    ChunkWriter(tmp_path / "s", 3000).close()
    assert LazyShardedSequences(tmp_path / "s", form=Pack(9), dp_rank=0, dp_size=1).window == 4


@pytest.mark.parametrize(
    ("make", "error", "what"),
    [
        (lambda: Pack("10"), TypeError, "^Pack: size .* got '10'"),  # type: ignore[arg-type]
        (lambda: Pad(8, "<pad>"), TypeError, "^Pad: token .* got '<pad>'"),  # type: ignore[arg-type]
        (lambda: Split("10"), TypeError, "^Split: size .* got '10'"),  # type: ignore[arg-type]
        (lambda: Split(10, eos="."), TypeError, r"^Split: eos .* got '\.'"),  # type: ignore[arg-type]
        (lambda: Split(10, 1), TypeError, "positional argument"),  # type: ignore[call-arg]
    ],
)
def test_what_is_no_number_of_a_form_is_named(make: Callable[[], object], error: type[Exception], what: str) -> None:
    refusal_of(error, what, make)


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"encode_fn": LateRow}, ValueError, "LateRow"),
        ({"form": 8192}, TypeError, "form .* got 8192"),
        ({"at_end": "pad"}, ValueError, "at_end .* got 'pad'"),
        ({"too_long": "cut"}, ValueError, "too_long .* got 'cut'"),
        ({"batch_size": 0}, ValueError, "batch_size .* got 0"),
        ({"window": 0}, ValueError, "window .* got 0"),
        ({"max_wait": -1}, ValueError, "max_wait .* got -1"),
        ({"seed": -1}, ValueError, "seed .* got -1"),
    ],
)
def test_wrong_arguments_are_refused(stream: Path, options: Any, error: type[Exception], what: str) -> None:
    refusal_of(error, what, open_sequences, stream, **{"form": Pack(10), **options})
    refusal_of(TypeError, "iterable", lambda: open_sequences(stream, Pack(10))[0])
