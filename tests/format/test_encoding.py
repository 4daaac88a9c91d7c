"""What encoded rows were made with: which facts there may be, and what is said of those that differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from lazyshard.errors import FileInvalid
from lazyshard.format.arrays import pack_row
from lazyshard.format.batch import EncodedRow, check_encoded
from lazyshard.format.records import Manifest, check_encoding, differences

MANIFEST = Manifest("0123456789abcdef" * 2, 1000, 1.0, arrays=True)
FACTS: dict[str, Any] = {"kind": "swift", "max_length": 512, "binary": None, "scale": 0.5, "thinking": False}


def test_manifest_keeps_facts_and_has_no_field_without_them() -> None:
    manifest = replace(MANIFEST, encoding=FACTS)
    assert Manifest.decode(manifest.encode()) == manifest
    assert orjson.loads(manifest.encode())["encoding"] == FACTS
    assert "encoding" not in orjson.loads(MANIFEST.encode())
    assert Manifest.decode(MANIFEST.encode()).encoding is None


@pytest.mark.parametrize("value", [[], {}, "swift", {"a": {}}, {"a": [1]}, {"": 1}])
def test_manifest_with_other_than_plain_facts_is_refused(value: Any) -> None:
    fields = orjson.loads(MANIFEST.encode()) | {"encoding": value}
    with pytest.raises(FileInvalid, match="field 'encoding': expected an object of 1 to 1000 plain values"):
        Manifest.decode(orjson.dumps(fields))


def test_manifest_of_a_stream_without_arrays_has_no_encoding() -> None:
    fields = orjson.loads(MANIFEST.encode()) | {"encoding": FACTS, "format": 1}
    assert Manifest.decode(orjson.dumps(fields)).encoding is None


@pytest.mark.parametrize("value", [{}, {"a": np.int64(1)}, {"a": float("nan")}, {"a": 2**64}, {1: 1}, {"a": b""}])
def test_what_is_no_encoding_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="an encoding is 1 to 1000 facts by name"):
        check_encoding(value)


def test_differences_name_every_fact_with_both_values() -> None:
    was: dict[str, Any] = {"template": "qwen", "max_length": 512, "flag": True, "system": "a" * 100, "gone": 1}
    now: dict[str, Any] = {"template": "qwen", "max_length": 1024, "flag": 1, "system": None, "new": "x"}
    assert differences(was, was) == []
    assert differences(was, now) == [
        "max_length is 512 there and 1024 here",
        "flag is True there and 1 here",
        f"system is '{'a' * 56}... there and null here",
        "gone is 1 there and not said here",
        "new is not said there and 'x' here",
    ]
    assert differences(was, now, leave_out=["flag", "system", "gone", "new"]) == [
        "max_length is 512 there and 1024 here"
    ]


def test_encoded_rows_are_put_together_with_arrays_and_lengths() -> None:
    rows = [
        EncodedRow(*pack_row({"a": np.array([1, 2, 3], np.int32)}), tokens=3),
        EncodedRow(*pack_row({"a": 1}), tokens=0),
    ]
    found = check_encoded(rows)
    assert found.data == b'{"a":{"$array":["int32",[3],0]}}\n{"a":1}\n'
    assert found.tokens is not None
    assert found.tokens.tolist() == [3, 0]
    assert found.arrays is not None
    assert found.arrays.data == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0])
    assert found.arrays.ends.tolist() == [16, 16]
    assert rows[0].data == rows[0].line + rows[0].arrays
    assert check_encoded([rows[0], rows[1]._replace(tokens=None)]).tokens is None
