"""Steps: in their order, by name or as they are, in workers; and dropped rows, in whose places other rows stand."""

import functools
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard import BadRows, Filter, LateRow, LazyShardedStream, Map, MessageTransform
from lazyshard.data import samples
from lazyshard.data.samples import FILL_ROWS, substitutes
from lazyshard.errors import BadSample, ChunkRetired, ConfigInvalid, LengthUnknown, WaitTimeout
from lazyshard.stream.listing import retire
from tests.data import runs
from tests.data import workers as functions
from tests.data.runs import open_steps as open_rank
from tests.data.runs import read
from tests.data.streams import expected, loader_of
from tests.data.test_bad_samples import refusing
from tests.data.workers import PICKLED, first_error, loader
from tests.stream.streams import HERE, produce, raised, refusal_of

NAMED = "tests.data.workers"


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return produce(tmp_path / "s", 12, 3)


def test_steps_are_applied_in_their_order_and_the_encoder_last(stream: Path) -> None:
    seen: list[str] = []

    def note(name: str) -> Any:
        def function(row: dict[str, Any]) -> dict[str, Any]:
            seen.append(f"{name} {sorted(row)}")
            return {name: 1}

        return function

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        seen.append(f"encode {sorted(row)}")
        return {"input_ids": [row["id"], 0]}

    steps = [Map(note("a")), MessageTransform(functions.to_messages), Map(note("b"))]
    assert open_rank(stream, *steps, encode_fn=encode)[4] == {"input_ids": [4, 0], "length": 2}
    # The message transform's row takes the place of the old one; a map adds to it.
    assert seen == ["a ['id']", "b ['id', 'messages']", "encode ['b', 'id', 'messages']"]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (Map(functions.add_square), {"id": 3, "square": 9}),
        (MessageTransform(functions.to_messages), functions.to_messages({"id": 3})),
        (Map(functions.add_square, remove_columns=["id"]), {"square": 9}),
        (Map(lambda row: {"id": -row["id"]}, remove_columns=["id", "no such"]), {"id": -3}),
        (Map(functions.add_index, with_indices=True), {"id": 3, "index": 3}),
        (Map(functools.partial(functions.add_index, index=7)), {"id": 3, "index": 7}),
        (Map(f"{NAMED}:add_square"), {"id": 3, "square": 9}),
        (Map(f"{NAMED}:add_index", kwargs={"index": 7}), {"id": 3, "index": 7}),
    ],
)
def test_map_adds_columns_as_that_of_hugging_face_does(stream: Path, step: Any, expected: Any) -> None:
    assert open_rank(stream, step)[3] == expected


@pytest.mark.parametrize(
    ("dp", "options"), [(1, {}), (2, {"unit": "sample"}), (3, {"shuffle_window": 2}), (2, {"layout": "strided"})]
)
def test_index_is_the_place_in_the_stream_on_any_number_of_ranks(stream: Path, dp: int, options: Any) -> None:
    found: dict[int, int] = {}
    for rank in range(dp):
        step = Map(functions.add_index, with_indices=True)
        dataset = open_rank(stream, step, rank=rank, dp=dp, **options)
        # Of a row in the place of a dropped one its own.
        uneven = open_rank(stream, Filter(functions.even), step, rank=rank, dp=dp, **options)
        for epoch in (0, 1):
            dataset.set_epoch(epoch)
            found |= {dataset[index]["id"]: dataset[index]["index"] for index in dataset.rank_indices}
            assert all(row["index"] == row["id"] and row["id"] % 2 == 0 for row in map(uneven.__getitem__, range(4)))
    assert found == {number: number for number in range(12)}


