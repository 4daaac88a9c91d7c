"""Quantities as people write them; options as flags and in TOML; settings that cannot be, alone or together."""

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.configuration.given import Given, assemble
from lazyshard_producer.configuration.settings import BY_NAME, Amount, parse_amount, parse_bytes, parse_retain
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


def test_what_cannot_be_read() -> None:
    for parse, texts in (
        (parse_bytes, ["", "-1", *NO_SIZES]),
        (parse_amount, ["", "-1", "1.5 chunks", "0.5", "64 rows", "chunks"]),
        (parse_retain, ["", "-1", "none", "last", "last -1", "ALL", "1.5"]),
    ):
        for text in texts:
            raised(ValueError, parse, text)


@given(st.integers(0, 10**18 - 1), st.sampled_from(["chunks", "samples", "bytes"]))
def test_an_amount_is_read_back(number: int, unit: Any) -> None:
    assert parse_amount(f"{number} {unit}") == amount(number, unit)


def of_flags(name: str, *texts: str) -> Any:
    value = texts if BY_NAME[name].repeat else texts[-1]
    return BY_NAME[name].of(assemble(Given([{"path": ["a"]}], {name: value}), _file({})))


def of_toml(name: str, value: Any) -> Any:
    return BY_NAME[name].of(assemble(Given(), _file({name: value})))


def _file(more: dict[str, Any]) -> Given:
    return Given(({"path": "a"},), NEEDED | more, file="x")


def test_names_with_commas_and_options_that_are_given_once() -> None:
    given = {"retain": "1", "consumers": ("a, b", "c")}
    assert assemble(Given((), given), _file({})).limits.consumers == ("a", "b", "c")
    assert assemble(Given(), _file({"retain": 1, "consumers": "a"})).limits.consumers == ("a",)
    assert of_toml("columns", ["a,b"]) == (("a,b", "a,b"),)
    twice = Given((), {"encode": "swift", "model": "m", "encode_option": ("a=1", "a=2")})
    error = raised(SettingsInvalid, assemble, twice, _file({}))
    assert [problem.option for problem in error.problems] == ["--encode-option"]


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


def refused(*sources: dict[str, Any], **values: Any) -> list[str]:
    """The keys of what is refused in a file with these values."""
    file = Given(sources or ({"path": "a"},), {"out": "out", "samples_per_chunk": 10} | values, file="x")
    try:
        assemble(Given(), file)
    except SettingsInvalid as error:
        names = [problem.option.replace(".", " ").split()[-1] for problem in error.problems]
        # What is missing in the file is called by its flag.
        return [name.removeprefix("--").replace("-", "_") for name in names]
    return []


