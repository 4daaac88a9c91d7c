"""What many tests of the producer need."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lazyshard_producer.cli import main
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line
from tests.producer.commands import Fails


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Starts commands that are killed, quickly: forks of a process that has all modules loaded."""
    with Commands(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "a.jsonl"


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Runs the command, which ends with this code and one line of error that has these parts; returns what it says."""

    def check(arguments: Sequence[str], code: int, *parts: str) -> str:
        capsys.readouterr()
        assert main(arguments) == code
        captured = capsys.readouterr()
        assert_one_line(captured.err, *parts)
        assert captured.out == ""
        return captured.err

    return check
