"""`LazyShardedDataset` by itself, in one process; and the lengths of what its indices draw."""

import copy
import pickle
import random
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazyshard import BadRows, LazyShardedDataset, LazyShardedSequences, LazyShardedStream, Pack
from lazyshard.data.rank import EPOCH
from lazyshard.data.settings import EncodeCache
from lazyshard.errors import FileInvalid, LengthUnknown, StreamInvalid, StreamMismatch
from lazyshard.plan.course import Draw
from lazyshard.stream import stream as foreign_streams
from tests.data.programs import run_program
from tests.data.runs import open_rank
from tests.data.workers import ids, loader
from tests.stream.streams import foreign, produce, publish_rows, put_lengths, raised, refusal_of, sealed


def iterate(dataset: Any) -> list[Any]:
    return list(dataset)


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return produce(tmp_path_factory.mktemp("stream") / "s", 10, 4)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("batch_size", [0, 1.0]),
        ("unit", ["row", 0, True]),
        ("layout", ["blocks"]),
        ("shuffle_window", [-1, 0.5]),
        ("seed", [-1, 2**63]),
        ("max_total_samples", [0, 1e6]),
        ("num_samples", [0, -1, True, "8", 2**63]),
        ("max_wait", [-1, float("nan")]),
        ("micro_batches_per_step", [0, -1, 1.0, True, "2"]),
    ],
)
def test_impossible_argument_is_refused_before_a_wait(tmp_path: Path, name: str, values: list[Any]) -> None:
    for value in values:
        what = rf"{name} .*got {value!r}|{name} must be an int in"
        refusal_of(ValueError, what, open_rank, tmp_path / "absent", **{name: value})


GROUPS = {"order": "Order", "bad_rows": "BadRows", "cache": "EncodeCache"}


def test_impossible_group_is_refused_before_the_stream_is_waited_for(tmp_path: Path) -> None:
    groups: list[tuple[Any, str, list[Any]]] = [
        (BadRows, "action", ["skip"]),
        (BadRows, "limit", [-1, 1.5, True]),
        (EncodeCache, "memory_bytes", [-1, "20GB"]),
    ]
    for kind, option, values in groups:
        for value in values:
            refusal_of(ValueError, f"{option} .*got {value!r}", kind, **{option: value})
    wrong: list[Any] = ["raise", None, {}]
    for (name, group), given in product(GROUPS.items(), wrong):
        what = rf"{name} must be a lazyshard.{group}, got {given!r}"
        refusal_of(TypeError, what, LazyShardedDataset, tmp_path / "absent", **{name: given})
    what = r"bad_rows must be a lazyshard\.BadRows"
    refusal_of(TypeError, what, LazyShardedSequences, tmp_path / "absent", form=Pack(4), bad_rows=wrong[0])


@pytest.mark.parametrize("layout", ["block", "strided"])
def test_iteration_ends_at_the_length_and_negative_indices_count_from_there(stream: Path, layout: str) -> None:
    dataset = open_rank(stream, 0, 2, layout=layout)
    order = ids(iterate(dataset))
    assert sorted(order) == list(range(10))
    assert ids(dataset[i] for i in range(-10, 0)) == order
    assert ids(dataset.__getitems__([-2, -1, 0, 1])) == order[-2:] + order[:2]


OUTSIDE: list[Any] = [10, -11, 10**20, np.int64(10), torch.tensor(10)]
NO_INTEGERS: list[Any] = ["length", 1.0, slice(0, 2), None, (0, 1), torch.tensor([1, 2]), torch.tensor(1.0)]


def test_index_outside_and_what_is_no_integer_is_refused(stream: Path) -> None:
    dataset = open_rank(stream)
    for _ in range(2):
        for use in (dataset.__getitem__, dataset.draw, lambda i: dataset.__getitems__([8, i])):
            for index in OUTSIDE:
                refusal_of(IndexError, r"\[-10, 10\)", use, index)
            for index in NO_INTEGERS:
                raised(TypeError, use, index)
        # Again with rows read ahead.
        dataset[0]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, torch.int8, torch.uint8, torch.int64, bool])