@pytest.mark.parametrize(
    "step", [Filter(f"{NAMED}:even_index", with_indices=True), Filter(functions.even)], ids=["by name", "as it is"]
)
def test_spawned_workers_take_them(stream: Path, step: Filter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    dataset = open_rank(stream, step, Map(f"{NAMED}:add_square"), batch_size=6)
    batches = loader(dataset, dataset.rank_indices, 1, batch_size=6, multiprocessing_context=PICKLED)
    assert list(batches) == [[dataset[index]["id"] for index in range(first, first + 6)] for first in (0, 6)]
    dataset = open_rank(stream, Filter(functools.partial(lambda row, most: True, most=3)), batch_size=6)
    batches = loader(dataset, dataset.rank_indices, 1, batch_size=6, multiprocessing_context=PICKLED)
    refusal_of(ConfigInvalid, "a lambda", iter, batches)


@pytest.mark.parametrize(
    ("step", "function", "options", "fact"),
    [
        (Filter, "my_rows.keep", {}, '"package.module:function"'),
        (Map, "no_such_module:f", {}, "ModuleNotFoundError"),
        (Filter, f"{NAMED}:evn", {}, "did you mean even?"),
        (Filter, f"{NAMED}:no_function", {}, "expected a function, found int"),
        (MessageTransform, 3, {}, "got 3"),
        (Map, functions.add_square, {"remove_columns": "id"}, "got 'id'"),
    ],
)
def test_step_without_a_function_is_refused_at_once(step: Any, function: Any, options: Any, fact: str) -> None:
    refusal_of(ConfigInvalid, re.escape(fact), step, function, **options)


def test_one_step_needs_no_list_and_what_is_none_is_refused(stream: Path) -> None:
    assert runs.open_rank(stream, steps=Map(functions.add_square))[2] == {"id": 2, "square": 4}
    refusal_of(ConfigInvalid, r"steps\[1\]", open_rank, stream, Map(functions.add_square), functions.even)
    refusal_of(ValueError, "steps", open_rank, stream, Filter(functions.even), encode_fn=LateRow)


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (MessageTransform(functions.add_square), f"steps[0], message_transform {NAMED}:add_square: TypeError"),
        (Filter(functions.no_answer), f"steps[0], filter_fn {NAMED}:no_answer: TypeError"),
        (Map(lambda row: [1]), "<lambda>: TypeError"),  # type: ignore[arg-type, return-value]
    ],
)
def test_wrong_answer_is_an_error_of_the_step(stream: Path, step: Any, named: str) -> None:
    assert named in str(raised(BadSample, lambda: open_rank(stream, step, bad_rows=BadRows("raise"))[0]))


@pytest.mark.parametrize("workers", [0, 2])
def test_error_names_sample_and_step_and_has_its_cause(stream: Path, workers: int) -> None:
    dataset = open_rank(
        stream, Filter(functions.even), Map(functions.fail_on_two), batch_size=3, bad_rows=BadRows("raise")
    )
    error = first_error(loader(dataset, dataset.rank_indices, workers, batch_size=3))
    assert type(error) is BadSample
    facts = ["chunk_00000.jsonl", "(line 3, byte 18, sample 2)", "steps[1], map", ":fail_on_two: KeyError: 'text'"]
    assert all(fact in str(error) for fact in facts)
    assert (error.sample, error.row, error.chunk, error.byte) == (2, 2, 0, 18)
    assert error.step == "steps[1], map tests.data.workers:fail_on_two"
    if not workers:
        assert isinstance(error.__cause__, KeyError)


def keeping(*kept: int) -> Filter:
    return Filter(lambda row: row["id"] in kept)


def failing(*bad: int) -> Map:
    return Map(refusing(*bad, error=lambda number: ValueError(f"bad {number}")))


