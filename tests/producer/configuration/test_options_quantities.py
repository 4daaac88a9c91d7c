from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.configuration.assembly import assemble
from lazyshard_producer.configuration.command_line import Flags, SourceArgument
from lazyshard_producer.configuration.config import ConfigFile
from lazyshard_producer.configuration.quantities import (
    Amount,
    parse_amount,
    parse_bytes,
    parse_retain,
    show_amount,
    show_bytes,
)
from lazyshard_producer.configuration.settings import BY_NAME, Limits
from lazyshard_producer.errors import SettingsInvalid


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


@given(st.integers(0, 2**63 - 1), st.sampled_from(["chunks", "samples", "bytes"]))
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


NEEDED = {"out": "out", "samples_per_chunk": 10, "shuffle": 5, "on_bad_row": "skip", "encode": "m:f"}


def of_flags(name: str, *texts: str) -> Any:
    return _value(name, assemble(Flags([SourceArgument("--source", ["a"])], {name: texts}), _file({})))


def of_toml(name: str, value: Any) -> Any:
    return _value(name, assemble(Flags(), _file({name: value})))


def _file(more: dict[str, Any]) -> ConfigFile:
    return ConfigFile("x", NEEDED | more, ({"path": "a"},), ())


def _value(name: str, settings: Any) -> Any:
    option = BY_NAME[name]
    return getattr(settings.limits if option.owner is Limits else settings, option.field)


@pytest.mark.parametrize(
    ("name", "texts", "toml", "value"),
    [
        ("where", ["m:f"], "m:f", "m:f"),
        ("seed", ["1", "10"], 10, 10),
        ("log_every_seconds", ["0.5"], 0.5, 0.5),
        ("log_every_seconds", ["3"], 3, 3.0),
        ("rate", ["none"], "none", None),
        ("metrics_port", ["0"], 0, 0),
        ("on_bad_row", ["quarantine"], "quarantine", "quarantine"),
        ("max_row_bytes", ["2kB"], "2kB", 2000),
        ("max_row_bytes", ["7"], 7, 7),
        ("max_disk", ["none"], "none", None),
        ("max_ahead", ["7"], 7, Amount(number=7, unit="chunks")),
        ("max_ahead", ["none"], "none", None),
        ("retain", ["7"], 7, 7),
        ("retain", ["all"], "all", "all"),
        ("columns", ["n=o,p", "q = r"], {"n": "o", "p": "p", "q": "r"}, (("n", "o"), ("p", "p"), ("q", "r"))),
        ("columns", ["p,q"], ["p", "q"], (("p", "p"), ("q", "q"))),
    ],
)
def test_flags_and_toml_give_the_same(name: str, texts: list[str], toml: Any, value: Any) -> None:
    assert of_flags(name, *texts) == of_toml(name, toml) == value


def test_consumers() -> None:
    given = {"retain": ["1"], "consumers": ["a, b", "c"]}
    assert assemble(Flags((), given), _file({})).limits.consumers == ("a", "b", "c")
    assert assemble(Flags(), _file({"retain": 1, "consumers": "a"})).limits.consumers == ("a",)


def test_a_name_with_a_comma_can_be_given_in_a_list_only() -> None:
    assert of_toml("columns", ["a,b"]) == (("a,b", "a,b"),)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("seed", "1.5"),
        ("seed", "5.0"),
        ("seed", "ten"),
        ("samples_per_chunk", "5.0"),
        ("metrics_port", "0.0"),
        ("pack", "8."),
        ("workers", "1.0"),
        ("max_bad_rows", "1.0"),
        ("rate", "fast"),
        ("metrics_port", "None"),
        ("on_bad_row", "Fail"),
        ("max_row_bytes", "-1"),
        ("max_row_bytes", "none"),
        ("encode_option", "left"),
    ],
)
def test_texts_of_another_kind(name: str, text: str) -> None:
    with pytest.raises(SettingsInvalid) as error:
        of_flags(name, text)
    assert [problem.option for problem in error.value.problems] == [BY_NAME[name].flag]


@pytest.mark.parametrize(
    ("name", "toml"),
    [
        ("where", 1),
        ("seed", "10"),
        ("seed", True),
        ("seed", 1.0),
        ("rate", "0.5"),
        ("rate", False),
        ("rate", 10**400),
        ("metrics_port", "5"),
        ("on_bad_row", 1),
        ("on_bad_row", "other"),
        ("max_row_bytes", 1.5),
        ("max_row_bytes", -1),
        ("max_row_bytes", True),
        ("max_row_bytes", "none"),
        ("max_ahead", [1]),
        ("retain", {}),
        ("consumers", 1),
        ("consumers", ["a", 1]),
        ("columns", "a"),
        ("columns", {"a": 1}),
        ("columns", [1]),
        ("encode_option", ["a=b"]),
    ],
)
def test_toml_of_another_kind(name: str, toml: Any) -> None:
    with pytest.raises(SettingsInvalid) as error:
        of_toml(name, toml)
    assert [problem.option.replace(".", " ").split()[-1] for problem in error.value.problems] == [name]
