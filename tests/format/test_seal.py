from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import SealInvalid
from lazyshard.format.fields import pack
from lazyshard.format.seal import Seal
from tests.format.cases import changed, check_refusal, without
from tests.format.records import RECORDS

ROWS = [b'{"text":"one"}\n', '{"text":"zwei ü"}\n'.encode()]
GOLDEN = RECORDS["seal"].golden
VALUE = Seal(
    chunk=7,
    offsets=np.array([0, 15, 34], dtype="<u8"),
    digests=np.array([9796749203539134198, 8210857458222577632], dtype="<u8"),
    tokens=np.array([3, 7], dtype="<u4"),
    source={"in.jsonl": 34},
    sealed_at=1700000002.5,
)


def test_digest_is_xxh3_of_the_row_with_its_newline() -> None:
    assert xxhash.xxh3_64_intdigest(b"") == 3244421341483603138
    assert xxhash.xxh3_64_intdigest(b"{}\n") == 15753941481085060538
    assert [xxhash.xxh3_64_intdigest(row) for row in ROWS] == [9796749203539134198, 8210857458222577632]


def test_seal_is_written_and_read() -> None:
    assert VALUE.encode() == GOLDEN
    seal = Seal.decode(GOLDEN, 7)
    assert (seal.chunk, seal.samples, seal.size, seal.source, seal.sealed_at) == (
        7,
        2,
        34,
        {"in.jsonl": 34},
        1700000002.5,
    )
    assert seal.offsets.tolist() == [0, 15, 34]
    assert seal.digests.tolist() == [9796749203539134198, 8210857458222577632]
    assert seal.tokens is not None
    assert seal.tokens.tolist() == [3, 7]
    assert [str(seal.offsets.dtype), str(seal.digests.dtype), str(seal.tokens.dtype)] == ["uint64", "uint64", "uint32"]


def test_seal_without_tokens_and_source_is_read() -> None:
    for data in (changed(GOLDEN, tokens=None, source=None), without(without(GOLDEN, "tokens"), "source")):
        seal = Seal.decode(data, 7)
        assert (seal.tokens, seal.source) == (None, None)
        assert seal.offsets.tolist() == [0, 15, 34]


def check(value_of: dict[str, object], field: str, expected: str, actual: str) -> None:
    check_refusal(
        lambda: Seal.decode(changed(GOLDEN, **value_of), 7, "/data/s/chunk_7.jsonl.completed"),
        SealInvalid,
        file="/data/s/chunk_7.jsonl.completed",
        field=field,
        expected=expected,
        actual=actual,
    )


def test_first_offset_past_the_start_is_refused() -> None:
    check({"offsets": pack([1, 15, 34], "<u8")}, "offsets", "a first row at byte 0", "byte 1")


@pytest.mark.parametrize(
    ("offsets", "actual"),
    [
        ([0, 35, 34], "row 1 from byte 35 to byte 34"),
        ([0, 0, 34], "row 0 from byte 0 to byte 0"),
        ([0, 34, 34], "row 1 from byte 34 to byte 34"),
        ([0, 2**64 - 1, 34], "row 1 from byte 18446744073709551615 to byte 34"),
    ],
)
def test_offsets_that_do_not_rise_are_refused(offsets: list[int], actual: str) -> None:
    check({"offsets": pack(offsets, "<u8")}, "offsets", "rising row starts", actual)


@pytest.mark.parametrize(
    ("field", "packed", "expected", "actual"),
    [
        ("offsets", pack([0, 34], "<u8"), "3 numbers of 8 bytes", "16 bytes"),
        ("offsets", "", "3 numbers of 8 bytes", "0 bytes"),
        ("xxh3", pack([1, 2, 3], "<u8"), "2 numbers of 8 bytes", "24 bytes"),
        ("tokens", pack([1, 2], "<u8"), "2 numbers of 4 bytes", "16 bytes"),
        ("tokens", "", "2 numbers of 4 bytes", "0 bytes"),
    ],
)
def test_array_of_another_length_is_refused(field: str, packed: str, expected: str, actual: str) -> None:
    check({field: packed}, field, expected, actual)


@pytest.mark.parametrize("field", ["offsets", "xxh3", "tokens"])
def test_array_that_is_no_base64_is_refused(field: str) -> None:
    with pytest.raises(SealInvalid) as caught:
        Seal.decode(changed(GOLDEN, **{field: "AAAA*AAA"}), 7)
    assert (caught.value.field, caught.value.expected) == (field, "a base64 string")
    assert str(caught.value).startswith(
        f"chunk_00007.jsonl.completed: field '{field}': expected a base64 string, found 'AAAA*AAA' ("
    )
    check({field: [1, 2]}, field, "a base64 string", "[1, 2]")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.integers(0, 10**15),
    st.lists(st.tuples(st.integers(1, 2**40), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)), min_size=1),
    st.booleans(),
    json_values,
)
def test_seal_round_trips(chunk: int, rows: list[tuple[int, int, int]], measured: bool, source: object) -> None:
    sizes, digests, tokens = zip(*rows, strict=True)
    offsets = [sum(sizes[:row]) for row in range(len(rows) + 1)]
    data = Seal(
        chunk=chunk,
        offsets=np.array(offsets, dtype="<u8"),
        digests=np.array(digests, dtype="<u8"),
        tokens=np.array(tokens, dtype="<u4") if measured else None,
        source=source,
    ).encode()
    seal = Seal.decode(data, chunk)
    assert (seal.chunk, seal.samples, seal.size, seal.source) == (chunk, len(rows), sum(sizes), source)
    assert seal.offsets.tolist() == offsets
    assert seal.digests.tolist() == list(digests)
    assert (None if seal.tokens is None else tuple(seal.tokens.tolist())) == (tokens if measured else None)
    assert seal.encode() == data
