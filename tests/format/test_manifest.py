from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import ManifestInvalid
from lazyshard.format import Manifest, check_samples_per_chunk
from tests.format.cases import changed, check_later_format, check_refusal, not_an_integer, without

GOLDEN = (
    b'{"format":1,"stream_id":"0123456789abcdef0123456789abcdef","samples_per_chunk":1000,"created_at":1700000000.5}\n'
)
VALUE = Manifest("0123456789abcdef0123456789abcdef", 1000, 1700000000.5)


def test_manifest_bytes_are_pinned() -> None:
    assert VALUE.encode() == GOLDEN
    assert Manifest.decode(GOLDEN) == VALUE


def test_unknown_field_of_manifest_is_ignored() -> None:
    assert Manifest.decode(changed(GOLDEN, compression="zstd", more={"a": [1]})) == VALUE


def test_manifest_of_a_later_format_is_refused() -> None:
    check_later_format(Manifest.decode, GOLDEN, file="stream.json", newest=2)


def test_manifest_refusal_names_the_file_given() -> None:
    check_refusal(
        lambda: Manifest.decode(b"[]", "/data/s/stream.json"),
        ManifestInvalid,
        file="/data/s/stream.json",
        field=None,
        expected="a JSON object",
        actual="[]",
    )


@pytest.mark.parametrize(("value", "actual"), not_an_integer(1, 100_000_000))
def test_samples_per_chunk_that_is_no_count_is_refused(value: object, actual: str) -> None:
    check_refusal(
        lambda: Manifest.decode(changed(GOLDEN, samples_per_chunk=value)),
        ManifestInvalid,
        file="stream.json",
        field="samples_per_chunk",
        expected="an integer from 1 to 100000000",
        actual=actual,
    )


@pytest.mark.parametrize(
    "value",
    [
        "0123",
        "0123456789ABCDEF0123456789ABCDEF",
        "0" * 33,
        "g" * 32,
        "\u0660" * 32,
        "../../../../../../../../etc/pwd/xx",
    ],
)
def test_stream_id_that_is_not_32_hexadecimal_digits_is_refused(value: str) -> None:
    check_refusal(
        lambda: Manifest.decode(changed(GOLDEN, stream_id=value)),
        ManifestInvalid,
        file="stream.json",
        field="stream_id",
        expected="32 hexadecimal digits",
        actual=repr(value),
    )


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("format", "an integer from 1 to 2147483648"),
        ("stream_id", "a string"),
        ("samples_per_chunk", "an integer from 1 to 100000000"),
        ("created_at", "a number"),
    ],
)
def test_missing_field_of_manifest_is_refused(field: str, expected: str) -> None:
    check_refusal(
        lambda: Manifest.decode(without(GOLDEN, field)),
        ManifestInvalid,
        file="stream.json",
        field=field,
        expected=expected,
        actual="no such field",
    )


@pytest.mark.parametrize("value", [0, -1, True, 100_000_001, 2.0, "2", None])
def test_number_that_cannot_be_samples_per_chunk_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="samples_per_chunk is an integer from 1 to 100000000, got "):
        check_samples_per_chunk(value)
    with pytest.raises(ValueError, match="samples_per_chunk"):
        Manifest("0" * 32, value, 0.0)


@pytest.mark.parametrize("value", [1, 100_000_000])
def test_samples_per_chunk_at_its_bounds_is_returned(value: int) -> None:
    assert check_samples_per_chunk(value) == value


@given(
    st.text("0123456789abcdef", min_size=32, max_size=32),
    st.integers(1, 100_000_000),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_manifest_round_trips(stream_id: str, samples: int, created_at: float) -> None:
    value = Manifest(stream_id, samples, created_at)
    assert Manifest.decode(value.encode()) == value
