import math
import pickle
from dataclasses import replace
from typing import Any

import pytest

from lazyshard_producer.configuration.problems import find_problems
from lazyshard_producer.configuration.settings import Amount, Limits, Settings, SourceSettings
from lazyshard_producer.configuration.source_problems import is_live
from lazyshard_producer.errors import Problem, SettingInvalid, SettingsInvalid
from tests.producer.commands import plain_sources

PLAIN = Settings(sources=plain_sources(["a"]), out="out", samples_per_chunk=10)


def problems(**changes: Any) -> list[str]:
    with pytest.raises(SettingsInvalid) as error:
        replace(PLAIN, **changes)
    return [f"{problem.option}: {problem.text}" for problem in error.value.problems]


def of_sources(*sources: SourceSettings) -> list[str]:
    return problems(sources=sources)


def test_plain_sources() -> None:
    assert PLAIN.sources == (SourceSettings(path="a"),)
    assert find_problems(PLAIN) == ()


def test_every_problem_is_found_at_once() -> None:
    found = problems(out="", samples_per_chunk=0, rate=0.0, limits=Limits(max_disk=0))
    assert found == [
        "--out: a path is needed, got an empty one",
        "--samples-per-chunk: a number from 1 to 100000000 is needed, got 0",
        "--rate: a number of samples a second above 0 is needed, got 0; none means no limit",
        "--max-disk: a number of bytes from 1 to 9223372036854775807 is needed, got 0",
    ]


def test_the_error_survives_pickling_with_its_problems() -> None:
    with pytest.raises(SettingsInvalid) as error:
        replace(PLAIN, out="", shuffle=-1)
    again = pickle.loads(pickle.dumps(error.value))
    assert again.problems == error.value.problems
    assert str(again) == str(error.value)
    assert (again.option, len(again.problems)) == ("--out", 2)
    assert isinstance(again, SettingInvalid)
    assert isinstance(again, ValueError)


def test_the_problem_of_a_source_names_it_and_its_number() -> None:
    with pytest.raises(SettingsInvalid) as error:
        replace(PLAIN, sources=(SourceSettings(path="a", weight=1.0), SourceSettings(path="b", weight=0.0)))
    text = "b: a number above 0 is needed, got 0; for no rows of it leave the source out"
    assert error.value.problems == (Problem("--weight", text, 1),)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"sources": ()}, "--source"),
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
        ({"pack": 8, "columns": (("text", "text"),)}, "--columns"),
        ({"pack_buffer": 5}, "--pack-buffer"),
        ({"pack": 8, "pack_buffer_bytes": 0}, "--pack-buffer-bytes"),
        ({"pack_buffer_bytes": 5}, "--pack-buffer-bytes"),
        ({"pack": 8, "encode": "m:f", "length_field": "tokens"}, "--length-field"),
        ({"balance": 2, "encode": "m:f", "length_field": "tokens"}, "--length-field"),
        ({"pack": 8, "encode": "swift", "model": "m", "encode_option": (("mode", "rlhf"),)}, "--encode-option"),
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
        ({"split": 8, "columns": (("text", "text"),)}, "--columns"),
        ({"split": 8, "length_field": "tokens"}, "--length-field"),
        ({"pad": 8, "encode": "swift", "model": "m", "encode_option": (("mode", "rlhf"),)}, "--encode-option"),
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
        ({"columns": (("a", "b"), ("a", "c"))}, "--columns"),
        ({"max_bad_rows": 1}, "--max-bad-rows"),
        ({"max_bad_rows": -1, "on_bad_row": "skip"}, "--max-bad-rows"),
        ({"limits": Limits(max_ahead=Amount(number=-1, unit="chunks"))}, "--max-ahead"),
        ({"limits": Limits(max_ahead=Amount(number=2**63, unit="bytes"))}, "--max-ahead"),
        ({"limits": Limits(min_free_disk=-1)}, "--min-free-disk"),
        ({"limits": Limits(retain=0)}, "--retain"),
        ({"limits": Limits(consumers=("train", "../x"))}, "--consumers"),
        ({"metrics_port": -1}, "--metrics-port"),
        ({"metrics_port": 65536}, "--metrics-port"),
        ({"metrics_host": ""}, "--metrics-host"),
        ({"log_every_s": 0.0}, "--log-every-seconds"),
        ({"log_every_s": math.inf}, "--log-every-seconds"),
    ],
)
def test_what_cannot_be_is_the_only_problem(changes: dict[str, Any], option: str) -> None:
    found = problems(**changes)
    assert len(found) == 1, found
    assert found[0].startswith(f"{option}: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"samples_per_chunk": 10**8},
        {"rate": 1e-9},
        {"seed": 2**63 - 1},
        {"pack": 2**32 - 1, "pack_buffer": 10**9, "length_field": "tokens"},
        {"pack": 8, "columns": (("length", "tokens"), ("text", "text"))},
        {"pack": 8, "columns": (("text", "text"),), "transform": "m:f"},
        {"split": 2**24, "split_bos": 0, "split_eos": 2**31 - 1, "split_overlap": 1, "shuffle": 5},
        {"split": 3, "split_every_bos": 1, "split_every_eos": 2},
        {"split": 8, "columns": (("input_ids", "tokens"),)},
        {"pad": 8, "pad_token": 5, "shuffle": 5, "columns": (("text", "text"),), "encode": "m:f", "workers": 2},
        {"workers": 1024, "transform": "my.rows:Cleaner.clean"},
        {"transform": "modül:función"},
        {"balance": 1, "micro_batch_size": 10, "length_field": "n", "cost_per_token": 0.0},
        {"balance": 64, "cost_per_token_squared": 0.0, "workers": 2, "transform": "m:f"},
        {"pack": 8, "balance": 2, "encode": "m:f", "columns": (("text", "text"),)},
        {"pack": 8, "balance": 2, "length_field": "tokens", "pack_buffer_bytes": 1},
        {"balance": 2, "encode": "swift", "model": "m", "encode_option": (("mode", "rlhf"),)},
        {"columns": (("a", "b"), ("b", "a"))},
        {"on_bad_row": "skip", "max_bad_rows": 0},
        {"on_bad_row": "quarantine"},
        {"limits": Limits(max_ahead=Amount(number=0, unit="chunks"), max_disk=1, min_free_disk=0, retain=1)},
        # Nothing is deleted then, and a reload may change that.
        {"limits": Limits(retain="consumed")},
        {"limits": Limits(consumers=("train",))},
        {"metrics_port": 0},
        {"metrics_port": 65535},
    ],
)
def test_what_can_be(changes: dict[str, Any]) -> None:
    assert find_problems(replace(PLAIN, **changes)) == ()


