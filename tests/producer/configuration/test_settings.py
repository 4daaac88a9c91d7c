"""Settings that cannot be, alone or together: each is refused under its own name, and all at once."""

import math
import pickle
from typing import Any

import pytest

from lazyshard_producer.configuration.assembly import assemble
from lazyshard_producer.configuration.command_line import Flags, SourceArgument
from lazyshard_producer.configuration.config import ConfigFile
from lazyshard_producer.configuration.problems import is_live
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SettingInvalid, SettingsInvalid


def refusal(*sources: dict[str, Any], **values: Any) -> SettingsInvalid | None:
    """What is said of a file with these values."""
    file = ConfigFile("x", {"out": "out", "samples_per_chunk": 10} | values, sources or ({"path": "a"},), ())
    try:
        assemble(Flags(), file)
    except SettingsInvalid as error:
        return error
    return None


def refused(*sources: dict[str, Any], **values: Any) -> list[str]:
    """Returns the keys of what is refused."""
    error = refusal(*sources, **values)
    names = [] if error is None else [problem.option.replace(".", " ").split()[-1] for problem in error.problems]
    # What is missing in the file is called by its flag.
    return [name.removeprefix("--").replace("-", "_") for name in names]


def test_every_problem_is_found_at_once() -> None:
    assert refused(out="", samples_per_chunk=0, rate=0.0, max_disk=0) == [
        "samples_per_chunk",
        "rate",
        "max_disk",
        "out",
    ]


def test_the_error_survives_pickling_with_its_problems() -> None:
    error = refusal(out="", shuffle=-1)
    again = pickle.loads(pickle.dumps(error))
    assert error is not None
    assert again.problems == error.problems
    assert str(again) == str(error)
    assert (again.option, len(again.problems)) == ("x: rows.shuffle", 2)
    assert isinstance(again, SettingInvalid)
    assert isinstance(again, ValueError)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"out": "a\0b"}, "--out"),
        ({"samples_per_chunk": 10**8 + 1}, "--samples-per-chunk"),
        ({"rate": math.nan}, "--rate"),
        ({"rate": math.inf}, "--rate"),
        ({"rate": -1.0}, "--rate"),
        ({"max_row_bytes": 0}, "--max-row-bytes"),
        ({"shuffle": -1}, "--shuffle"),
        ({"shuffle": 10**9 + 1}, "--shuffle"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**63}, "--seed"),
        ({"pack": -1}, "--pack"),
        ({"pack": 2**32}, "--pack"),
        ({"pack": 8, "pack_buffer": 0}, "--pack-buffer"),
        ({"pack": 8, "length_field": ""}, "--length-field"),
        ({"pack": 8, "shuffle": 4}, "--shuffle"),
        ({"pack": 8, "columns": {"text": "text"}}, "--columns"),
        ({"pack_buffer": 5}, "--pack-buffer"),
        ({"pack": 8, "pack_buffer_bytes": 0}, "--pack-buffer-bytes"),
        ({"pack_buffer_bytes": 5}, "--pack-buffer-bytes"),
        ({"pack": 8, "encode": "m:f", "length_field": "tokens"}, "--length-field"),
        ({"balance": 2, "encode": "m:f", "length_field": "tokens"}, "--length-field"),
        ({"pack": 8, "encode": "swift", "model": "m", "encode_option": {"mode": "rlhf"}}, "--encode-option"),
        ({"pack": 8, "balance": 2, "micro_batch_size": 3}, "--micro-batch-size"),
        ({"split": -1}, "--split"),
        ({"split": 2**24 + 1}, "--split"),
        ({"split": 8, "split_bos": -1}, "--split-bos"),
        ({"split": 8, "split_eos": 2**31}, "--split-eos"),
        ({"split": 8, "split_overlap": 2}, "--split-overlap"),
        ({"split": 8, "split_overlap": 1, "split_every_eos": 2}, "--split-overlap"),
        ({"split": 2, "split_every_bos": 1, "split_every_eos": 2}, "--split"),
        ({"split_bos": 0}, "--split-bos"),
        ({"split_every_eos": 0}, "--split-every-eos"),
        ({"split_overlap": 1}, "--split-overlap"),
        ({"pad": -1}, "--pad"),
        ({"pad": 8, "pad_token": -1}, "--pad-token"),
        ({"pad_token": 1}, "--pad-token"),
        ({"pack": 8, "split": 8}, "--split"),
        ({"pack": 8, "pad": 8}, "--pad"),
        ({"split": 8, "pad": 8}, "--pad"),
        ({"split": 8, "balance": 2}, "--balance"),
        ({"pad": 8, "balance": 2}, "--balance"),
        ({"split": 8, "columns": {"text": "text"}}, "--columns"),
        ({"split": 8, "length_field": "tokens"}, "--length-field"),
        ({"pad": 8, "encode": "swift", "model": "m", "encode_option": {"mode": "rlhf"}}, "--encode-option"),
        ({"length_field": "tokens"}, "--length-field"),
        ({"workers": -1, "transform": "m:f"}, "--workers"),
        ({"workers": 1025, "transform": "m:f"}, "--workers"),
        ({"workers": 1}, "--workers"),
        ({"transform": "clean"}, "--transform"),
        ({"transform": "m:"}, "--transform"),
        ({"transform": "m:f()"}, "--transform"),
        ({"transform": "m:f:g"}, "--transform"),
        ({"balance": 0}, "--balance"),
        ({"balance": 10**9}, "--balance"),
        ({"balance": 2, "shuffle": 8}, "--balance"),
        ({"balance": 2, "micro_batch_size": 0}, "--micro-batch-size"),
        ({"balance": 2, "micro_batch_size": 3}, "--micro-batch-size"),
        ({"balance": 2, "length_field": ""}, "--length-field"),
        ({"balance": 2, "cost_per_token": -1.0}, "--cost-per-token"),
        ({"balance": 2, "cost_per_token_squared": math.nan}, "--cost-per-token-squared"),
        ({"balance": 2, "cost_per_token": 0.0, "cost_per_token_squared": 0.0}, "--cost-per-token"),
        ({"micro_batch_size": 2}, "--micro-batch-size"),
        ({"length_field": "tokens"}, "--length-field"),
        ({"cost_per_token": 2.0}, "--cost-per-token"),
        ({"cost_per_token_squared": 0.0}, "--cost-per-token-squared"),
        ({"where": ":f"}, "--where"),
        ({"where": "1m:f"}, "--where"),
        ({"columns": ["a", "a"]}, "--columns"),
        ({"measure": "m:f", "encode": "m:g"}, "--measure"),
        ({"measure": "m:f", "split": 10}, "--measure"),
        ({"measure": "m:f", "pad": 10}, "--measure"),
        ({"measure": "m:f", "pack": 10, "length_field": "n"}, "--length-field"),
        ({"measure": "m:f", "measure_field": "text"}, "--measure-field"),
        ({"measure_field": "text"}, "--measure-field"),
        ({"measure": "swift"}, "--model"),
        ({"measure": "m:f", "model": "/model"}, "--model"),
        ({"encode": "nothing"}, "--encode"),
        ({"encode": "swift"}, "--model"),
        ({"encode": "m:f", "max_length": 3}, "--max-length"),
        ({"encode": "swift", "model": "m", "max_length": 0}, "--max-length"),
        ({"encode": "swift", "model": "m", "encode_option": {"model": "b"}}, "--encode-option"),
        ({"encode": "swift", "model": "m", "encode_option": {"--a": "1"}}, "--encode-option"),
        ({"max_bad_rows": 1}, "--max-bad-rows"),
        ({"max_bad_rows": -1, "on_bad_row": "skip"}, "--max-bad-rows"),
        ({"max_ahead": -1}, "--max-ahead"),
        ({"max_ahead": f"{2**63}B"}, "--max-ahead"),
        ({"min_free_disk": -1}, "--min-free-disk"),
        ({"retain": 0}, "--retain"),
        ({"retain": 1, "consumers": ["train", "../x"]}, "--consumers"),
        ({"metrics_port": -1}, "--metrics-port"),
        ({"metrics_port": 65536}, "--metrics-port"),
        ({"metrics_host": ""}, "--metrics-host"),
        ({"log_every_seconds": 0.0}, "--log-every-seconds"),
        ({"log_every_seconds": math.inf}, "--log-every-seconds"),
    ],
)
def test_what_cannot_be_is_the_only_problem(changes: dict[str, Any], option: str) -> None:
    assert refused(**changes) == [option.removeprefix("--").replace("-", "_")]