def test_other_integer_types_are_indices(kind: Any, tmp_path: Path) -> None:
    def make(value: int) -> Any:
        return torch.tensor(value, dtype=kind) if isinstance(kind, torch.dtype) else kind(value)

    dataset = open_rank(produce(tmp_path / "s", 600, 600))
    signed = kind in (np.int8, torch.int8)
    for value in (-100, -1, 127) if signed else (0, 1) if kind is bool else (3, 100):
        # Read ahead from 200 on: far enough for a small integer to wrap into it.
        assert ids([dataset[200], dataset[201]]) == [200, 201]
        assert dataset[make(value)]["id"] == value % 600
        dataset[200], dataset[201]
        assert ids(dataset.__getitems__([make(value), make(1)])) == [value % 600, 1]
        assert dataset.draw(make(value)).sample == value % 600


def test_batches_and_single_rows_in_random_turn_are_right(tmp_path: Path) -> None:
    rng = random.Random(0)
    directory = produce(tmp_path / "s", 103, 10)
    for layout, dp, window in [("block", 1, 0), ("block", 3, 0), ("strided", 3, 0), ("strided", 2, 2), ("block", 2, 1)]:
        dataset = open_rank(directory, 1 % dp, dp, layout=layout, shuffle_window=window)
        expected = [dataset.draw(i).sample for i in range(len(dataset))]
        start = 0
        for _ in range(300):
            start = rng.choice([start, rng.randrange(len(dataset))])
            indices = list(range(start, min(len(dataset), start + rng.randrange(12) * dp), rng.choice([1, dp])))
            kinds: list[Any] = [list, tuple, np.array, torch.tensor]
            assert ids(dataset.__getitems__(rng.choice(kinds)(indices))) == [expected[i] for i in indices]
            if indices:
                start = indices[-1]
            assert dataset[start]["id"] == expected[start]


def test_rows_are_the_callers_own(tmp_path: Path) -> None:
    publish_rows(tmp_path / "s", 4, ({"id": i, "messages": [{"role": "user"}]} for i in range(4)))
    dataset = open_rank(tmp_path / "s")
    for read in (dataset.__getitem__, lambda i: dataset.__getitems__([i, i, i])[1]):
        for _ in range(3):
            row = read(1)
            assert row == {"id": 1, "messages": [{"role": "user"}]}
            row["messages"][0].clear()
            row.clear()


@pytest.mark.parametrize("deep", [True, False])
def test_copy_reads_the_same_and_goes_its_own_way(stream: Path, deep: bool) -> None:
    dataset = open_rank(stream, 1, 2, shuffle_window=2, layout="strided")
    dataset.set_epoch(1)
    first = ids(iterate(dataset))
    twin = copy.deepcopy(dataset) if deep else pickle.loads(pickle.dumps(dataset))
    assert (twin.rank, len(twin), twin.stream_id) == (dataset.rank, 10, dataset.stream_id)
    assert ids(iterate(twin)) == first
    twin.set_epoch(0)
    assert ids(iterate(dataset)) == first
    batches = loader(twin, twin.rank_indices, 1, batch_size=5, persistent_workers=True)
    orders = []
    for epoch in (0, 1, 0):
        twin.set_epoch(epoch)
        orders += list(batches)
    assert orders[0] == orders[2] != orders[1] == [first[i] for i in twin.rank_indices]