FOLLOWED = SourceSettings(path="d", follow=True)


@pytest.mark.parametrize(
    ("source", "option"),
    [
        (SourceSettings(path=""), "--source"),
        (SourceSettings(path="", follow=True), "--follow"),
        (SourceSettings(path="a\0"), "--source"),
        (SourceSettings(path="-", follow=True), "--follow"),
        (SourceSettings(path="python:m:f", follow=True), "--follow"),
        (SourceSettings(path="python:"), "--source"),
        (SourceSettings(path="python:m"), "--source"),
        (SourceSettings(path="a", weight=-1.0), "--weight"),
        (SourceSettings(path="a", weight=math.nan), "--weight"),
        (SourceSettings(path="a", weight=math.inf), "--weight"),
        (SourceSettings(path="a", pattern="*.json"), "--pattern"),
        (SourceSettings(path="a", finished_by="idle"), "--finished-by"),
        (SourceSettings(path="a", marker="{name}.ok"), "--marker"),
        (SourceSettings(path="-", idle_s=1.0), "--idle-seconds"),
        (SourceSettings(path="a", end_marker="END"), "--end-marker"),
        (SourceSettings(path="python:m:f", resume="append"), "--resume"),
        (replace(FOLLOWED, resume="append"), "--resume"),
        (replace(FOLLOWED, pattern=""), "--pattern"),
        (replace(FOLLOWED, pattern="a/*.jsonl"), "--pattern"),
        (replace(FOLLOWED, finished_by="marker", marker="done"), "--marker"),
        (replace(FOLLOWED, finished_by="marker", marker="{name}"), "--marker"),
        (replace(FOLLOWED, finished_by="marker", marker="../{name}"), "--marker"),
        (replace(FOLLOWED, marker="{name}.ok"), "--marker"),
        (replace(FOLLOWED, idle_s=5.0), "--idle-seconds"),
        (replace(FOLLOWED, finished_by="idle", idle_s=0.0), "--idle-seconds"),
        (replace(FOLLOWED, finished_by="idle", idle_s=math.inf), "--idle-seconds"),
        (replace(FOLLOWED, end_marker=""), "--end-marker"),
        (replace(FOLLOWED, end_marker=".."), "--end-marker"),
    ],
)
def test_a_source_that_cannot_be(source: SourceSettings, option: str) -> None:
    found = of_sources(source)
    assert len(found) == 1, found
    assert found[0].startswith(f"{option}: ")


@pytest.mark.parametrize(
    "source",
    [
        SourceSettings(path="-", resume="append"),
        # May be a named pipe: that takes a look at it.
        SourceSettings(path="a", resume="append"),
        SourceSettings(path="python:my.rows:generate"),
        SourceSettings(path="python"),
        replace(FOLLOWED, pattern="part-*", finished_by="marker", marker=".{name}.ok", end_marker="END"),
        replace(FOLLOWED, finished_by="idle", idle_s=0.5),
        SourceSettings(path="a", weight=0.1),
    ],
)
def test_a_source_that_can_be(source: SourceSettings) -> None:
    assert find_problems(replace(PLAIN, sources=(source,))) == ()


def test_weights_are_given_to_all_or_none() -> None:
    found = of_sources(SourceSettings(path="a", weight=1.0), SourceSettings(path="b"), SourceSettings(path="c"))
    assert found == [
        f"--weight: {path}: has none and others have; give all sources a --weight (mixed), or none (in order)"
        for path in "bc"
    ]


@pytest.mark.parametrize(
    "live", [SourceSettings(path="-"), SourceSettings(path="python:m:f"), SourceSettings(path="d", follow=True)]
)
def test_a_live_source_comes_last_or_all_are_mixed(live: SourceSettings) -> None:
    plain = SourceSettings(path="a")
    assert is_live(live)
    assert not is_live(plain)
    (found,) = of_sources(live, plain)
    assert found.startswith("--follow: d: may never end" if live.follow else f"--source: {live.path}: may never end")
    assert find_problems(replace(PLAIN, sources=(plain, live))) == ()
    mixed = (replace(live, weight=1.0), replace(plain, weight=2.0))
    assert find_problems(replace(PLAIN, sources=mixed)) == ()


def test_standard_input_is_given_once() -> None:
    found = of_sources(SourceSettings(path="-", weight=1.0), SourceSettings(path="-", weight=1.0))
    assert found == ["--source: standard input can be read once, got it more often; leave all but one - out"]
