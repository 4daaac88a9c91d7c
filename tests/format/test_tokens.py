from __future__ import annotations

import numpy as np
import pytest
import xxhash

from lazyshard.errors import TokensInvalid
from lazyshard.format import Tokens, seal_digest
from lazyshard.format.names import parse_chunk_name, parse_tokens_name, tokens_name
from tests.format.cases import changed, check_later_format, check_refusal, not_an_integer, without

SEAL = "3c1f7e5f7c06d1b0a4e7f2f9a3d8b6c5"
GOLDEN = (
    b'{"format":1,"chunk":7,"samples":2,"seal":"3c1f7e5f7c06d1b0a4e7f2f9a3d8b6c5","measure":"function m:f",'
    b'"tokens":"AwAAAAcAAAA=","xxh3":"%s","measured_at":1700000002.5}\n'
    % xxhash.xxh3_64_hexdigest(bytes((3, 0, 0, 0, 7, 0, 0, 0))).encode()
)
NAME = "chunk_00007.jsonl.tokens"


def test_tokens_bytes_are_pinned() -> None:
    value = Tokens(7, SEAL, np.array([3, 7], np.uint32), "function m:f", 1700000002.5)
    assert value.encode() == GOLDEN


def test_tokens_are_read() -> None:
    found = Tokens.decode(GOLDEN, 7)
    assert (found.chunk, found.seal, found.measure, found.measured_at) == (7, SEAL, "function m:f", 1700000002.5)
    assert (found.lengths.tolist(), str(found.lengths.dtype)) == ([3, 7], "uint32")


def test_seal_digest_is_xxh3_of_128_bits() -> None:
    assert seal_digest(b"") == "99aa06d3014798d86001c324468d497f"


def test_name_is_no_chunk_and_no_seal() -> None:
    assert tokens_name(7) == NAME
    assert (parse_tokens_name(NAME), parse_chunk_name(NAME)) == (7, None)
    assert parse_tokens_name("chunk_00007.jsonl.tokens.part") is None


@pytest.mark.parametrize("size", range(len(GOLDEN) - 1))
def test_file_that_is_cut_is_refused(size: int) -> None:
    with pytest.raises(TokensInvalid):
        Tokens.decode(GOLDEN[:size], 7)


@pytest.mark.parametrize("at", range(GOLDEN.index(b"AwAAA"), GOLDEN.index(b"AwAAA") + 10))
def test_length_that_has_changed_is_refused(at: int) -> None:
    data = bytearray(GOLDEN)
    data[at] = ord("B") if data[at] != ord("B") else ord("C")
    with pytest.raises(TokensInvalid):
        Tokens.decode(bytes(data), 7)


@pytest.mark.parametrize(("value", "shown"), not_an_integer(1, 100_000_000))
def test_impossible_number_of_samples_is_refused(value: object, shown: str) -> None:
    check_refusal(
        lambda: Tokens.decode(changed(GOLDEN, samples=value), 7),
        TokensInvalid,
        file=NAME,
        field="samples",
        expected="an integer from 1 to 100000000",
        actual=shown,
    )


def test_file_of_another_chunk_is_refused() -> None:
    check_refusal(
        lambda: Tokens.decode(GOLDEN, 8),
        TokensInvalid,
        file="chunk_00008.jsonl.tokens",
        field="chunk",
        expected="8, as in the file's name",
        actual="7",
    )


@pytest.mark.parametrize("field", ["chunk", "samples", "seal", "measure", "tokens", "xxh3", "measured_at"])
def test_missing_field_is_named(field: str) -> None:
    with pytest.raises(TokensInvalid, match=f"field '{field}': expected .*, found no such field"):
        Tokens.decode(without(GOLDEN, field), 7)


def test_endless_measure_is_refused() -> None:
    with pytest.raises(TokensInvalid, match="at most 1000 characters, found 1001"):
        Tokens.decode(changed(GOLDEN, measure="x" * 1001), 7)


def test_later_format_is_refused() -> None:
    check_later_format(lambda data: Tokens.decode(data, 7), GOLDEN, file=NAME)
