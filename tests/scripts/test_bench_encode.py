"""The arithmetic of scripts/bench_encode: when a figure is worse than asked for."""

from __future__ import annotations

from scripts.bench_encode import failures, ratios, spread


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
