"""The state of a run: what comes back is what was kept, or a refusal that names the field."""

from __future__ import annotations

import json
import pickle
import re
import reprlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lazyshard.errors import FormatInvalid, StateInvalid, VersionUnsupported
from lazyshard.format.state import RunState
from lazyshard.part import Part

STREAM_ID = "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59"
GOLDEN = (
    b'{"format":1,"stream_id":"5f0c1a9be7d24c3f8a6b0e1d2c3b4a59","samples_per_chunk":100,"unit":10,"window":20,'
    b'"seed":7,"max_total_samples":null,"parts":['
    b'{"dp":4,"batch_size":2,"draws":100,"epoch":null,"trained":true,"skip":[],"first_step":0,"draws_per_step":10},'
    b'{"dp":4,"batch_size":2,"draws":6,"epoch":null,"trained":false,"skip":[],"first_step":10,"draws_per_step":0},'
    b'{"dp":2,"batch_size":1,"draws":30,"epoch":1,"trained":true,"skip":[[0,5],[5,9],[40,41]],"first_step":10,'
    b'"draws_per_step":3}],"consumed":460}\n'
)
VALUE = RunState(
    stream_id=STREAM_ID,
    samples_per_chunk=100,
    unit=10,
    window=20,
    seed=7,
    max_total_samples=None,
    parts=(
        Part(4, 2, 100, draws_per_step=10),
        Part(4, 2, 6, trained=False, first_step=10),
        Part(2, 1, 30, epoch=1, skip=((0, 5), (5, 9), (40, 41)), first_step=10, draws_per_step=3),
    ),
    consumed=460,
)
DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"

COUNT = "an integer from 0 to 4611686018427387904"


def with_field(path: str, value: Any) -> dict[str, Any]:
    """The golden state as values, with the field at a path like `parts.0.dp` replaced."""
    values = orjson.loads(GOLDEN)
    at = values
    *parents, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in parents:
        at = at[step]
    at[last] = value
    return dict(values)


def refused(values: Any, field: str | None, expected: str, actual: str, within: str = "") -> None:
    with pytest.raises(StateInvalid) as caught:
        RunState.from_dict(values, "run/lazyshard.json", within=within)
    error = caught.value
    assert (error.file, error.field, error.expected, error.actual) == ("run/lazyshard.json", field, expected, actual)
    where = f"field {field!r}: " if field else ""
    assert str(error) == f"run/lazyshard.json: {where}expected {expected}, found {actual}"


def test_state_bytes_are_pinned() -> None:
    assert VALUE.encode() == GOLDEN
    assert RunState.decode(GOLDEN, "f") == VALUE


def test_values_are_plain_and_survive_json_and_pickle() -> None:
    values = VALUE.to_dict()
    assert json.loads(json.dumps(values)) == values == pickle.loads(pickle.dumps(values)) == orjson.loads(GOLDEN)
    assert RunState.from_dict(values, "f") == VALUE
    assert pickle.loads(pickle.dumps(VALUE)) == VALUE
    assert hash(VALUE) == hash(RunState.from_dict(values, "f"))


def test_values_do_not_share_lists_with_the_state() -> None:
    values = VALUE.to_dict()
    values["parts"][2]["skip"][0][0] = 99
    values["parts"].clear()
    assert VALUE.to_dict() == orjson.loads(GOLDEN)


def test_lists_that_came_back_as_tuples_are_read_the_same() -> None:
    values = VALUE.to_dict()
    values["parts"] = tuple(part | {"skip": tuple(map(tuple, part["skip"]))} for part in values["parts"])
    assert RunState.from_dict(values, "f") == VALUE


def test_unknown_fields_are_ignored() -> None:
    assert RunState.from_dict(with_field("parts.1.later", 5) | {"blend": [1, 2]}, "f") == VALUE