def by_hand(total: int, per_chunk: int, kept: set[int], sample: int) -> int:
    """What is trained where a sample is drawn: itself, another of its chunk, or the first in the chunks around."""
    if sample in kept:
        return sample
    own, rows = sample // per_chunk, [min(per_chunk, total - first) for first in range(0, total, per_chunk)]
    order = list(substitutes(sample, rows[own], per_chunk))
    for chunk in [*range(own + 1, len(rows)), *range(own - 1, -1, -1)]:
        order += substitutes(sample, rows[chunk], per_chunk, chunk)
    return next(other for other in order if other in kept)


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("streams")
    return {total: produce(folder / str(total), total, 4) for total in (6, 17, 24)}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_take_as_many_steps_however_unevenly_rows_are_dropped(streams: dict[int, Path], data: Any) -> None:
    total = data.draw(st.sampled_from(sorted(streams)), label="rows")
    dp = data.draw(st.sampled_from([2, 3]), label="dp")
    size = data.draw(st.integers(1, 2), label="batch size")
    form = data.draw(st.sampled_from(["map", "drop", "pad", "loop"]), label="form")
    kept = data.draw(st.sets(st.integers(0, total - 1), min_size=1), label="kept")
    options = {"batch_size": size, "unit": data.draw(st.sampled_from(["chunk", "sample"]), label="unit")}
    ranks, found = [], []
    for rank in range(dp):
        dataset = open_rank(streams[total], keeping(*kept), rank=rank, dp=dp, **options)
        ranks.append(dataset)
        if form == "map":
            found.append(list(loader(dataset, dataset.rank_indices, 0, batch_size=size)))
        else:
            found.append(list(loader_of(LazyShardedStream(dataset, at_end=form), 0, size)))
    assert len({len(batches) for batches in found}) == 1
    assert all(len(batch) == size for batches in found for batch in batches)
    lanes = [[number for batch in batches for number in batch] for batches in found]
    assert kept.issuperset(number for lane in lanes for number in lane)
    # And what is drawn is what the plan says: only the dropped ones are other rows.
    unit = 4 if options["unit"] == "chunk" else 1
    at_end: Any = "drop" if form == "map" else form
    drawn = expected(total, dp, size, unit=unit, at_end=at_end)
    assert lanes == [[by_hand(total, 4, kept, sample) for sample in lane] for lane in drawn]
    dropped = [sum(sample not in kept for sample in lane) for lane in drawn]
    assert [dataset.stats()[3:5] for dataset in ranks] == [(count, count) for count in dropped]


def test_row_of_another_chunk_takes_the_place_where_none_of_its_own_is_kept(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 12, 3)
    # Those behind it first; before it where the stream is at its end.
    assert read([open_rank(directory, keeping(1, 7))])[0][3:6] == [7] * 3
    past, skipping = open_rank(directory, keeping(1, 7, 8), max_total_samples=7), open_rank(directory, keeping(1, 7))
    skipping.skip(samples=[(7, 8)])
    for dataset in (open_rank(directory, keeping(1)), past, skipping):
        assert set(*read([dataset])) == {1}


def test_later_chunk_of_a_live_stream_is_waited_for(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 3, 3, end=False)
    steps = [keeping(4)]
    raised(WaitTimeout, lambda: open_rank(directory, *steps, max_total_samples=6, max_wait=0.1)[0])
    produce(directory, 6, 3, end=False)
    # Published or not by then, it is the same row, so peers that read at different times agree.
    assert open_rank(directory, *steps, max_total_samples=6)[0] == {"id": 4}


def test_nothing_is_waited_for_that_would_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = produce(tmp_path / "s", 6, 3, end=False)
    options: Any = {"max_total_samples": 12, "max_wait": 0.1}
    raised(BadSample, lambda: open_rank(directory, failing(3, 4, 5), **options)[3])
    monkeypatch.setattr(samples, "FILL_ROWS", 3)
    caught = raised(BadSample, lambda: open_rank(directory, Filter(functions.nothing), **options)[3])
    assert (caught.sample, caught.count) == (3, 3)


def test_chunk_before_that_is_deleted_ends_the_search(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 9, 3)
    retire(directory, 1, 3)
    caught = raised(BadSample, lambda: open_rank(directory, keeping(1))[4])
    assert (caught.sample, caught.count) == (4, 6)
    assert isinstance(caught.__cause__, ChunkRetired)


@pytest.mark.parametrize("workers", [0, 2])
def test_filter_that_keeps_nothing_is_an_error(tmp_path: Path, workers: int) -> None:
    dataset = open_rank(produce(tmp_path / "s", 7, 3), Filter(functions.nothing), batch_size=2)
    error = first_error(loader(dataset, dataset.rank_indices, workers, batch_size=2))
    assert isinstance(error, BadSample)
    assert "steps[0], filter_fn tests.data.workers:nothing" in str(error)
    assert (error.sample, error.count, error.chunk) == (0, 7, 0)


def test_search_ends_after_so_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FILL_ROWS == 10_000
    monkeypatch.setattr(samples, "FILL_ROWS", 100)
    keep = mock.Mock(side_effect=lambda row: row["id"] >= 100)
    dataset = open_rank(produce(tmp_path / "s", 130, 10), Filter(lambda row: bool(keep(row))))
    raised(BadSample, lambda: dataset[0])
    assert keep.call_count == 100
    # From the next chunk on the kept ones are near enough, and what is known to be dropped is not asked about again.
    assert dataset[10]["id"] >= 100
    assert keep.call_count <= 102


