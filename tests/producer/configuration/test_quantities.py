"""Quantities as people write them, and the values of options as flags and in TOML."""

from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.configuration.given import Given, assemble
from lazyshard_producer.configuration.settings import (
    BY_NAME,
    Amount,
    parse_amount,
    parse_bytes,
    parse_retain,
)
from lazyshard_producer.errors import SettingsInvalid
from tests.stream.streams import raised

SIZES: Final = [
    {"0": 0, "512": 512, " 5 ": 5, "7 bytes": 7, "1 byte": 1, "8B": 8},
    {"20GB": 20 * 10**9, "20 gb": 20 * 10**9, "20G": 20 * 10**9, "3PB": 3 * 10**15, "1.5kB": 1500, "0.0001kB": 0},
    {"512MiB": 512 << 20, "512Mi": 512 << 20, "2TiB": 2 << 40},
    {"9007199254740993": 2**53 + 1},  # as a float it would be one less
]
AMOUNTS: Final = [
    {"0": (0, "chunks"), "64": (64, "chunks"), "64chunks": (64, "chunks"), "1 chunk": (1, "chunks")},
    {"1000000samples": (10**6, "samples"), "1 Sample": (1, "samples")},
    {"20GB": (20 * 10**9, "bytes"), "64 bytes": (64, "bytes")},
]
RETAINED: Final = {"all": "all", "consumed": "consumed", "100": 100, "last 100": 100, "last100": 100, "last:7": 7}
NO_SIZES: Final = ["GB", "1e9", "1.GB", ".5GB", "much", "20 parsecs", "64chunks", "1 000", "٣", "_1", "9" * 5000]
NEEDED: Final = {"out": "out", "samples_per_chunk": 10, "shuffle": 5, "on_bad_row": "skip", "encode": "m:f"}


def amount(number: int, unit: Any) -> Amount:
    return Amount(number=number, unit=unit)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        *((parse_bytes, *row) for some in SIZES for row in some.items()),
        *((parse_amount, text, amount(*row)) for some in AMOUNTS for text, row in some.items()),
        *((parse_retain, *row) for row in RETAINED.items()),
    ],
)
def test_what_is_read(parse: Callable[[str], Any], text: str, value: Any) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_bytes, ["", "-1", *NO_SIZES]),
        (parse_amount, ["", "-1", "1.5 chunks", "0.5", "64 rows", "chunks"]),
        (parse_retain, ["", "-1", "none", "last", "last -1", "ALL", "1.5"]),
    ],
)
def test_what_cannot_be_read(parse: Callable[[str], Any], texts: list[str]) -> None:
    for text in texts:
        raised(ValueError, parse, text)


@given(st.integers(0, 10**18 - 1), st.sampled_from(["chunks", "samples", "bytes"]))
def test_an_amount_is_read_back(number: int, unit: Any) -> None:
    assert parse_amount(f"{number} {unit}") == amount(number, unit)


def test_quantities_for_people() -> None:
    sizes = {0: "0 bytes", 1: "1 byte", 999: "999 bytes", 1000: "1.0 kB", 67108864: "67.1 MB"}
    for size, text in {**sizes, 5 * 10**15: "5.0 PB"}.items():
        assert str(amount(size, "bytes")) == text
    assert str(amount(1, "chunks")) == "1 chunk"
    assert str(amount(1_000_000, "samples")) == "1,000,000 samples"
    assert str(amount(2 * 10**9, "bytes")) == "2.0 GB"


def of_flags(name: str, *texts: str) -> Any:
    value = texts if BY_NAME[name].repeat else texts[-1]
    return _value(name, assemble(Given([{"path": ["a"]}], {name: value}), _file({})))


def of_toml(name: str, value: Any) -> Any:
    return _value(name, assemble(Given(), _file({name: value})))


def _file(more: dict[str, Any]) -> Given:
    return Given(({"path": "a"},), NEEDED | more, file="x")


def _value(name: str, settings: Any) -> Any:
    return BY_NAME[name].of(settings)


@pytest.mark.parametrize(
    ("name", "texts", "toml", "value"),
    [
        ("shuffle", ["100"], 100, 100),
        ("seed", ["1", "10"], 10, 10),
        ("log_every_seconds", ["0.5"], 0.5, 0.5),
        ("rate", ["none"], "none", None),
        ("on_bad_row", ["quarantine"], "quarantine", "quarantine"),
        ("max_row_bytes", ["2kB"], "2kB", 2000),
        ("max_row_bytes", ["7"], 7, 7),
        ("max_ahead", ["7"], 7, amount(7, "chunks")),
        ("retain", ["7"], 7, 7),
        ("columns", ["n=o,p", "q = r"], {"n": "o", "p": "p", "q": "r"}, (("n", "o"), ("p", "p"), ("q", "r"))),
        ("columns", ["p,q"], ["p", "q"], (("p", "p"), ("q", "q"))),
    ],
)
def test_flags_and_toml_give_the_same(name: str, texts: list[str], toml: Any, value: Any) -> None:
    assert of_flags(name, *texts) == of_toml(name, toml) == value


def test_names_with_commas() -> None:
    given = {"retain": "1", "consumers": ("a, b", "c")}
    assert assemble(Given((), given), _file({})).limits.consumers == ("a", "b", "c")
    assert assemble(Given(), _file({"retain": 1, "consumers": "a"})).limits.consumers == ("a",)
    assert of_toml("columns", ["a,b"]) == (("a,b", "a,b"),)


@pytest.mark.parametrize(
    ("name", "texts", "values"),
    [
        ("where", [], [1]),
        ("seed", ["1.5", "5.0", "ten"], ["10", True, 1.0]),
        ("metrics_port", ["0.0", "None"], ["5"]),
        ("rate", ["fast"], ["0.5", False, 10**400]),
        ("on_bad_row", ["Fail"], [1, "other"]),
        ("max_row_bytes", ["-1", "none"], [1.5, -1, True, "none"]),
        ("max_ahead", [], [[1]]),
        ("retain", [], [{}]),
        ("consumers", [], [1, ["a", 1]]),
        ("columns", [], ["a", {"a": 1}, [1]]),
        ("encode_option", ["left"], [["a=b"]]),
    ],
)
def test_what_is_of_another_kind(name: str, texts: list[str], values: list[Any]) -> None:
    for text in texts:
        error = raised(SettingsInvalid, of_flags, name, text)
        assert [problem.option for problem in error.problems] == [BY_NAME[name].flag]
    for value in values:
        error = raised(SettingsInvalid, of_toml, name, value)
        assert [problem.option.replace(".", " ").split()[-1] for problem in error.problems] == [name]