RLHF: Final = {"encode": "swift", "model": "m", "encode_option": {"mode": "rlhf"}}
REFUSED: Final[dict[str, list[dict[str, Any]]]] = {
    "out": [{"out": "a\0b"}],
    "samples_per_chunk": [{"samples_per_chunk": 10**8 + 1}],
    "rate": [{"rate": math.nan}, {"rate": math.inf}, {"rate": -1.0}],
    "max_row_bytes": [{"max_row_bytes": 0}],
    "shuffle": [{"shuffle": -1}, {"shuffle": 10**9 + 1}, {"pack": 8, "shuffle": 4}],
    "seed": [{"seed": -1}, {"seed": 2**63}],
    "pack": [{"pack": -1}, {"pack": 2**32}],
    "pack_patches": [{"pack_patches": 8}, {"pack": 8, "pack_patches": -1}, {"balance": 2, "pack_patches": 8}],
    "pack_buffer": [{"pack": 8, "pack_buffer": 0}, {"pack_buffer": 5}],
    "pack_buffer_bytes": [{"pack": 8, "pack_buffer_bytes": 0}, {"pack_buffer_bytes": 5}],
    "length_field": [
        *({"length_field": "tokens"}, {"pack": 8, "length_field": ""}, {"split": 8, "length_field": "tokens"}),
        {"pack": 8, "encode": "m:f", "length_field": "tokens"},
        {"measure": "m:f", "pack": 10, "length_field": "n"},
    ],
    "columns": [
        {"columns": ["a", "a"]},
        {"columns": ["length"], "pack": 8, "pack_patches": 8},
        *({form: 8, "columns": {"text": "text"}} for form in ("pack", "split")),
    ],
    "split": [{"split": 2**24 + 1}, {"pack": 8, "split": 8}, {"split": 2, "split_every_bos": 1, "split_every_eos": 2}],
    "split_bos": [{"split": 8, "split_bos": -1}, {"split_bos": 0}],
    "split_eos": [{"split": 8, "split_eos": 2**31}],
    "split_every_eos": [{"split_every_eos": 0}],
    "split_overlap": [
        *({"split_overlap": 1}, {"split": 8, "split_overlap": 2}),
        {"split": 8, "split_overlap": 1, "split_every_eos": 2},
    ],
    "pad": [{"pad": -1}, {"pack": 8, "pad": 8}, {"split": 8, "pad": 8}],
    "pad_token": [{"pad": 8, "pad_token": -1}, {"pad_token": 1}],
    "balance": [{"balance": 10**9}, *({"balance": 2, form: 8} for form in ("shuffle", "split", "pad"))],
    "micro_batch_size": [
        *({"micro_batch_size": 2}, {"balance": 2, "micro_batch_size": 0}, {"balance": 2, "micro_batch_size": 3}),
        {"pack": 8, "balance": 2, "micro_batch_size": 3},
    ],
    "cost_per_token": [{"cost_per_token": 2.0}, {"balance": 2, "cost_per_token": 0.0, "cost_per_token_squared": 0.0}],
    "cost_per_token_squared": [{"cost_per_token_squared": 0.0}, {"balance": 2, "cost_per_token_squared": math.nan}],
    "cost_per_patch": [{"cost_per_patch": 1.0}, {"balance": 2, "cost_per_patch": -0.5}],
    "workers": [{"workers": 1}, {"workers": -1, "transform": "m:f"}, {"workers": 1025, "transform": "m:f"}],
    "transform": [{"transform": text} for text in ("clean", "m:", "m:f()", "m:f:g")],
    "where": [{"where": ":f"}, {"where": "1m:f"}],
    "measure": [{"measure": "m:f", **more} for more in ({"encode": "m:g"}, {"split": 10}, {"pad": 10})],
    "measure_field": [{"measure": "m:f", "measure_field": "text"}, {"measure_field": "text"}],
    "model": [{"measure": "swift"}, {"measure": "m:f", "model": "/model"}, {"encode": "swift"}],
    "encode": [{"encode": "nothing"}],
    "embed": [{"embed": ""}],
    "max_length": [{"encode": "m:f", "max_length": 3}, {"encode": "swift", "model": "m", "max_length": 0}],
    "encode_option": [
        *({form: 8, **RLHF} for form in ("pack", "pad")),
        *({**RLHF, "encode_option": {name: "1"}} for name in ("--a", "model")),
    ],
    "max_bad_rows": [{"max_bad_rows": 1}, {"max_bad_rows": -1, "on_bad_row": "skip"}],
    "max_ahead": [{"max_ahead": -1}, {"max_ahead": f"{2**63}B"}],
    "min_free_disk": [{"min_free_disk": -1}],
    "retain": [{"retain": 0}],
    "consumers": [{"retain": 1, "consumers": ["train", "../x"]}],
    "metrics_port": [{"metrics_port": -1}, {"metrics_port": 65536}],
    "metrics_host": [{"metrics_host": ""}],
    "log_every_seconds": [{"log_every_seconds": 0.0}, {"log_every_seconds": math.inf}],
    "store_patience_seconds": [{"store_patience_seconds": math.nan}, {"store_patience_seconds": math.inf}],
}

