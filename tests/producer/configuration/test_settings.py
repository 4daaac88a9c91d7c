"""Settings that cannot be, alone or together: each is refused under its own name, and all at once."""

import math
import pickle
from typing import Any, Final

import pytest

from lazyshard_producer.configuration.given import Given, assemble
from lazyshard_producer.errors import SettingInvalid, SettingsInvalid


def refusal(*sources: dict[str, Any], **values: Any) -> SettingsInvalid | None:
    """What is said of a file with these values."""
    file = Given(sources or ({"path": "a"},), {"out": "out", "samples_per_chunk": 10} | values, file="x")
    try:
        assemble(Given(), file)
    except SettingsInvalid as error:
        return error
    return None


def refused(*sources: dict[str, Any], **values: Any) -> list[str]:
    """Returns the keys of what is refused."""
    error = refusal(*sources, **values)
    names = [] if error is None else [problem.option.replace(".", " ").split()[-1] for problem in error.problems]
    # What is missing in the file is called by its flag.
    return [name.removeprefix("--").replace("-", "_") for name in names]


def test_every_problem_is_found_at_once_and_survives_pickling() -> None:
    found = refused(out="", samples_per_chunk=0, rate=0.0, max_disk=0)
    assert found == ["samples_per_chunk", "rate", "max_disk", "out"]
    error = refusal(out="", shuffle=-1)
    again = pickle.loads(pickle.dumps(error))
    assert error is not None
    assert (again.problems, str(again)) == (error.problems, str(error))
    assert (again.option, len(again.problems)) == ("x: rows.shuffle", 2)
    assert isinstance(again, SettingInvalid) and isinstance(again, ValueError)


