"""The state of a run as plain values, and what cursors keep: names, tokens of runs, how a blend stands."""

import json
import pickle
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from lazyshard.errors import FormatInvalid, StateInvalid, VersionUnsupported
from lazyshard.format import state as cursors
from lazyshard.format.state import BlendShare, BlendState, Cursor, CursorToken, ReadingHint, RunState, blend_shares
from lazyshard.part import Part
from tests.format.records import CURSOR, OWNER, RECORDS, refusal, with_field, written
from tests.format.test_records import anything
from tests.stream.streams import raised

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
    values["parts"][2]["skip"][0][0] = 99
    values["parts"].clear()
    assert VALUE.to_dict() == orjson.loads(GOLDEN)


def test_path_of_a_field_tells_what_holds_it() -> None:
    def read(values: Any, within: str) -> Any:
        return lambda: RunState.from_dict(values, "f", within=within)

    refusal(read(with_field(GOLDEN, "parts.1.dp", 0), "state"), StateInvalid, "f", "state.parts[1].dp")
    refusal(read(5, "state"), StateInvalid, "f", "state")
    refusal(read(5, ""), StateInvalid, "f", None)
    assert raised(VersionUnsupported, RunState.from_dict, {"format": 3}, "f", within="state").field == "state.format"
    for wrong, field in (({"draws": np.int64(100)}, "draws"), ({"skip": ([0, 5],)}, "skip[0]")):
        assert raised(StateInvalid, Part, 4, 2, **wrong).field == field


def test_missing_field_of_a_part_and_a_long_or_deep_wrong_value_are_refused() -> None:
    for name in PART:
        values = VALUE.to_dict()
        del values["parts"][2][name]
        found = refusal(lambda values=values: RunState.from_dict(values, "f"), StateInvalid, "f", f"parts[2].{name}")  # type: ignore[misc]
        assert found.actual == "no such field"
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    for value in ("x" * 10_000, deep, list(range(10_000))):
        assert len(str(raised(StateInvalid, RunState.from_dict, with_field(GOLDEN, "parts.0.dp", value), "f"))) < 250


def test_fields_of_the_specification_are_those_of_the_state() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").partition("### The state of a run\n")[2].partition("\n### ")[0]
    run, _, part = section.partition("A *part* is")
    assert re.findall(r"^\| `(\w+)` \|", run, re.MULTILINE) == [*VALUE.to_dict(), "split"]
    assert re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) == list(PART)


@given(st.sampled_from([*orjson.loads(GOLDEN), *(f"parts.2.{name}" for name in PART)]), anything | st.integers(-2, 60))
@example("seed", 8)
@example("parts.2.epoch", 0)
@example("window", 0)
@example("parts.2.skip", [[1, 2]])
@example("split", [[7, 2, 1], 1])
@example("split", [[1, 0], 1])
@example("split", [[100_000, 1], 1])
def test_state_with_any_field_replaced_is_refused_or_says_just_that(path: str, value: Any) -> None:
    values = with_field(GOLDEN, path, value)
    with suppress(FormatInvalid):
        # As JSON, where 1, 1.0 and true are three things.
        assert written(RunState.from_dict(values, "f")) == orjson.dumps(values) + b"\n"


def test_owner_is_a_token_or_a_strangers() -> None:
    token = CursorToken(3, "9c41d7e2b06f83a5", 14106, "node1")
    assert (token.text, str(token)) == (OWNER, "process 14106 on node1")
    assert CursorToken.parse(OWNER) == token
    assert CursorToken(1, "0" * 16, 1, "a\nb\ud800").text == f"1/{'0' * 16} process 1 on a?b?"
    longest = CursorToken(2**62, "0" * 16, 2**31, "h" * 300)
    assert CursorToken.parse(longest.text) == longest._replace(host="h" * 200)
    assert replace(CURSOR, owner=longest.text).owner == longest.text
    for stranger in ("", "me", "0" + OWNER, OWNER[1:], "0" + OWNER[1:], OWNER.upper(), f"{2**62 + 1}{OWNER[1:]}"):
        assert CursorToken.parse(stranger) is None


def test_name_that_no_consumer_can_have_is_refused() -> None:
    wrong: dict[str, list[Any]] = {
        "1 to 200 bytes": ["", "a" * 201, "ü" * 101],
        'without "/"': ["a/b", "/", "a\0", "a\nb", "a\x7f", "a\ud800"],
        "a dot": [".", "..", ".sft"],
        '".reading"': ["sft.reading"],
        "a string": [5, None],
    }
    uses: list[Any] = [cursors.check_consumer, cursors.cursor_name, cursors.reading_name]
    uses.append(lambda name: Cursor(name, None, 0, 0, {}, 0.0))
    for name, fact, use in [(name, fact, use) for fact, names in wrong.items() for name in names for use in uses]:
        caught = raised(ValueError, use, name)
        assert fact in str(caught)
        assert len(str(caught)) < 200


def test_any_other_name_is_a_file_name(tmp_path: Path) -> None:
    for name in ("sft", "a" * 200, "ü" * 100, "run 7", "a.json", "reading", "x.reading.2", "-", "~"):
        assert (cursors.cursor_name(name), cursors.reading_name(name)) == (f"{name}.json", f"{name}.reading.json")
        (tmp_path / f".{name}.0123456789abcdef").write_bytes(b"")
        (tmp_path / cursors.cursor_name(name)).write_bytes(b"")
        cursor, mark = Cursor(name, None, 0, 0, {}, 0.0), ReadingHint(name, None, 1, 0, 0, 0.0)
        assert Cursor.decode(cursor.encode(), name) == cursor
        assert ReadingHint.decode(mark.encode(), name) == mark


def run(consumed: int) -> RunState:
    return RunState(None, 10, 10, 0, 0, None, (Part(1, 1, consumed),), consumed)


def state(draws: int) -> BlendState:
    """Weights of 3 to 1, and after four draws of 1 to 1; a stream that is blended no more stands before them."""
    pieces = ((0, (3, 1), 0), (4, (1, 1), 0))
    part = cursors.BlendPartState(1, 1, draws, (1, 2), pieces, ((0, 0), (0, 0)))
    return BlendState(("old", "a", "b"), (run(7), run(3), run(draws - 3)), (part,), draws)


def test_shares_of_a_blend_are_those_of_what_comes_next() -> None:
    directories = {"a": "/data/a", "b": "/data/b"}
    assert blend_shares(state(3), directories) == (BlendShare("/data/a", 0.75, 3), BlendShare("/data/b", 0.25, 0))
    assert blend_shares(state(4), directories) == (BlendShare("/data/a", 0.5, 3), BlendShare("/data/b", 0.5, 1))
    shown = blend_shares(state(4), {"a": "/x/" + "y" * 500, "b": "\udc80\n"})
    assert [one.stream for one in shown] == ["y" * 400, "\\udc80\\n"]
    most = cursors.MAX_SHARES
    for count in (most, most + 1):
        names = tuple(str(number) for number in range(count))
        part = cursors.BlendPartState(1, 1, 0, tuple(range(count)), ((0, (1,) * count, 0),), ((0, 0),) * count)
        shares = blend_shares(BlendState(names, (run(0),) * count, (part,), 0), dict(zip(names, names, strict=True)))
        assert len(shares) == (count if count == most else 0)
