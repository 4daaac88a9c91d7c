"""What a very long stream costs: with 6,000 chunks no more files are opened or listed than with 600. Of the stream of
a million chunks that `scripts/soak --million` makes this is the part that holds on any machine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tests.harness.processes.environment import environment
from tests.harness.soak.million import Measured, measure, room

FEW = 600  # More than `lazyshard inspect` looks at
MANY = 6_000
# The first test makes the streams: some 15 s of processor time
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[Path, Measured]]]:
    """The two streams, with what making and reading them came to."""
    made: dict[int, tuple[Path, Measured]] = {}
    place = tmp_path_factory.mktemp("million")
    (place / "few").mkdir()
    (place / "many").mkdir()
    with room(place / "few", FEW) as few, room(place / "many", MANY) as many:
        for chunks, folder in ((FEW, few), (MANY, many)):
            made[chunks] = folder / "stream", measure(folder, chunks, ranks=[5])
        yield made


def touched(stream: Path, *command: str) -> dict[str, int]:
    """What a command of ours opens and lists below a stream's folder."""
    name, *arguments = command
    line = [sys.executable, "-m", "tests.harness.soak.million", str(stream), "lazyshard.cli", name, str(stream)]
    done = subprocess.run([*line, *arguments], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = orjson.loads(done.stdout)
    return found


def test_long_stream_is_produced_read_resumed_and_verified(streams: dict[int, tuple[Path, Measured]]) -> None:
    for _, measured in streams.values():
        assert measured.violations == []


@pytest.mark.parametrize("part", ["first", "last", "5"], ids=["first", "last", "resume"])
def test_beginning_opens_no_more_of_a_long_stream(part: str, streams: dict[int, tuple[Path, Measured]]) -> None:
    few, many = (streams[chunks][1].touched[part] for chunks in (FEW, MANY))
    assert many == few
    assert 0 < many["open"] <= 12
    assert many["listings"] == 0


@pytest.mark.parametrize(
    "command", [("status", "--json"), ("inspect", str(FEW)), ("inspect", "--json")], ids=["status", "sample", "inspect"]
)
def test_looks_open_no_more_of_a_long_one(command: tuple[str, ...], streams: dict[int, tuple[Path, Measured]]) -> None:
    few, many = (touched(streams[chunks][0], *command) for chunks in (FEW, MANY))
    # `status` lists the names, to see whether a chunk was deleted by hand.
    assert {name: (few[name], times) for name, times in many.items() if times > few[name]} == {}
    assert many["listings"] <= 3