@pytest.mark.parametrize(
    "changes",
    [
        {"samples_per_chunk": 10**8},
        {"rate": 1e-9},
        {"seed": 2**63 - 1},
        {"pack": 2**32 - 1, "pack_buffer": 10**9, "length_field": "tokens"},
        {"pack": 8, "columns": {"length": "tokens", "text": "text"}},
        {"pack": 8, "columns": {"text": "text"}, "transform": "m:f"},
        {"split": 2**24, "split_bos": 0, "split_eos": 2**31 - 1, "split_overlap": 1, "shuffle": 5},
        {"split": 3, "split_every_bos": 1, "split_every_eos": 2},
        {"split": 8, "columns": {"input_ids": "tokens"}},
        {"split_bos": "none", "split_every_bos": "none", "split_every_eos": "none"},
        {"pad": 8, "pad_token": 5, "shuffle": 5, "columns": {"text": "text"}, "encode": "m:f", "workers": 2},
        {"workers": 1024, "transform": "my.rows:Cleaner.clean"},
        {"transform": "modül:función"},
        {"balance": 1, "micro_batch_size": 10, "length_field": "n", "cost_per_token": 0.0},
        {"balance": 64, "cost_per_token_squared": 0.0, "workers": 2, "transform": "m:f"},
        {"pack": 8, "balance": 2, "encode": "m:f", "columns": {"text": "text"}},
        {"pack": 8, "balance": 2, "length_field": "tokens", "pack_buffer_bytes": 1},
        {"balance": 2, "encode": "swift", "model": "m", "encode_option": {"mode": "rlhf"}},
        {"columns": {"a": "b", "b": "a"}},
        {"on_bad_row": "skip", "max_bad_rows": 0},
        {"on_bad_row": "quarantine"},
        {"max_ahead": 0, "max_disk": 1, "min_free_disk": 0, "retain": 1},
        {"retain": "consumed", "consumers": ["train"]},
        {"metrics_port": 0},
        {"metrics_port": 65535},
    ],
)
def test_what_can_be(changes: dict[str, Any]) -> None:
    assert refused(**changes) == []


