"""What a very long stream costs: the part of `scripts/soak --million` that holds on any machine."""

import pytest

from tests.harness.soak.million import Measured, measure, room

MANY = 2_400
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]  # The first test makes the streams


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> tuple[Measured, Measured]:
    made = []
    for chunks in (600, MANY):  # More than `lazyshard inspect` looks at
        with room(tmp_path_factory.mktemp("million"), chunks) as folder:
            made.append(measure(folder, chunks, ranks=[5]))
    return made[0], made[1]


def test_long_stream_is_produced_read_resumed_and_verified(streams: tuple[Measured, Measured]) -> None:
    assert [measured.violations for measured in streams] == [[], []]


@pytest.mark.parametrize("part", ["first", "last", "5"], ids=["first", "last", "resume"])
def test_beginning_opens_no_more_of_a_long_stream(part: str, streams: tuple[Measured, Measured]) -> None:
    few, many = (measured.touched[part] for measured in streams)
    assert many == few
    assert 0 < many["open"] <= 12
    assert many["listings"] == 0


@pytest.mark.parametrize("command", ["status", "sample", "inspect"])
def test_looks_open_no_more_of_a_long_one(command: str, streams: tuple[Measured, Measured]) -> None:
    few, many = (measured.touched[command] for measured in streams)
    assert {name: (few[name], times) for name, times in many.items() if times > few[name]} == {}
    assert many["open"] > 0 and many["listings"] <= 3