def test_later_format_is_refused_with_both_numbers_before_anything_else_is_read() -> None:
    with pytest.raises(VersionUnsupported) as caught:
        RunState.decode(b'{"format":2,"history":[]}', "run/lazyshard.json")
    error = caught.value
    assert (error.file, error.field, error.expected, error.actual) == ("run/lazyshard.json", "format", "1", "2")
    assert str(error) == (
        "run/lazyshard.json: the state of a run in format 2, this release of lazyshard reads format 1; install a newer "
        "lazyshard"
    )
    with pytest.raises(VersionUnsupported) as caught:
        RunState.from_dict({"format": 3}, "f", within="state")
    assert caught.value.field == "state.format"


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, [1]])
def test_format_that_is_no_number_from_1_is_refused(value: Any) -> None:
    refused(with_field("format", value), "format", "an integer from 1 to 2147483648", repr(value))


def test_path_of_a_field_tells_what_holds_it() -> None:
    refused(with_field("parts.1.dp", 0), "state.parts[1].dp", "an integer from 1 to 2147483648", "0", within="state")
    refused(5, "state", "an object", "5", within="state")
    refused(5, None, "an object", "5")


@pytest.mark.parametrize(
    ("path", "field", "expected", "wrong"),
    [
        ("stream_id", "stream_id", "32 hexadecimal digits or null", ["", "5f", 5, STREAM_ID.upper()]),
        ("samples_per_chunk", "samples_per_chunk", "an integer from 1 to 100000000", [0, 10**8 + 1, True, 1.0, None]),
        ("unit", "unit", "an integer from 1 to 4611686018427387904", [0, 2**62 + 1, "10", [10], None]),
        ("window", "window", COUNT, [-1, 20.0, None, False]),
        ("window", "window", "a multiple of unit, 10", [5, 21]),
        ("seed", "seed", "an integer from 0 to 9223372036854775807", [-1, 2**63, None, 0.5]),
        ("max_total_samples", "max_total_samples", "an integer from 1 to 4611686018427387904 or null", [0, True, "1"]),
        ("parts", "parts", "a list", [None, 5, "parts", {"0": {}}]),
        ("parts.1", "parts[1]", "an object", [None, 5, [], "part"]),
        ("parts.0.dp", "parts[0].dp", "an integer from 1 to 2147483648", [0, 2**31 + 1, 4.0, None, True]),
        ("parts.0.batch_size", "parts[0].batch_size", "an integer from 1 to 4611686018427387904", [0, None, "2"]),
        ("parts.0.draws", "parts[0].draws", COUNT, [-1, 100.0, None, 2**62 + 1, {}]),
        ("parts.0.epoch", "parts[0].epoch", COUNT + " or null", [-1, False, 0.0, "0"]),
        ("parts.0.trained", "parts[0].trained", "true or false", [None, 0, 1, "true"]),
        ("parts.0.skip", "parts[0].skip", "a list of ranges", [None, 5, {"a": 1}, "05"]),
        ("parts.0.first_step", "parts[0].first_step", COUNT, [-1, None, 0.0]),
        ("parts.2.first_step", "parts[2].first_step", "at least 10, that of the part before", [0, 9]),
        ("parts.0.draws_per_step", "parts[0].draws_per_step", COUNT, [-1, None, 0.0]),
        ("consumed", "consumed", COUNT, [-1, None, 460.0, True]),
        ("consumed", "consumed", "460, the sum of dp * draws of the trained parts", [0, 459, 461, 484]),
        ("parts.2.draws", "consumed", "462, the sum of dp * draws of the trained parts", [31]),
        ("parts.1.trained", "consumed", "484, the sum of dp * draws of the trained parts", [True]),
    ],
)
def test_wrong_value_is_refused_by_its_field(path: str, field: str, expected: str, wrong: list[Any]) -> None:
    for value in wrong:
        found = reprlib.repr(460 if field == "consumed" != path else value)
        refused(with_field(path, value), field, expected, found)


def test_state_without_parts_is_refused() -> None:
    refused(with_field("parts", []), "parts", "at least one part", "()")