FOLLOWED = {"follow": "d"}


@pytest.mark.parametrize(
    ("source", "option"),
    [
        ({"path": ""}, "path"),
        ({"follow": ""}, "follow"),
        ({"path": "a\0"}, "path"),
        ({"follow": "-"}, "follow"),
        ({"follow": "python:m:f"}, "follow"),
        ({"path": "python:"}, "path"),
        ({"path": "python:m"}, "path"),
        ({"path": "a", "weight": -1.0}, "weight"),
        ({"path": "a", "weight": math.nan}, "weight"),
        ({"path": "a", "weight": math.inf}, "weight"),
        ({"path": "a", "pattern": "*.json"}, "pattern"),
        ({"path": "a", "finished_by": "idle"}, "finished_by"),
        ({"path": "a", "marker": "{name}.ok"}, "marker"),
        ({"path": "-", "idle_seconds": 1.0}, "idle_seconds"),
        ({"path": "a", "end_marker": "END"}, "end_marker"),
        ({"path": "python:m:f", "resume": "append"}, "resume"),
        (FOLLOWED | {"resume": "append"}, "resume"),
        (FOLLOWED | {"pattern": ""}, "pattern"),
        (FOLLOWED | {"pattern": "a/*.jsonl"}, "pattern"),
        (FOLLOWED | {"finished_by": "marker", "marker": "done"}, "marker"),
        (FOLLOWED | {"finished_by": "marker", "marker": "{name}"}, "marker"),
        (FOLLOWED | {"finished_by": "marker", "marker": "../{name}"}, "marker"),
        (FOLLOWED | {"marker": "{name}.ok"}, "marker"),
        (FOLLOWED | {"idle_seconds": 5.0}, "idle_seconds"),
        (FOLLOWED | {"finished_by": "idle", "idle_seconds": 0.0}, "idle_seconds"),
        (FOLLOWED | {"finished_by": "idle", "idle_seconds": math.inf}, "idle_seconds"),
        (FOLLOWED | {"end_marker": ""}, "end_marker"),
        (FOLLOWED | {"end_marker": ".."}, "end_marker"),
    ],
)
def test_a_source_that_cannot_be(source: dict[str, Any], option: str) -> None:
    assert refused(source) == [option]


@pytest.mark.parametrize(
    "source",
    [
        {"path": "-", "resume": "append"},
        # May be a named pipe: that takes a look at it.
        {"path": "a", "resume": "append"},
        {"path": "python:my.rows:generate"},
        {"path": "python"},
        FOLLOWED | {"pattern": "part-*", "finished_by": "marker", "marker": ".{name}.ok", "end_marker": "END"},
        FOLLOWED | {"finished_by": "idle", "idle_seconds": 0.5},
        {"path": "a", "weight": 0.1},
        {
            "path": "a",
            "pattern": "*.jsonl",
            "finished_by": "rename",
            "marker": "{name}.done",
            "idle_seconds": 60,
            "end_marker": "_END",
        },
    ],
)
def test_a_source_that_can_be(source: dict[str, Any]) -> None:
    assert refused(source) == []


def test_weights_are_given_to_all_or_none() -> None:
    assert refused({"path": "a", "weight": 1}, {"path": "b"}, {"path": "c"}) == ["weight", "weight"]


@pytest.mark.parametrize("live", [{"path": "-"}, {"path": "python:m:f"}, {"follow": "d"}])
def test_a_live_source_comes_last_or_all_are_mixed(live: dict[str, Any]) -> None:
    plain = {"path": "a"}
    assert refused(live, plain) == list(live)
    assert refused(plain, live) == []
    assert refused({**live, "weight": 1}, {**plain, "weight": 2}) == []


def test_what_is_live() -> None:
    assert is_live(SourceSettings(path="-"))
    assert is_live(SourceSettings(path="d", follow=True))
    assert not is_live(SourceSettings(path="a"))


def test_standard_input_is_given_once() -> None:
    assert refused({"path": "-", "weight": 1}, {"path": "-", "weight": 1}) == ["source"]


def test_an_option_of_swift_is_given_once() -> None:
    values = {"encode": ["swift"], "model": ["m"], "encode_option": ["a=1", "a=2"]}
    given = Flags([SourceArgument("--source", ["a"])], {"out": ["o"], "samples_per_chunk": ["1"], **values})
    with pytest.raises(SettingsInvalid) as error:
        assemble(given, None)
    assert [problem.option for problem in error.value.problems] == ["--encode-option"]
