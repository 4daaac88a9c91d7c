"""Records of the cache of encoded samples: what was kept comes back, and nothing else ever does."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lazyshard.format.arrays import (
    HEAD_BYTES,
    Kept,
    Slot,
    chunk_key,
    decode_record,
    decode_slot,
    encode_dropped,
    encode_head,
    encode_sample,
    encode_slot,
    slot_at,
    slot_of,
)

KEY = bytes(range(16))
SAMPLE = {"input_ids": np.array([1, 2, 3], np.int32), "length": 3, "mask": [np.array([True])]}


def of(record: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(record, np.uint8).copy()


def read(record: bytes, slot: Slot | None = None, key: bytes = KEY, row: int = 5, line: int = 7) -> Kept | None:
    return decode_record(of(record), (slot or slot_of(record, 64))[2], key, row, line)


def test_sample_comes_back_with_its_arrays() -> None:
    found = read(encode_sample(SAMPLE, KEY, 5, 7))
    assert found is not None
    assert found.dropped is None
    assert found.sample["length"] == 3
    assert (found.sample["input_ids"].dtype, found.sample["input_ids"].tolist()) == (np.int32, [1, 2, 3])
    assert found.sample["mask"][0].tolist() == [True]
    found.sample["input_ids"][0] = 9
    empty = read(encode_sample(np.empty((0, 4), np.float16), KEY, 5, 7))
    assert empty is not None
    assert (empty.sample.shape, empty.sample.dtype) == ((0, 4), np.float16)
    assert read(encode_dropped("too long", KEY, 5, 7)) == Kept(None, "too long")


@pytest.mark.parametrize("other", [{"key": bytes(16)}, {"row": 6}, {"line": 8}], ids=["key", "row", "line"])
def test_record_of_another_row_is_none(other: dict[str, Any]) -> None:
    assert read(encode_sample(SAMPLE, KEY, 5, 7), **other) is None


def test_text_with_a_right_digest_that_describes_nothing_is_none() -> None:
    good = encode_dropped("x", KEY, 5, 7)
    head, text = good[:40], good[40:]
    for other in (b"[]", b'{"a":1}'.ljust(len(text)), b"{".ljust(len(text)), b'{"sample":{"$array":[1,2,3]}}'):
        record = head[:32] + len(other).to_bytes(8, "little") + other
        assert read(record) is None, other
    assert read(head[:32] + (1 << 40).to_bytes(8, "little") + text) is None


def test_bytes_are_those_of_the_first_version() -> None:
    assert encode_head(KEY, 2).hex() == (
        "6c617a797368617264206b6570742073616d706c650a0001"  # magic
        "000102030405060708090a0b0c0d0e0f"
        "0200000000000000"
        "0000000000000000"
        "48cf22babce88ebb"
    )
    assert (HEAD_BYTES, slot_at(2)) == (64, 112)
    assert (
        encode_dropped("x", KEY, 5, 7).hex()
        == ("000102030405060708090a0b0c0d0e0f050000000000000007000000000000001000000000000000")
        + b'{"dropped":"x"}\n'.hex()
    )
    assert encode_slot((64, 10, 3)).hex() == "40000000000000000a000000000000000300000000000000"
    assert decode_slot(bytes(24) + encode_slot((64, 10, 3)), 1) == (64, 10, 3)


def test_key_is_another_one_for_anything_else() -> None:
    facts: dict[str, Any] = {"max_length": 512, "template": "qwen"}
    key = chunk_key(facts, 3, 100, 100, KEY)
    assert key == chunk_key(dict(reversed(facts.items())), 3, 100, 100, KEY)
    others = [
        chunk_key({**facts, "max_length": 513}, 3, 100, 100, KEY),
        chunk_key({**facts, "max_length": 512.0}, 3, 100, 100, KEY),
        chunk_key({**facts, "max_length": "512"}, 3, 100, 100, KEY),
        chunk_key(facts, 4, 100, 100, KEY),
        chunk_key(facts, 3, 101, 100, KEY),
        chunk_key(facts, 3, 100, 99, KEY),
        chunk_key(facts, 3, 100, 100, bytes(16)),
    ]
    assert len({key, *others}) == len(others) + 1
