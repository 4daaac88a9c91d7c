"""The arithmetic of scripts/bench_encode: when a figure is worse than asked for."""

from __future__ import annotations

from scripts.benchmarks import bench_encode_features as features
from scripts.benchmarks.bench_encode import failures, ratios, spread


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios([1.0, 3.0], [2.0, 4.0]) == [0.5, 0.75]
    assert spread([3.0, 1.0, 2.0]) == "2.0 (1.0-3.0)"


def test_what_is_worse_than_asked_for_is_said() -> None:
    good = {"on the fly": [1.0, 2.0, 1.0], "encoded": [0.05, 0.04, 0.2], "cached": [0.06, 0.04, 0.2]}
    assert failures(good) == []
    assert failures({"on the fly": [1.0, 1.0], "encoded": [0.06, 0.06], "cached": [0.06, 0.06]}) == [
        "a sample of an encoded stream takes 0.060 of the time on the fly, more than 1/20"
    ]
    assert failures({"on the fly": [1.0], "encoded": [0.04], "cached": [0.05]}) == [
        "a sample of the cache takes 1.250 of the time of an encoded stream, more than 1.2"
    ]


def test_features_have_to_be_fast_enough_and_ahead_of_other_loaders() -> None:
    seconds = {"bytes": [8.0, 8.0, 9.0], "lazyshard": [10.0, 9.0, 9.0], "litdata": [12.0, 11.0, 11.0]}
    assert features.speeds(seconds, "lazyshard") == [0.8, 8 / 9, 1.0]
    # Those that are there to show what is possible may be ahead.
    assert features.failures(seconds | {"arrow": [1.0, 1.0, 1.0], "bytes-again": [1.0, 1.0, 1.0]}) == []
    assert features.failures(seconds | {"litdata": [9.0, 9.0, 9.0], "lazyshard": [16.0, 16.0, 16.0]}) == [
        "features come at 0.50 of the speed of their bytes, less than 0.8",
        "features come at 0.50 of the speed of their bytes, litdata at 0.89",
    ]


def test_features_without_environments_of_others_are_read_by_us_and_as_bytes() -> None:
    assert [reader.name for reader in features.present(None)] == ["bytes", "bytes-again", "lazyshard"]
