"""The set of planted bugs is whole: none goes missing, and none is listed twice."""

import pytest

from tests.harness.planted import planted

COUNTS = {"points": 26, "writers": 9, "races": 5, "power": 24, "model": 31, "fuzz": 10, "runs": 12, "soak": 3}


@pytest.mark.parametrize("harness", COUNTS)
def test_every_harness_has_its_planted_bugs(harness: str) -> None:
    names = planted()[harness]
    assert len(names) == len(set(names)) == COUNTS[harness]


def test_no_harness_is_left_out() -> None:
    assert planted().keys() == COUNTS.keys()