RLHF: Final = {"encode": "swift", "model": "m", "encode_option": {"mode": "rlhf"}}
REFUSED: Final[dict[str, list[dict[str, Any]]]] = {
    "out": [{"out": "a\0b"}],
    "samples_per_chunk": [{"samples_per_chunk": 10**8 + 1}],
    "rate": [{"rate": math.nan}, {"rate": math.inf}, {"rate": -1.0}],
    "max_row_bytes": [{"max_row_bytes": 0}],
    "shuffle": [{"shuffle": -1}, {"shuffle": 10**9 + 1}, {"pack": 8, "shuffle": 4}],
    "seed": [{"seed": -1}, {"seed": 2**63}],
    "pack": [{"pack": -1}, {"pack": 2**32}],
    "pack_buffer": [{"pack": 8, "pack_buffer": 0}, {"pack_buffer": 5}],
    "pack_buffer_bytes": [{"pack": 8, "pack_buffer_bytes": 0}, {"pack_buffer_bytes": 5}],
    "length_field": [
        *({"length_field": "tokens"}, {"pack": 8, "length_field": ""}, {"split": 8, "length_field": "tokens"}),
        {"pack": 8, "encode": "m:f", "length_field": "tokens"},
        {"measure": "m:f", "pack": 10, "length_field": "n"},
    ],
    "columns": [{"columns": ["a", "a"]}, *({form: 8, "columns": {"text": "text"}} for form in ("pack", "split"))],
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
    "workers": [{"workers": 1}, {"workers": -1, "transform": "m:f"}, {"workers": 1025, "transform": "m:f"}],
    "transform": [{"transform": text} for text in ("clean", "m:", "m:f()", "m:f:g")],
    "where": [{"where": ":f"}, {"where": "1m:f"}],
    "measure": [{"measure": "m:f", **more} for more in ({"encode": "m:g"}, {"split": 10}, {"pad": 10})],
    "measure_field": [{"measure": "m:f", "measure_field": "text"}, {"measure_field": "text"}],
    "model": [{"measure": "swift"}, {"measure": "m:f", "model": "/model"}, {"encode": "swift"}],
    "encode": [{"encode": "nothing"}],
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


@pytest.mark.parametrize(("option", "values"), [(option, one) for option, some in REFUSED.items() for one in some])
def test_what_cannot_be_is_the_only_problem(option: str, values: dict[str, Any]) -> None:
    assert refused(**values) == [option]


@pytest.mark.parametrize(
    "values",
    [
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
        {"balance": 2, "max_disk": 1, "min_free_disk": 0, "retain": 1, **RLHF},
        {"on_bad_row": "skip", "max_bad_rows": 0, "retain": "consumed", "consumers": ["train"]},
    ],
)
def test_what_can_be(values: dict[str, Any]) -> None:
    assert refused(**values) == []


FOLLOWED: Final = {"follow": "d"}
MARKED: Final = {"follow": "d", "finished_by": "marker"}
IDLE: Final = {"follow": "d", "finished_by": "idle"}
REFUSED_SOURCES: Final[dict[str, list[dict[str, Any]]]] = {
    "path": [{"path": path} for path in ("", "a\0", "python:", "python:m")],
    "follow": [{"follow": path} for path in ("", "-", "python:m:f")],
    "weight": [{"path": "a", "weight": weight} for weight in (-1.0, math.nan, math.inf)],
    "pattern": [{"path": "a", "pattern": "*.json"}, FOLLOWED | {"pattern": ""}, FOLLOWED | {"pattern": "a/*.jsonl"}],
    "finished_by": [{"path": "a", "finished_by": "idle"}],
    "marker": [
        *({"path": "a", "marker": "{name}.ok"}, FOLLOWED | {"marker": "{name}.ok"}),
        *(MARKED | {"marker": marker} for marker in ("done", "{name}", "../{name}")),
    ],
    "idle_seconds": [
        {"path": "-", "idle_seconds": 1.0},
        IDLE | {"idle_seconds": 0.0},
        IDLE | {"idle_seconds": math.inf},
    ],
    "end_marker": [{"path": "a", "end_marker": "END"}, FOLLOWED | {"end_marker": ""}, FOLLOWED | {"end_marker": ".."}],
    "resume": [{"path": "python:m:f", "resume": "append"}, FOLLOWED | {"resume": "append"}],
}


@pytest.mark.parametrize(
    ("option", "source"), [(option, one) for option, some in REFUSED_SOURCES.items() for one in some]
)
def test_a_source_that_cannot_be(option: str, source: dict[str, Any]) -> None:
    assert refused(source) == [option]


@pytest.mark.parametrize(
    "source",
    [
        {"path": "-", "resume": "append"},
        {"path": "a", "resume": "append", "weight": 0.1},  # may be a named pipe: that takes a look at it
        {"path": "python:my.rows:generate"},
        MARKED | {"pattern": "part-*", "marker": ".{name}.ok", "end_marker": "END"},
        IDLE | {"idle_seconds": 0.5},
        # The defaults.
        {"path": "a", "pattern": "*.jsonl", "finished_by": "rename", "marker": "{name}.done", "idle_seconds": 60},
    ],
)
def test_a_source_that_can_be(source: dict[str, Any]) -> None:
    assert refused(source) == []


def test_weights_are_given_to_all_or_none_and_standard_input_once() -> None:
    assert refused({"path": "a", "weight": 1}, {"path": "b"}, {"path": "c"}) == ["weight", "weight"]
    assert refused({"path": "-", "weight": 1}, {"path": "-", "weight": 1}) == ["source"]


@pytest.mark.parametrize("live", [{"path": "-"}, {"path": "python:m:f"}, {"follow": "d"}])
def test_a_live_source_comes_last_or_all_are_mixed(live: dict[str, Any]) -> None:
    plain = {"path": "a"}
    assert refused(live, plain) == list(live)
    assert refused(plain, live) == []
    assert refused({**live, "weight": 1}, {**plain, "weight": 2}) == []


def test_an_option_of_swift_is_given_once() -> None:
    values = {"encode": "swift", "model": "m", "encode_option": ("a=1", "a=2")}
    given = Given([{"path": ["a"]}], {"out": "o", "samples_per_chunk": "1", **values})
    with pytest.raises(SettingsInvalid) as error:
        assemble(given, None)
    assert [problem.option for problem in error.value.problems] == ["--encode-option"]
