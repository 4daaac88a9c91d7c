"""The index of Megatron's IndexedDataset: literal bytes, and what is refused before memory is taken for it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.conversion.indexed import (
    DTYPES,
    HEADER_BYTES,
    IndexHeader,
    bounds_of,
    check_boundaries,
    check_sequences,
    smallest_dtype,
)
from lazyshard.errors import IndexedInvalid

GOLDEN = b"MMIDIDX\0\0" + b"\1\0\0\0\0\0\0\0" + b"\x08" + b"\3\0\0\0\0\0\0\0" + b"\2\0\0\0\0\0\0\0"
"""Version 1, uint16, 3 sequences, 2 boundaries."""

THREE = IndexHeader("uint16", 3, 1, has_modes=False)
SIZE = 34 + 3 * 4 + 3 * 8 + 2 * 8


def index(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def test_header_byte_for_byte() -> None:
    assert THREE.encode() == GOLDEN
    assert THREE.size == SIZE == 86
    assert (THREE.lengths_at, THREE.pointers_at, THREE.boundaries_at, THREE.modes_at) == (34, 46, 70, 86)
    assert IndexHeader.decode(GOLDEN, SIZE, "a.idx") == THREE
    assert IndexHeader.decode(GOLDEN, SIZE + 3, "a.idx") == IndexHeader("uint16", 3, 1, has_modes=True)


def test_codes_of_all_types() -> None:
    codes = {name: IndexHeader(name, 0, 0, has_modes=False).encode()[17] for name in DTYPES}
    assert codes == {
        "uint8": 1,
        "int8": 2,
        "int16": 3,
        "int32": 4,
        "int64": 5,
        "float64": 6,
        "float32": 7,
        "uint16": 8,
    }


def packed(version: int = 1, code: int = 8, sequences: int = 3, boundaries: int = 2) -> bytes:
    return struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, sequences, boundaries)


@pytest.mark.parametrize(
    ("head", "size", "says"),
    [
        (b"", 0, "expected an index of Megatron's IndexedDataset, which begins with b'MMIDIDX"),
        (b'{"id": 1}\n' * 4, 40, "found b'{\"id\": 1}'"),
        (b"TNTIDX\0\0" + bytes(40), 48, "found one of fairseq's old format; write it anew with Megatron's tools"),
        (GOLDEN[:20], 20, "expected a header of 34 bytes, found 20 bytes; the file was cut"),
        (packed(version=2), SIZE, "expected version 1, found version 2"),
        (packed(code=0), SIZE, "expected a type of tokens from 1 to 8, found code 0"),
        (packed(code=9), SIZE, "expected a type of tokens from 1 to 8, found code 9"),
        (packed(boundaries=0), 70, "expected one boundary of documents at least, found none"),
        (
            GOLDEN,
            SIZE - 1,
            "expected 86 bytes, or 89 with modes, for 3 sequences and 1 documents, found 85; the",
        ),
        (GOLDEN, SIZE + 1, "expected 86 bytes, or 89 with modes, for 3 sequences and 1 documents, found 87"),
        (packed(sequences=2**64 - 1), SIZE, "for 18446744073709551615 sequences"),
        (packed(boundaries=2**64 - 1), SIZE, "and 18446744073709551614 documents"),
    ],
)
def test_no_index(head: bytes, size: int, says: str) -> None:
    with pytest.raises(IndexedInvalid) as error:
        IndexHeader.decode(head, size, "a.idx")
    assert str(error.value).startswith("a.idx: expected ")
    assert says in str(error.value)


@given(st.binary(max_size=2 * HEADER_BYTES), st.integers(0, 2**64))
def test_no_bytes_break_it(tail: bytes, size: int) -> None:
    for head in (tail, GOLDEN[:17] + tail[:17]):
        try:
            header = IndexHeader.decode(head, size, "a.idx")
        except IndexedInvalid:
            continue
        assert header.size == size


@pytest.mark.parametrize(
    ("boundaries", "first", "says"),
    [
        ((1, 2), 0, "expected documents from sequence 0 on, found from 1 on"),
        (
            (0, 2),
            0,
            "expected all 3 sequences in documents, found 2 of them; the program that wrote it",
        ),
        ((-1, 3), 0, "expected boundary 0 of the documents from 0 to 3, found -1"),
        ((0, 4), 0, "expected boundary 1 of the documents from 0 to 3, found 4"),
    ],
)
def test_boundaries_that_cannot_be(boundaries: tuple[int, ...], first: int, says: str) -> None:
    with pytest.raises(IndexedInvalid, match=says):
        check_boundaries(index(*boundaries), first, THREE, "a.idx")


def test_boundaries_that_go_back() -> None:
    header = IndexHeader("int32", 9, 5, has_modes=False)
    check_boundaries(index(0, 0, 4, 4, 9, 9), 0, header, "a.idx")
    with pytest.raises(IndexedInvalid, match="expected boundary 3 of the documents from 4 to 9, found 3"):
        check_boundaries(index(4, 3, 9), 2, header, "a.idx")


@pytest.mark.parametrize(
    ("length", "pointer", "says"),
    [
        (-1, 0, "found -1 tokens of uint16 at byte 0"),
        (1, -2, "found 1 tokens of uint16 at byte -2"),
        (1, 9, "found 1 tokens of uint16 at byte 9, up to byte 11; the .bin file was cut"),
        (0, 11, "found 0 tokens of uint16 at byte 11"),
        (2**31 - 1, 0, "up to byte 4294967294"),
        (2**31 - 1, 2**63 - 1, "at byte 9223372036854775807"),
    ],
)
def test_sequences_outside_of_the_data(length: int, pointer: int, says: str) -> None:
    with pytest.raises(IndexedInvalid) as error:
        check_sequences(index(5, length), index(0, pointer), 7, THREE, 10, "a.idx")
    assert str(error.value).startswith("a.idx: expected sequence 8 within the 10 bytes of its .bin file")
    assert says in str(error.value)
    assert error.value.sequence == 8


def test_sequences_within_the_data() -> None:
    check_sequences(index(5, 0, 1), index(0, 10, 8), 0, THREE, 10, "a.idx")


def test_types_by_their_tokens() -> None:
    assert bounds_of("int32") == (-(2**31), 2**31 - 1)
    assert bounds_of("uint8") == (0, 255)
    assert bounds_of("float32")[1] == int(np.finfo(np.float32).max)
    assert [smallest_dtype(0, high) for high in (0, 65498, 65499, 70000)] == ["uint16", "uint16", "int32", "int32"]
