from typing import Any

import orjson
import pytest

from lazyshard.errors import StreamMismatch
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import FilePosition, decode_positions, encode_positions, plain_name, resume

A = FilePosition(path="a", offset=10, line=3, blank=1, duplicate=1, head="0" * 16, tail="1" * 16, open_end=True)
B = FilePosition(path="b")


def test_positions_survive_json() -> None:
    value = orjson.loads(orjson.dumps(encode_positions([A, B])))
    assert decode_positions(value, "out") == (A, B)
    assert value["sources"][1] == {
        "kind": "jsonl",
        "path": "b",
        "offset": 0,
        "line": 0,
        "blank": 0,
        "duplicate": 0,
        "head": "",
        "tail": "",
        "open_end": False,
    }


def test_unknown_fields_are_ignored() -> None:
    value = encode_positions([A])
    value["later"] = 1
    value["sources"][0]["later"] = 1
    assert decode_positions(value, "out") == (A,)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"version": 1},
        {"version": 2, "sources": []},
        {"version": 1, "sources": [{"kind": "kafka"}]},
        {"version": 1, "sources": [encode_positions([A])["sources"][0] | {"offset": -1}]},
        {"version": 1, "sources": [encode_positions([A])["sources"][0] | {"offset": True}]},
        {"version": 1, "sources": [encode_positions([A])["sources"][0] | {"head": None}]},
    ],
)
def test_a_value_that_is_no_position_is_refused(value: Any) -> None:
    with pytest.raises(StreamMismatch, match=r"expected .*, found "):
        decode_positions(value, "out")


def test_resume_starts_appended_sources_at_their_beginning() -> None:
    assert resume([A], ["a", "b"]) == [A, B]
    assert resume([], ["b"]) == [B]


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
        resume([A, B], given)


def test_plain_name_of_bytes_that_are_no_utf8() -> None:
    assert plain_name("a\udcff") == "a\\udcff"
    assert plain_name("ä") == "ä"
