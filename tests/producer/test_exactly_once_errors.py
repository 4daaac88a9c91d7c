"""A call that changes a file fails once, at any point of a run: not published, told in a line, and made anew."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.processes.commands import Commands
from tests.harness.scenes.rows import made
from tests.harness.scenes.sources import KINDS
from tests.harness.scenes.streams import Stream
from tests.producer.commands import assert_one_line, ids, published, rows, run, run_arguments, start, wait_until

MAKES = ("--on-bad-row", "quarantine", "--transform", "tests.harness.scenes.rows:thirds")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


@pytest.mark.parametrize("kind", ["plain", "followed"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_any_call_fails(kind: str, error: int, nursery: Commands, tmp_path: Path) -> None:
    failures = 0
    for number in range(3, 250, 23):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = KINDS[kind](folder, 0)
        stream = Stream(nursery, folder / "out", [source], MAKES)
        status, err = stream.run(kill_at=number, when="half", error=error)
        stream.check({})
        if status != 0:
            assert status == 7, err
            assert_one_line(err, errno_text(error), str(stream.out))
            failures += 1
            status, err = stream.run()
            # Else it was a hint to readers that was not written, and is written with the next chunk.
        assert status == 0, err
        expected = made(source.rows, transform=True, where=False)
        assert sorted(map(str, stream.rows())) == sorted(map(str, expected))
        lines = [(entry["source"], entry["line"]) for entry in stream.refused()]
        assert len(set(lines)) == len(lines) > 0
        assert stream.run()[0] == 0
        stream.check_ended()
    assert failures >= 4


def errno_text(error: int) -> str:
    return {errno.EIO: "Input/output error", errno.ENOSPC: "No space left on device"}[error]


def test_the_stream_is_removed_while_it_is_written(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 200))
    with start(*run_arguments(out, [source], 10, "--rate", 100)) as process:
        wait_until(lambda: published(out) >= 1, process)
        out.rename(tmp_path / "away")
        shutil.rmtree(tmp_path / "away")
        _, err = process.communicate(timeout=60)
    assert process.returncode in (6, 7)
    assert_one_line(err, str(out))
    assert not out.exists()
    assert run(*run_arguments(out, [source], 10)).returncode == 0
    assert ids(out) == list(range(200))
