from dataclasses import replace
from typing import Any

import orjson
import pytest

from lazyshard.errors import StreamMismatch
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import (
    PLAIN_FIELDS,
    FilePosition,
    RunPosition,
    decode_position,
    plain_name,
    resume,
    source_names,
)

A = {"kind": "jsonl", "path": "a"} | FilePosition(
    offset=10, line=3, blank=1, head="0" * 16, tail="1" * 16, open_end=True
).encode(PLAIN_FIELDS)
PLAIN = RunPosition(sources=(A, None), rows=2, duplicate=1)
MIXED = RunPosition(
    sources=(A, None),
    skip=1,
    rows=5,
    refused=2,
    duplicate=1,
    blocks=3,
    quarantine_bytes=40,
    drawn=(4, 1),
    finished=(False, True),
    unit=(3, 0),
    skipped="0123456789abcdef",
    recipe={"transform": "m:f"},
)
ENCODED = {
    "version": 1,
    "sources": [
        {
            "kind": "jsonl",
            "path": "a",
            "offset": 10,
            "line": 3,
            "blank": 1,
            "head": "0000000000000000",
            "tail": "1111111111111111",
            "open_end": True,
        },
        {"kind": None, "path": "b"},
    ],
    "skip": 1,
    "rows": 5,
    "refused": 2,
    "duplicate": 1,
    "blocks": 3,
    "quarantine_bytes": 40,
    "drawn": [4, 1],
    "finished": [False, True],
    "unit": [3, 0],
    "skipped": "0123456789abcdef",
    "recipe": {"transform": "m:f"},
}


def test_encoded_position_is_pinned() -> None:
    assert MIXED.encode(["a", "b"]) == ENCODED


@pytest.mark.parametrize("position", [PLAIN, MIXED])
def test_positions_survive_json(position: RunPosition) -> None:
    value = orjson.loads(orjson.dumps(position.encode(["a", "b"])))
    assert decode_position(value, "out") == position
    assert source_names(value) == ["a", "b"]


def test_unknown_fields_are_ignored() -> None:
    assert decode_position(ENCODED | {"later": 1}, "out") == MIXED


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"version": 1},
        {"version": 2, "sources": []},
        {"version": 1, "sources": [{"path": "a"}]},
        {"version": 1, "sources": [5]},
        ENCODED | {"skip": -1},
        ENCODED | {"rows": True},
        ENCODED | {"drawn": [1]},
        ENCODED | {"finished": [0, 1]},
        ENCODED | {"unit": [3, -1]},
        ENCODED | {"unit": [0, 0]},
        ENCODED | {"skipped": ""},
        ENCODED | {"skipped": 5},
        ENCODED | {"skip": 0},
        ENCODED | {"recipe": []},
    ],
)
def test_a_value_that_is_no_position_is_refused(value: Any) -> None:
    with pytest.raises(StreamMismatch, match=r"expected .*, found "):
        decode_position(value, "out")


@pytest.mark.parametrize(
    "change", [{"kind": "parquet"}, {"offset": -1}, {"offset": True}, {"head": None}, {"open_end": 1}]
)
def test_a_source_with_a_position_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SourceRefused, match="a: the stream's last seal holds no position to go on from: expected "):
        FilePosition.decode(A | change, ("jsonl",), "a", PLAIN_FIELDS)


def test_resume_starts_appended_sources_at_their_beginning() -> None:
    assert resume(PLAIN, ["a", "b"], ["a", "b", "c"]) == replace(PLAIN, sources=(A, None, None))
    mixed = resume(MIXED, ["a", "b"], ["a", "b", "c"])
    assert (mixed.drawn, mixed.finished, mixed.unit) == ((4, 1, 0), (False, True, False), (3, 0, 0))
    assert resume(RunPosition(sources=()), [], ["b"]) == RunPosition(sources=(None,))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["b", "a"], "source 1 was a, now it is b"),
        (["a"], "source 2 was b, now it is missing"),
        (["a", "c"], "source 2 was b, now it is c"),
    ],
)
def test_resume_refuses_another_order(given: list[str], message: str) -> None:
    with pytest.raises(SourceRefused, match=message):
        resume(PLAIN, ["a", "b"], given)


def test_plain_name_of_bytes_that_are_no_utf8() -> None:
    assert plain_name("a\udcff") == "a\\udcff"
    assert plain_name("ä") == "ä"