def test_leftover_is_counted_and_logged_by_the_first_rank(stream: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert [open_rank(stream, rank, 3, batch_size=2).leftover for rank in range(3)] == [4, 4, 4]
    assert open_rank(stream, 0, 5, batch_size=2).leftover == 0
    (record,) = caplog.records
    assert all(fact in record.getMessage() for fact in (str(stream), "10 samples", ": 4, ", "3 * 2"))


@pytest.mark.parametrize("rank", [0, 1])
def test_end_that_leaves_a_chunk_over_is_proved(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_streams, "_MANY", 1)
    rows = [b'{"id":%d}\n' % number for number in range(8)]
    # Found by doubling steps: 6 chunks, of which two ranks with batches of two read four.
    (foreign(tmp_path, *rows, end=True) / "chunk_00006.jsonl.completed").unlink()
    options = {"batch_size": 2, "samples_per_chunk": 1}
    assert raised(StreamInvalid, lambda: open_rank(tmp_path, rank, 2, **options).rank_indices).chunk == 6
    (tmp_path / "chunk_00006.jsonl.completed").touch()
    assert len(open_rank(tmp_path, rank, 2, **options).rank_indices) == 4


def test_epoch_must_be_a_number_from_0(stream: Path) -> None:
    dataset = open_rank(stream)
    dataset.set_epoch(2)
    for wrong, error in ((-1, ValueError), (1.5, TypeError)):
        raised(error, dataset.set_epoch, wrong)  # type: ignore[arg-type]
    assert dataset.draw(0) == Draw(2, 0)


def test_epoch_set_between_two_pieces_of_a_batch_counts_from_the_next_batch(stream: Path) -> None:
    dataset = open_rank(stream, shuffle_window=2)
    before, after = (open_rank(stream, shuffle_window=2) for _ in range(2))
    after.set_epoch(1)
    read = dataset.reader.lines_published

    def interrupted(*arguments: int) -> list[bytes]:
        dataset._numbers[EPOCH] = 1
        return read(*arguments)

    dataset.reader.lines_published = interrupted  # type: ignore[method-assign, assignment]
    batch = list(range(8))
    assert dataset.__getitems__(batch) == before.__getitems__(batch)
    assert dataset.__getitems__(batch) == after.__getitems__(batch) != before.__getitems__(batch)


@pytest.mark.parametrize("samples", [0, 5])
def test_stream_of_less_than_a_batch_for_each_rank_has_no_index(tmp_path: Path, samples: int) -> None:
    dataset = open_rank(produce(tmp_path / "s", samples, 4), 0, 3, batch_size=2)
    assert (len(dataset), list(dataset.rank_indices), dataset.leftover) == (0, [], samples)
    assert iterate(dataset) == dataset.__getitems__([]) == []
    raised(IndexError, lambda: dataset[0])


def test_foreign_directory_is_read_with_samples_per_chunk(tmp_path: Path) -> None:
    chunks = [b'{"id":0}\n\n{"id":1}\n', b'\xef\xbb\xbf{"id":2}\n{"id":3}\n', b'{"id":4}']
    directory = foreign(tmp_path / "s", *chunks, end=True)
    refusal_of(ValueError, "samples_per_chunk", open_rank, directory)
    refusal_of(TypeError, "encode_fn", open_rank, directory, samples_per_chunk=2, encode_fn={})
    own = produce(tmp_path / "own", 4, 4)
    assert open_rank(own, samples_per_chunk=4).samples_per_chunk == 4
    raised(StreamMismatch, open_rank, own, samples_per_chunk=5)
    for layout, expected in (("block", [0, 1, 2, 3]), ("strided", [0, 2, 1, 3])):
        dataset = open_rank(directory, 0, 2, samples_per_chunk=2, layout=layout)
        assert ids(iterate(dataset)) == expected
        assert (dataset.stream_id, dataset.leftover) == (None, 1)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "chunk_00000.jsonl").write_bytes(chunks[0])
    raised(FileInvalid, open_rank, tmp_path / "bare", samples_per_chunk=2)


# `dataset["lengths"]`, as samplers that group by length ask for it.


def length(sample: int) -> int:
    return 1 + 7 * sample % 23


def stream_of(directory: Path, samples: int, per_chunk: int = 4, *, end: bool = True) -> Path:
    return sealed(directory, [length(sample) for sample in range(samples)], per_chunk, end=end)


