"""The set of planted bugs is whole: none goes missing, and none is listed twice."""

from tests.harness.planted import planted

COUNTS = {
    "points": 26,
    "writers": 9,
    "races": 5,
    "many writers": 4,
    "power": 24,
    "model": 31,
    "fuzz": 10,
    "runs": 12,
    "soak": 3,
}


def test_every_harness_has_its_planted_bugs() -> None:
    found = planted()
    assert {harness: len(names) for harness, names in found.items()} == COUNTS
    assert {harness: len(set(names)) for harness, names in found.items()} == COUNTS