@pytest.mark.parametrize(
    ("skip", "field", "expected", "actual"),
    [
        ([5], "[0]", "a range: its first sample and the one behind its last", "5"),
        ([[5]], "[0]", "a range: its first sample and the one behind its last", "(5,)"),
        ([[5, 6, 7]], "[0]", "a range: its first sample and the one behind its last", "(5, 6, 7)"),
        ([[-1, 3]], "[0][0]", COUNT, "-1"),
        ([[3, 3]], "[0][1]", "an integer from 4 to 4611686018427387904", "3"),
        ([[3, 2]], "[0][1]", "an integer from 4 to 4611686018427387904", "2"),
        ([[3, 5], [4, 6]], "[1][0]", "an integer from 5 to 4611686018427387904", "4"),
        ([[3, 5], [0, 2]], "[1][0]", "an integer from 5 to 4611686018427387904", "0"),
        ([[3, "5"]], "[0][1]", "an integer from 4 to 4611686018427387904", "'5'"),
        ([[3.0, 5]], "[0][0]", COUNT, "3.0"),
        ([[3, 2**62 + 1]], "[0][1]", "an integer from 4 to 4611686018427387904", "4611686018427387905"),
    ],
)
def test_ranges_that_are_empty_overlap_or_go_back_are_refused(
    skip: list[Any], field: str, expected: str, actual: str
) -> None:
    refused(with_field("parts.0.skip", skip), f"parts[0].skip{field}", expected, actual)


@pytest.mark.parametrize("name", sorted(orjson.loads(GOLDEN)))
def test_missing_field_is_refused_and_does_not_become_its_default(name: str) -> None:
    values = VALUE.to_dict()
    del values[name]
    refused(values, name, "a value", "no such field")


@pytest.mark.parametrize("name", sorted(orjson.loads(GOLDEN)["parts"][0]))
def test_missing_field_of_a_part_is_refused(name: str) -> None:
    values = VALUE.to_dict()
    del values["parts"][2][name]
    refused(values, f"parts[2].{name}", "a value", "no such field")


def test_numpy_number_is_refused_where_the_state_is_made() -> None:
    with pytest.raises(StateInvalid, match=r"^field 'draws': expected an integer .*, found .*100"):
        Part(4, 2, np.int64(100))  # type: ignore[arg-type]


def test_impossible_state_cannot_be_made() -> None:
    with pytest.raises(StateInvalid, match=r"^field 'consumed': expected 460, .* found 461$"):
        replace(VALUE, consumed=461)
    with pytest.raises(ValueError, match="field 'parts': expected at least one part"):
        replace(VALUE, parts=[*VALUE.parts])  # type: ignore[arg-type]
    with pytest.raises(StateInvalid, match="field 'parts': expected at least one part"):
        replace(VALUE, parts=({"dp": 1},))  # type: ignore[arg-type]
    with pytest.raises(StateInvalid, match=r"field 'skip\[0\]': expected a range"):
        Part(1, skip=([0, 5],))  # type: ignore[arg-type]


def test_bytes_cut_anywhere_are_called_torn_and_the_way_out_is_named() -> None:
    for size in range(len(GOLDEN) - 1):  # the last byte is the newline, which carries nothing
        with pytest.raises(StateInvalid) as caught:
            RunState.decode(GOLDEN[:size], "/run/checkpoint-5/lazyshard.json")
        text = str(caught.value)
        assert text.startswith(
            f"/run/checkpoint-5/lazyshard.json: expected a JSON object, found {size} bytes that are torn or no JSON ("
        )
        assert text.endswith("; go on from an older checkpoint")
        assert (caught.value.file, caught.value.field) == ("/run/checkpoint-5/lazyshard.json", None)


@pytest.mark.parametrize("data", [b"\0" * 100, b"\xff\xfe", b"{}{}", GOLDEN + GOLDEN])
def test_bytes_that_are_no_json_are_refused(data: bytes) -> None:
    with pytest.raises(StateInvalid, match="torn or no JSON"):
        RunState.decode(data, "f")