def test_rows_known_to_be_dropped_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST_DROPPED", 2)
    dataset = open_rank(produce(tmp_path / "s", 12, 4), keeping(11))
    assert read([dataset]) == [[11] * 12]
    assert len(dataset._samples._dropped) <= 2


def test_dropped_rows_are_logged_ever_more_rarely(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = produce(tmp_path / "s", 24, 12)
    read([open_rank(directory, Filter(functions.even))])
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition("skipped by this process: ")[2] for text in texts] == ["1)", "10)"]
    facts = [f"{directory}/chunk_00000.jsonl", "row 1 (line 2, byte 9, sample 1)", "workers:even"]
    assert all(fact in texts[0] for fact in facts)


def test_bad_rows_alone_are_not_replaced_by_those_of_other_chunks(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 6, 3)
    any_number = BadRows(limit=None)
    dataset = open_rank(directory, failing(0, 1, 2), bad_rows=any_number)
    caught = refusal_of(BadSample, "bad 0", lambda: dataset[0])
    assert (caught.file, caught.sample, dataset.stats().bad_samples) == (f"{directory}/chunk_00000.jsonl", 0, 3)
    assert dataset[3] == {"id": 3}
    for index in (0, 2):
        dataset = open_rank(directory, keeping(0, 4), failing(0), bad_rows=any_number)
        assert dataset[index] == {"id": 4}
        assert (dataset.stats().bad_samples, dataset.stats().filled) == (1, 1)
    many = produce(tmp_path / "many", 100, 100)
    raised(BadSample, lambda: open_rank(many, Filter(functions.even), failing(*range(100)), bad_rows=any_number)[0])


def test_batches_over_a_live_stream_stay_equal(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 12, 3, end=False)
    # Of the second rank's chunks one row each is kept.
    keep = Filter(lambda row: row["id"] // 3 % 2 == 0 or row["id"] % 3 == 0)
    ranks = [LazyShardedStream(open_rank(directory, keep, rank=rank, dp=2, batch_size=2)) for rank in (0, 1)]
    loaders = [iter(loader_of(stream, workers=1)) for stream in ranks]
    first = [next(batches) for batches in loaders]
    produce(directory, 17, 3)
    rest = [list(batches) for batches in loaders]
    assert [first[0], *rest[0]] == [[0, 1], [2, 6], [7, 8], [12, 14]]
    assert [first[1], *rest[1]] == [[3, 3], [3, 9], [9, 9], [13, 15]]


@pytest.mark.parametrize(
    "options", [{}, {"unit": "sample"}, {"shuffle_window": 2}, {"split": "train", "splits": (3, 1)}]
)
def test_dropped_samples_are_skipped_and_each_kept_one_is_read_once(stream: Path, options: Any) -> None:
    # By brute force: with splits of 3:1, samples 3, 7 and 11 are of the other one.
    kept = [number for number in range(12) if number % 3 and ("split" not in options or number % 4 != 3)]
    found, states = list[int](), list[Any]()
    for rank in range(2):
        dataset = open_rank(stream, Filter(lambda row: row["id"] % 3 > 0), rank=rank, dp=2, **options)
        dataset.skip(dataset.dropped_samples())
        found += [dataset[index]["id"] for index in dataset.rank_indices]
        assert (dataset.stats().dropped, dataset.stats().filled, len(dataset)) == (0, 0, len(kept))
        states.append(dataset.state_dict())
    assert sorted(found) == kept
    assert states[0] == states[1]


def test_dropped_samples_are_known_at_the_end_and_a_bad_row_is_none(tmp_path: Path) -> None:
    live = produce(tmp_path / "s", 5, 3, end=False)
    steps = [Filter(functions.even), Map(lambda row: {"tenth": 10 // row["id"]})]
    refusal_of(LengthUnknown, "dropped", open_rank(live, *steps).dropped_samples)
    assert open_rank(live, *steps, max_total_samples=3).dropped_samples() == [(1, 2)]
    raised(BadSample, open_rank(live, *steps, max_total_samples=3, bad_rows=BadRows("raise")).dropped_samples)