CAN_BE: Final[list[dict[str, Any]]] = [
    {"samples_per_chunk": 10**8, "rate": 1e-9, "seed": 2**63 - 1, "metrics_port": 65535, "max_ahead": 0},
    {"pack": 2**32 - 1, "pack_buffer": 10**9, "length_field": "tokens"},
    {"pack": 8, "columns": {"length": "tokens", "text": "text"}},
    {"pack": 8, "columns": {"text": "text"}, "transform": "m:f"},
    {"split": 2**24, "split_bos": 0, "split_eos": 2**31 - 1, "split_overlap": 1, "shuffle": 5},
    {"split": 3, "split_every_bos": 1, "split_every_eos": 2, "columns": {"input_ids": "tokens"}},
    {"split_bos": "none", "split_every_bos": "none", "split_every_eos": "none", "metrics_port": 0},
    {"pad": 8, "pad_token": 5, "shuffle": 5, "columns": {"text": "text"}, "encode": "m:f", "workers": 2},
    {"workers": 1024, "transform": "my.rows:Cleaner.clean", "columns": {"a": "b", "b": "a"}},
    {"balance": 1, "micro_batch_size": 10, "length_field": "n", "cost_per_token": 0.0, "where": "modül:función"},
    {"pack": 8, "balance": 2, "encode": "m:f", "cost_per_token_squared": 0.0, "pack_buffer_bytes": 1},
    {"pack": 8, "pack_patches": 2**32 - 1, "balance": 1, "cost_per_patch": 1.0}
    | {"cost_per_token": 0.0, "cost_per_token_squared": 0.0},
    {"balance": 2, "max_disk": 1, "min_free_disk": 0, "retain": 1, **RLHF},
    {"on_bad_row": "skip", "max_bad_rows": 0, "retain": "consumed", "consumers": ["train"]},
]
FOLLOWED: Final = {"follow": "d"}
MARKED: Final = {"follow": "d", "finished_by": "marker"}
IDLE: Final = {"follow": "d", "finished_by": "idle"}
REFUSED_SOURCES: Final[dict[str, list[dict[str, Any]]]] = {
    "path": [{"path": path} for path in ("", "a\0", "python:", "python:m", [], [1], 1, {"a": 1})],
    "follow": [{"follow": path} for path in ("", "-", "python:m:f")],
    "weight": [{"path": "a", "weight": weight} for weight in (-1.0, math.nan, math.inf)],
    "pattern": [{"path": "a", "pattern": "*.json"}, FOLLOWED | {"pattern": ""}, FOLLOWED | {"pattern": "a/*.jsonl"}],
    "finished_by": [{"path": "a", "finished_by": "idle"}],
    "marker": [
        *({"path": "a", "marker": "{name}.ok"}, FOLLOWED | {"marker": "{name}.ok"}),
        *(MARKED | {"marker": marker} for marker in ("done", "{name}", "../{name}")),
    ],
    "idle_seconds": [{"path": "-", "idle_seconds": 1.0}, *(IDLE | {"idle_seconds": one} for one in (0.0, math.inf))],
    "end_marker": [{"path": "a", "end_marker": "END"}, FOLLOWED | {"end_marker": ""}, FOLLOWED | {"end_marker": ".."}],
    "resume": [{"path": "python:m:f", "resume": "append"}, FOLLOWED | {"resume": "append"}],
}

SOURCES_THAT_CAN_BE: Final[list[dict[str, Any]]] = [
    {"path": "-", "resume": "append"},
    {"path": "a", "resume": "append", "weight": 0.1},  # may be a named pipe: that takes a look at it
    {"path": "python:my.rows:generate"},
    MARKED | {"pattern": "part-*", "marker": ".{name}.ok", "end_marker": "END"},
    IDLE | {"idle_seconds": 0.5},
    # The defaults.
    {"path": "a", "pattern": "*.jsonl", "finished_by": "rename", "marker": "{name}.done", "idle_seconds": 60},
]


@pytest.mark.parametrize(
    ("option", "source", "values"),
    [
        *((option, {"path": "a"}, one) for option, some in REFUSED.items() for one in some),
        *((option, one, {}) for option, some in REFUSED_SOURCES.items() for one in some),
        *((None, {"path": "a"}, one) for one in CAN_BE),
        *((None, one, {}) for one in SOURCES_THAT_CAN_BE),
    ],
)
def test_what_cannot_be_is_the_only_problem(option: str | None, source: dict[str, Any], values: dict[str, Any]) -> None:
    assert refused(source, **values) == ([] if option is None else [option])


def test_sources_that_cannot_be_together() -> None:
    plain = {"path": "a"}
    assert refused(plain | {"weight": 1}, {"path": "b"}, {"path": "c"}) == ["weight", "weight"]
    assert refused({"path": "-", "weight": 1}, {"path": "-", "weight": 1}) == ["source"]
    # One that is live comes last, or all are mixed.
    for live in ({"path": "-"}, {"path": "python:m:f"}, {"follow": "d"}):
        assert refused(live, plain) == list(live)
        assert refused(plain, live) == []
        assert refused({**live, "weight": 1}, {**plain, "weight": 2}) == []
