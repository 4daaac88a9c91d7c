"""Positions as seals have them: pinned, and whatever is none of ours refused."""

from dataclasses import replace
from typing import Any

import orjson
import pytest

from lazyshard.errors import StreamMismatch
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import RunPosition, decode_position, resume, source_names
from tests.stream.streams import raised

A: dict[str, Any] = {"kind": "jsonl", "path": "a", "offset": 10, "line": 3, "blank": 1, "open_end": True}
A |= {"head": "0000000000000000", "tail": "1111111111111111"}
ENCODED: dict[str, Any] = {"version": 1, "sources": [A, {"kind": None, "path": "b"}], "skip": 1}
ENCODED |= {"rows": 5, "refused": 2}
ENCODED |= {"duplicate": 7, "blocks": 3, "quarantine_bytes": 40, "drawn": [4, 1], "finished": [False, True]}
ENCODED |= {"unit": [3, 0], "skipped": "0123456789abcdef", "recipe": {"transform": "m:f"}}

PLAIN = RunPosition(sources=(A, None), rows=2, duplicate=1)
MIXED = decode_position(ENCODED, "out")


def test_positions_are_pinned_and_survive_json() -> None:
    assert (MIXED.sources, MIXED.recipe) == ((A, None), {"transform": "m:f"})
    assert (MIXED.skip, MIXED.rows, MIXED.refused, MIXED.duplicate, MIXED.blocks) == (1, 5, 2, 7, 3)
    assert (MIXED.quarantine_bytes, MIXED.skipped) == (40, "0123456789abcdef")
    assert (MIXED.drawn, MIXED.finished, MIXED.unit) == ((4, 1), (False, True), (3, 0))
    assert MIXED.encode(["a", "b"]) == ENCODED
    for position in (PLAIN, MIXED):
        value = orjson.loads(orjson.dumps(position.encode(["a", "b"])))
        # Unknown fields are ignored.
        assert decode_position(value | {"later": 1}, "out") == position
        assert source_names(value) == ["a", "b"]


@pytest.mark.parametrize(
    "value",
    [
        *(None, {"version": 1}, {"version": 2, "sources": []}, {"version": 1, "sources": [{"path": "a"}]}),
        *(ENCODED | {"skip": -1}, ENCODED | {"skip": 0}, ENCODED | {"unit": [0, 0]}, ENCODED | {"unit": [3, -1]}),
        *(ENCODED | {"rows": True}, ENCODED | {"drawn": [1]}, ENCODED | {"finished": [0, 1]}),
        *(ENCODED | {"skipped": ""}, ENCODED | {"recipe": []}),
    ],
)
def test_a_value_that_is_no_position_is_refused(value: Any) -> None:
    raised(StreamMismatch, decode_position, value, "out")


def test_resume_starts_appended_sources_at_their_beginning() -> None:
    assert resume(PLAIN, ["a", "b"], ["a", "b", "c"]) == replace(PLAIN, sources=(A, None, None))
    mixed = resume(MIXED, ["a", "b"], ["a", "b", "c"])
    assert (mixed.drawn, mixed.finished, mixed.unit) == ((4, 1, 0), (False, True, False), (3, 0, 0))
    assert resume(RunPosition(sources=()), [], ["b"]) == RunPosition(sources=(None,))


@pytest.mark.parametrize(
    ("given", "expected", "actual"), [(["b", "a"], "a", "b"), (["a"], "b", "missing"), (["a", "c"], "b", "c")]
)
def test_resume_refuses_another_order(given: list[str], expected: str, actual: str) -> None:
    refused = raised(SourceRefused, resume, PLAIN, ["a", "b"], given)
    assert (refused.expected, refused.actual) == (expected, actual)