@pytest.mark.parametrize(
    ("samples", "dp", "options"),
    [
        (24, 1, {}),
        (37, 3, {"layout": "strided"}),
        (37, 3, {"shuffle_window": 2, "seed": 5}),
        (37, 2, {"unit": "sample", "layout": "strided"}),
        (37, 2, {"max_total_samples": 21}),
        (13, 2, {"num_samples": 40}),
        (5, 3, {"batch_size": 1}),
    ],
)
def test_an_index_has_the_length_of_its_sample(samples: int, dp: int, options: dict[str, Any], tmp_path: Path) -> None:
    stream_of(tmp_path / "s", samples)
    for rank in range(dp):
        dataset = open_rank(tmp_path / "s", rank, dp, **{"batch_size": 2, **options})
        lengths = dataset["lengths"]
        assert (lengths.dtype, lengths.shape) == (np.dtype(np.int32), (len(dataset),))
        again = open_rank(tmp_path / "s", 0, 3, dataset.state_dict(dp * options.get("batch_size", 2)), **options)
        for epoch, one in ((0, dataset), (1, dataset), (0, again)):
            one.set_epoch(epoch)
            assert one["lengths"].tolist() == [length(one.draw(index).sample) for index in range(len(one))]


def test_what_was_measured_counts_once_it_is(tmp_path: Path) -> None:
    sealed(tmp_path / "long", [2**32 - 1, 1])
    assert open_rank(tmp_path / "long")["lengths"].tolist() == [2**32 - 1, 1]
    dataset = open_rank(produce(tmp_path / "s", 4))
    raised(LengthUnknown, lambda: dataset["lengths"])
    put_lengths(tmp_path / "s", [10, 20], [30, 40])
    assert dataset["lengths"].tolist() == [10, 20, 30, 40]
    assert "_tokens" not in pickle.loads(pickle.dumps(dataset)).__dict__
    assert dataset["lengths"].tolist() == [10, 20, 30, 40]


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    live = stream_of(tmp_path / "live", 6, end=False)
    elsewhere = foreign(tmp_path / "foreign", b'{"id":0}\n', end=True)
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (live, {}, "4 samples so far"),
        (live, {"max_total_samples": 100}, "still being produced"),
        (produce(tmp_path / "plain", 4), {}, "chunk 0"),
        (elsewhere, {"samples_per_chunk": 1}, "another program"),
    ]
    for directory, options, fact in cases:
        refusal_of(LengthUnknown, fact, open_rank(directory, **options).__getitem__, "lengths")
    assert open_rank(live, max_total_samples=3)["lengths"].tolist() == [length(0), length(1), length(2)]
    raised(TypeError, lambda: open_rank(live, max_total_samples=4)["length"])  # type: ignore[index]
    dataset = open_rank(stream_of(tmp_path / "s", 4))
    LazyShardedStream(dataset)
    raised(LengthUnknown, lambda: dataset["lengths"])


def test_lengths_of_a_stream_in_place_of_the_one_that_was_opened_are_refused(tmp_path: Path) -> None:
    dataset = open_rank(stream_of(tmp_path / "s", 4))
    shutil.rmtree(tmp_path / "s")
    stream_of(tmp_path / "s", 4)
    refusal_of(StreamMismatch, "was replaced by", dataset.__getitem__, "lengths")


LATER = ["data.blend_state", "data.blended", "data.commits", "data.encode_cache", "data.iterable", "data.loading"]
LATER += ["data.sequences", "plan.blend", "store.mirror", "store.objects", "stream.writer"]
OPTIONAL = {"filelock", "fsspec", "watchdog", *(f"lazyshard.{name}" for name in LATER)}

MOST_MODULES = 85  # Each costs about half a millisecond


def modules_after(statement: str, folder: Path) -> set[str]:
    ended = run_program(f"import sys\n{statement}\nprint(*sys.modules)", folder=folder)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.split())


def test_a_data_set_imports_nothing_that_it_may_not_need(tmp_path: Path) -> None:
    found = {name for name in modules_after("import lazyshard", tmp_path) if name.startswith("lazyshard.")}
    assert found == {"lazyshard.errors", "lazyshard.lazy"}
    found = modules_after("import lazyshard; lazyshard.LazyShardedDataset", tmp_path)
    assert found.isdisjoint(OPTIONAL)
    assert sum(name.startswith("lazyshard.") for name in found) <= MOST_MODULES
