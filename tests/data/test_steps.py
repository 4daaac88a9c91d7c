"""Steps: in their order, with the index of the stream, by name or as they are, and in the workers."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from lazyshard import (
    BadRows,
    Filter,
    LateRow,
    LazyShardedDataset,
    Map,
    MessageTransform,
)
from lazyshard.errors import BadSample, ConfigInvalid
from tests.data import step_functions as functions
from tests.data.runs import open_steps as open_rank
from tests.data.workers import PICKLED, first_error, loader
from tests.stream.streams import HERE, produce

NAMED = "tests.data.step_functions"


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Twelve rows in chunks of three."""
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
    dataset = open_rank(stream, *steps, encode_fn=encode)
    assert dataset[4] == {"input_ids": [4, 0], "length": 2}
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
    batches = list(loader(dataset, dataset.rank_indices, 1, batch_size=6, multiprocessing_context=PICKLED))
    assert batches == [[dataset[index]["id"] for index in range(first, first + 6)] for first in (0, 6)]


def test_lambda_is_refused_where_workers_are_spawned_and_says_what_to_do(stream: Path) -> None:
    dataset = open_rank(stream, Filter(functools.partial(lambda row, most: True, most=3)), batch_size=6)
    batches = loader(dataset, dataset.rank_indices, 1, batch_size=6, multiprocessing_context=PICKLED)
    with pytest.raises(ConfigInvalid, match="a lambda"):
        iter(batches)
    # Forked ones have it already.
    assert len(list(loader(dataset, dataset.rank_indices, 1, batch_size=6))) == 2


@pytest.mark.parametrize(
    ("step", "function", "options", "fact"),
    [
        (Filter, "my_rows.keep", {}, '"package.module:function"'),
        (Map, "no_such_module:f", {}, "ModuleNotFoundError"),
        (Filter, f"{NAMED}:evn", {}, "is even meant?"),
        (Filter, f"{NAMED}:no_function", {}, "no function but a int"),
        (MessageTransform, 3, {}, "got 3"),
        (Map, functions.add_square, {"remove_columns": "id"}, "got 'id'"),
    ],
)
def test_step_without_a_function_is_refused_at_once(step: Any, function: Any, options: Any, fact: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(fact)):
        step(function, **options)


def test_one_step_needs_no_list_and_what_is_none_is_refused(stream: Path) -> None:
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=1, steps=Map(functions.add_square))
    assert dataset[2] == {"id": 2, "square": 4}
    with pytest.raises(ConfigInvalid, match=r"steps\[1\]"):
        open_rank(stream, Map(functions.add_square), functions.even)
    # Steps need rows that are parsed.
    with pytest.raises(ValueError, match="steps"):
        open_rank(stream, Filter(functions.even), encode_fn=LateRow)


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (MessageTransform(functions.add_square), f"steps[0], message_transform {NAMED}:add_square: TypeError"),
        (Filter(functions.no_answer), f"steps[0], filter_fn {NAMED}:no_answer: TypeError"),
        (Map(lambda row: [1]), "<lambda>: TypeError"),  # type: ignore[arg-type, return-value]
    ],
)
def test_wrong_answer_is_an_error_of_the_step(stream: Path, step: Any, named: str) -> None:
    with pytest.raises(BadSample) as caught:
        open_rank(stream, step, bad_rows=BadRows("raise"))[0]
    assert named in str(caught.value)


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
    assert error.step == "steps[1], map tests.data.step_functions:fail_on_two"
    if not workers:
        assert isinstance(error.__cause__, KeyError)
