"""A call that changes a file fails once, at any point of a run: not published, told in a line, and made anew."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.producer.commands import assert_one_line, ids, published, rows, run, run_arguments, start, wait_until
from tests.producer.killed_rows import made
from tests.producer.killed_sources import KINDS
from tests.producer.killed_streams import Stream
from tests.producer.nursery import Nursery

MAKES = ("--on-bad-row", "quarantine", "--transform", "tests.producer.killed_rows:thirds")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


@pytest.mark.parametrize("kind", ["plain", "followed"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_any_call_fails(kind: str, error: int, nursery: Nursery, tmp_path: Path) -> None:
    source = KINDS[kind](tmp_path, 0)
    stream = Stream(nursery, tmp_path / "out", [source], MAKES)
    failures = 0
    for number in itertools.count():
        before = stream.chunk_bytes()
        # Every run comes a little further than the one before, and some fail as they begin.
        status, err = stream.run(kill_at=3 + (17 * number) % 83, when="half", error=error)
        stream.check(before)
        if status == 0:
            break
        assert status == 7, err
        assert_one_line(err, errno_text(error), str(stream.out))
        failures += 1
    assert failures >= 4
    expected = made(source.rows, transform=True, where=False)
    assert sorted(map(str, stream.rows())) == sorted(map(str, expected))
    lines = [(entry["source"], entry["line"]) for entry in stream.refused()]
    assert len(set(lines)) == len(lines) > 0
    assert stream.run()[0] == 0
    stream.check_ended()


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
