from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.configuration.option_kinds import (
    AMOUNT_OR_NONE,
    BYTES,
    BYTES_OR_NONE,
    COLUMNS,
    NAMES,
    NUMBER,
    NUMBER_OR_NONE,
    RETAIN,
    TEXT,
    WHOLE,
    WHOLE_OR_NONE,
    Kind,
    choice,
)
from lazyshard_producer.configuration.quantities import parse_amount, parse_bytes, parse_retain, show_amount, show_bytes
from lazyshard_producer.configuration.settings import Amount


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("1_000", 1000),
        ("7 bytes", 7),
        ("1 byte", 1),
        ("8B", 8),
        ("20GB", 20 * 10**9),
        ("20 gb", 20 * 10**9),
        ("20G", 20 * 10**9),
        ("512MiB", 512 << 20),
        ("512Mi", 512 << 20),
        ("2TiB", 2 << 40),
        ("3PB", 3 * 10**15),
        ("1.5kB", 1500),
        ("0.0001kB", 0),
        (" 5 ", 5),
        # As a float it would be one less.
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "1e9", "1.GB", ".5GB", "much", "20 parsecs", "64chunks", "1 000", "٣", "_1", "9" * 5000]
)
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("64", (64, "chunks")),
        ("64chunks", (64, "chunks")),
        ("1 chunk", (1, "chunks")),
        ("1000000samples", (10**6, "samples")),
        ("1 Sample", (1, "samples")),
        ("20GB", (20 * 10**9, "bytes")),
        ("64 bytes", (64, "bytes")),
        ("0", (0, "chunks")),
    ],
)
def test_amounts(text: str, amount: tuple[int, Any]) -> None:
    assert parse_amount(text) == Amount(number=amount[0], unit=amount[1])


@pytest.mark.parametrize("text", ["", "1.5 chunks", "0.5", "-1", "64 rows", "chunks"])
def test_texts_that_are_no_amount(text: str) -> None:
    with pytest.raises(ValueError):
        parse_amount(text)


@given(st.integers(0, 2**70), st.sampled_from(["chunks", "samples", "bytes"]))
def test_an_amount_is_read_back(number: int, unit: Any) -> None:
    assert parse_amount(f"{number} {unit}") == Amount(number=number, unit=unit)


@pytest.mark.parametrize(
    ("text", "retain"),
    [("all", "all"), ("consumed", "consumed"), ("100", 100), ("last 100", 100), ("last100", 100), ("last:7", 7)],
)
def test_what_is_retained(text: str, retain: Any) -> None:
    assert parse_retain(text) == retain


@pytest.mark.parametrize("text", ["", "none", "last", "-1", "last -1", "ALL", "1.5"])
def test_texts_that_retain_nothing_known(text: str) -> None:
    with pytest.raises(ValueError):
        parse_retain(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (67108864, "67.1 MB"),
        (5 * 10**15, "5,000.0 TB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert show_bytes(size) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (Amount(number=1, unit="chunks"), "1 chunk"),
        (Amount(number=1_000_000, unit="samples"), "1,000,000 samples"),
        (Amount(number=2 * 10**9, unit="bytes"), "2.0 GB"),
    ],
)
def test_amounts_for_people(amount: Amount, text: str) -> None:
    assert show_amount(amount) == text


CHOICE = choice("fail", "skip")


@pytest.mark.parametrize(
    ("kind", "texts", "toml", "value"),
    [
        (TEXT, ["a"], "a", "a"),
        (WHOLE, ["10"], 10, 10),
        (NUMBER, ["0.5"], 0.5, 0.5),
        (NUMBER, ["3"], 3, 3.0),
        (WHOLE_OR_NONE, ["none"], "none", None),
        (WHOLE_OR_NONE, ["0"], 0, 0),
        (CHOICE, ["skip"], "skip", "skip"),
        (BYTES, ["2kB"], "2kB", 2000),
        (BYTES, ["7"], 7, 7),
        (BYTES_OR_NONE, ["7"], 7, 7),
        (BYTES_OR_NONE, ["none"], "none", None),
        (NUMBER_OR_NONE, ["none"], "none", None),
        (NUMBER_OR_NONE, ["0.5"], 0.5, 0.5),
        (AMOUNT_OR_NONE, ["7"], 7, Amount(number=7, unit="chunks")),
        (AMOUNT_OR_NONE, ["none"], "none", None),
        (RETAIN, ["7"], 7, 7),
        (RETAIN, ["all"], "all", "all"),
        (NAMES, ["a, b", "c"], ["a", "b", "c"], ("a", "b", "c")),
        (NAMES, ["a"], "a", ("a",)),
        (COLUMNS, ["n=o,p", "q = r"], {"n": "o", "p": "p", "q": "r"}, (("n", "o"), ("p", "p"), ("q", "r"))),
        (COLUMNS, ["p,q"], ["p", "q"], (("p", "p"), ("q", "q"))),
    ],
)
def test_flags_and_toml_give_the_same(kind: Kind, texts: list[str], toml: Any, value: Any) -> None:
    assert kind.from_flags(texts) == kind.from_toml(toml) == value


def test_of_a_flag_given_twice_the_last_one_counts() -> None:
    assert WHOLE.from_flags(["1", "2"]) == 2


def test_a_name_with_a_comma_can_be_given_in_a_list_only() -> None:
    assert NAMES.from_toml(["a,b"]) == ("a,b",)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (WHOLE, "1.5"),
        (WHOLE, "ten"),
        (NUMBER, "fast"),
        (WHOLE_OR_NONE, "None"),
        (CHOICE, "Fail"),
        (BYTES, "-1"),
        (BYTES, "none"),
    ],
)
def test_texts_of_another_kind(kind: Kind, text: str) -> None:
    with pytest.raises(ValueError):
        kind.from_flags([text])


@pytest.mark.parametrize(
    ("kind", "toml"),
    [
        (TEXT, 1),
        (WHOLE, "10"),
        (WHOLE, True),
        (WHOLE, 1.0),
        (NUMBER, "0.5"),
        (NUMBER, False),
        (NUMBER, 10**400),
        (WHOLE_OR_NONE, "5"),
        (CHOICE, 1),
        (CHOICE, "other"),
        (BYTES, 1.5),
        (BYTES, -1),
        (BYTES, True),
        (BYTES, "none"),
        (AMOUNT_OR_NONE, [1]),
        (RETAIN, {}),
        (NAMES, 1),
        (NAMES, ["a", 1]),
        (COLUMNS, "a"),
        (COLUMNS, {"a": 1}),
        (COLUMNS, [1]),
    ],
)
def test_toml_of_another_kind(kind: Kind, toml: Any) -> None:
    with pytest.raises(ValueError):
        kind.from_toml(toml)
