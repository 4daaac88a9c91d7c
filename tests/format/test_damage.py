"""Whatever the bytes of a file are, the decoders read them or refuse them with an error of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import FormatInvalid
from lazyshard.format import End, Head, Manifest, Owner, Seal, Tokens
from tests.format import test_end, test_head, test_manifest, test_owner, test_seal, test_tokens

FILES: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "manifest": (Manifest.decode, test_manifest.GOLDEN),
    "head": (Head.decode, test_head.GOLDEN),
    "end": (End.decode, test_end.GOLDEN),
    "owner": (Owner.decode, test_owner.GOLDEN),
    "seal": (lambda data: Seal.decode(data, 7), test_seal.GOLDEN),
    "tokens": (lambda data: Tokens.decode(data, 7), test_tokens.GOLDEN),
}
every_file = pytest.mark.parametrize(("decode", "golden"), FILES.values(), ids=FILES)

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text("A0=a\u00fc", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=5,
)


@every_file
@given(data=st.binary())
def test_arbitrary_bytes_are_refused(decode: Callable[[bytes], object], golden: bytes, data: bytes) -> None:
    with pytest.raises(FormatInvalid):
        decode(data)


@every_file
@given(data=st.data())
def test_mutated_bytes_are_read_or_refused(
    decode: Callable[[bytes], object], golden: bytes, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(golden)))
    end = data.draw(st.integers(start, min(len(golden), start + 4)))
    piece = data.draw(st.binary(max_size=4) | st.sampled_from([b"-", b"9", b'"', b"[", b"null", b"1e999"]))
    with suppress(FormatInvalid):
        decode(golden[:start] + piece + golden[end:])


@every_file
@given(data=st.data())
def test_mutated_field_is_read_or_refused(
    decode: Callable[[bytes], object], golden: bytes, data: st.DataObject
) -> None:
    values = orjson.loads(golden)
    for field in data.draw(st.sets(st.sampled_from(sorted(values)), min_size=1, max_size=2)):
        values[field] = data.draw(anything)
    with suppress(FormatInvalid):
        decode(orjson.dumps(values))


@every_file
def test_file_cut_anywhere_is_refused(decode: Callable[[bytes], object], golden: bytes) -> None:
    for size in range(len(golden) - 1):  # the last byte is the newline, which carries nothing
        with pytest.raises(FormatInvalid):
            decode(golden[:size])


@every_file
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_field_nested_past_all_limits_is_refused(
    decode: Callable[[bytes], object], golden: bytes, opening: bytes
) -> None:
    with pytest.raises(FormatInvalid):
        decode(b'{"format":' + opening * 100_000)
    with pytest.raises(FormatInvalid):
        decode(b'{"format":' + b"[" * 1000 + b"]" * 1000 + b"}")