@pytest.mark.parametrize("data", [b"[]", b"null", b"1", b'"state"'])
def test_json_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(StateInvalid, match=r"^f: expected an object, found "):
        RunState.decode(data, "f")


def test_long_or_deep_wrong_value_is_shown_in_short() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    for value in ("x" * 10_000, deep, list(range(10_000))):
        with pytest.raises(StateInvalid) as caught:
            RunState.from_dict(with_field("parts.0.dp", value), "f")
        assert len(str(caught.value)) < 250


def test_fields_of_the_specification_are_those_of_the_state() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").partition("### The state of a run\n")[2].partition("\n### ")[0]
    run, _, part = section.partition("A *part* is")
    assert re.findall(r"^\| `(\w+)` \|", run, re.MULTILINE) == list(VALUE.to_dict())
    assert re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) == list(VALUE.to_dict()["parts"][0])


counts = st.integers(0, 40) | st.sampled_from([2**31, 2**40])


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    steps = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2**40)), max_size=3))
    found, at = [], 0
    for gap, size in steps:
        found.append((at + gap, at + gap + size))
        at += gap + size
    return tuple(found)


@st.composite
def states(draw: st.DrawFn) -> RunState:
    first_steps = sorted(draw(st.lists(counts, min_size=1, max_size=4)))
    parts = tuple(
        Part(
            dp=draw(st.integers(1, 2**20)),
            batch_size=draw(st.integers(1, 2**62)),
            draws=draw(counts),
            epoch=draw(st.none() | counts),
            trained=draw(st.booleans()),
            skip=draw(ranges()),
            first_step=first_step,
            draws_per_step=draw(counts),
        )
        for first_step in first_steps
    )
    unit = draw(st.integers(1, 2**20))
    return RunState(
        stream_id=draw(st.none() | st.just(STREAM_ID)),
        samples_per_chunk=draw(st.integers(1, 10**8)),
        unit=unit,
        window=unit * draw(counts),
        seed=draw(st.integers(0, 2**63 - 1)),
        max_total_samples=draw(st.none() | st.integers(1, 2**62)),
        parts=parts,
        consumed=sum(part.dp * part.draws for part in parts if part.trained),
    )


@given(states())
def test_state_round_trips(state: RunState) -> None:
    assert RunState.from_dict(state.to_dict(), "f") == state
    assert RunState.decode(state.encode(), "f") == state


@given(states(), st.data())
def test_state_cut_anywhere_is_refused_or_the_same(state: RunState, data: st.DataObject) -> None:
    whole = state.encode()
    size = data.draw(st.integers(0, len(whole)))
    if size >= len(whole) - 1:
        assert RunState.decode(whole[:size], "f") == state
    else:
        with pytest.raises(StateInvalid):
            RunState.decode(whole[:size], "f")


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 60) | st.floats() | st.text("5f"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=6,
)
paths = st.sampled_from([*orjson.loads(GOLDEN), *(f"parts.2.{name}" for name in orjson.loads(GOLDEN)["parts"][2])])


@given(paths, anything)
@example("seed", 8)
@example("parts.2.epoch", 0)
@example("window", 0)
@example("parts.2.skip", [[1, 2]])
def test_state_with_any_field_replaced_is_refused_or_says_just_that(path: str, value: Any) -> None:
    values = with_field(path, value)
    with suppress(FormatInvalid):
        # As JSON, where 1, 1.0 and true are three things.
        assert RunState.from_dict(values, "f").encode() == orjson.dumps(values) + b"\n"


@given(st.data())
def test_state_with_bytes_replaced_is_read_or_refused(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(GOLDEN)))
    end = data.draw(st.integers(start, min(len(GOLDEN), start + 4)))
    with suppress(FormatInvalid):
        RunState.decode(GOLDEN[:start] + data.draw(st.binary(max_size=4)) + GOLDEN[end:], "f")
