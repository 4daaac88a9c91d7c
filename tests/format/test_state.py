"""The state of a run as plain values; as a file it is among the records."""

from __future__ import annotations

import json
import pickle
import re
from contextlib import suppress
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
from tests.format.cases import refusal, with_field
from tests.format.records import RECORDS, states
from tests.format.test_records import anything

GOLDEN = RECORDS["state"].golden
VALUE: RunState = RECORDS["state"].value
PART = orjson.loads(GOLDEN)["parts"][2]
DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


def test_values_are_plain_and_survive_json_and_pickle() -> None:
    values = VALUE.to_dict()
    assert json.loads(json.dumps(values)) == values == pickle.loads(pickle.dumps(values)) == orjson.loads(GOLDEN)
    assert RunState.from_dict(values, "f") == VALUE
    assert pickle.loads(pickle.dumps(VALUE)) == VALUE
    assert hash(VALUE) == hash(RunState.from_dict(values, "f"))
    # Lists that came back as tuples, and fields that are not known.
    parts = tuple(part | {"skip": tuple(map(tuple, part["skip"])), "later": 5} for part in values["parts"])
    assert RunState.from_dict(values | {"parts": parts, "later": [1]}, "f") == VALUE
    # Nothing is shared with the state.
    values["parts"][2]["skip"][0][0] = 99
    values["parts"].clear()
    assert VALUE.to_dict() == orjson.loads(GOLDEN)


def test_path_of_a_field_tells_what_holds_it() -> None:
    def read(values: Any, within: str) -> Any:
        return lambda: RunState.from_dict(values, "f", within=within)

    refusal(read(with_field(GOLDEN, "parts.1.dp", 0), "state"), StateInvalid, "f", "state.parts[1].dp")
    refusal(read(5, "state"), StateInvalid, "f", "state")
    refusal(read(5, ""), StateInvalid, "f", None)
    with pytest.raises(VersionUnsupported) as caught:
        RunState.from_dict({"format": 3}, "f", within="state")
    assert caught.value.field == "state.format"


@pytest.mark.parametrize("name", sorted(PART))
def test_missing_field_of_a_part_is_refused(name: str) -> None:
    values = VALUE.to_dict()
    del values["parts"][2][name]
    found = refusal(lambda: RunState.from_dict(values, "f"), StateInvalid, "f", f"parts[2].{name}")
    assert found.actual == "no such field"


def test_number_of_numpy_and_list_for_a_range_are_refused_where_a_part_is_made() -> None:
    for wrong, field in (({"draws": np.int64(100)}, "draws"), ({"skip": ([0, 5],)}, "skip[0]")):
        with pytest.raises(StateInvalid) as caught:
            Part(4, 2, **wrong)
        assert caught.value.field == field


def test_torn_bytes_tell_how_many_and_the_way_out() -> None:
    found = refusal(
        lambda: RunState.decode(GOLDEN[:99], "/run/lazyshard.json"), StateInvalid, "/run/lazyshard.json", None
    )
    assert str(found.actual).startswith("99 bytes")
    assert "older checkpoint" in str(found)


def test_long_or_deep_wrong_value_is_shown_in_short() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    for value in ("x" * 10_000, deep, list(range(10_000))):
        with pytest.raises(StateInvalid) as caught:
            RunState.from_dict(with_field(GOLDEN, "parts.0.dp", value), "f")
        assert len(str(caught.value)) < 250


def test_fields_of_the_specification_are_those_of_the_state() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").partition("### The state of a run\n")[2].partition("\n### ")[0]
    run, _, part = section.partition("A *part* is")
    assert re.findall(r"^\| `(\w+)` \|", run, re.MULTILINE) == list(VALUE.to_dict())
    assert re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) == list(PART)


@given(states(), st.data())
def test_any_state_round_trips_and_is_refused_where_it_is_cut(state: RunState, data: st.DataObject) -> None:
    assert RunState.from_dict(state.to_dict(), "f") == state
    whole = state.encode()
    with pytest.raises(StateInvalid):
        RunState.decode(whole[: data.draw(st.integers(0, len(whole) - 2))], "f")


@given(st.sampled_from([*orjson.loads(GOLDEN), *(f"parts.2.{name}" for name in PART)]), anything | st.integers(-2, 60))
@example("seed", 8)
@example("parts.2.epoch", 0)
@example("window", 0)
@example("parts.2.skip", [[1, 2]])
def test_state_with_any_field_replaced_is_refused_or_says_just_that(path: str, value: Any) -> None:
    values = with_field(GOLDEN, path, value)
    with suppress(FormatInvalid):
        # As JSON, where 1, 1.0 and true are three things.
        assert RunState.from_dict(values, "f").encode() == orjson.dumps(values) + b"\n"
