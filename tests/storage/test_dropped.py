"""A writer that is dropped without being closed."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from lazyshard import ChunkWriter
from tests.storage.streams import forked, produce, python

WRITE = (
    "import sys\n"
    "from lazyshard import ChunkWriter\n"
    "writer = ChunkWriter(sys.argv[1], 2)\n"
    "for number in range(3): writer.write({'id': number})\n"
)


def test_writer_dropped_with_rows_says_how_many_are_not_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = ChunkWriter(tmp_path, 5)
    for number in range(3):
        writer.write({"id": number})
    del writer
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: a ChunkWriter was dropped without close(): 3 rows of its open chunk are not published; use it in "
        f"a with statement, or call close()"
    ]
    produce(tmp_path, 1, 5)  # the lock is free


@pytest.mark.parametrize("samples", [0, 2])
def test_writer_dropped_without_rows_says_nothing(
    samples: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = ChunkWriter(tmp_path, 2)
    for number in range(samples):
        writer.write({"id": number})
    del writer
    gc.collect()
    assert caplog.records == []


@pytest.mark.parametrize("end", [True, False])
def test_closed_writer_says_nothing(end: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = ChunkWriter(tmp_path, 5)
    writer.write({"id": 0})
    writer.close(end)
    del writer
    gc.collect()
    assert caplog.records == []


def test_program_that_ends_without_closing_says_what_is_not_published(tmp_path: Path) -> None:
    done = python(WRITE, tmp_path)
    assert done.returncode == 0
    assert "1 rows of its open chunk are not published" in done.stderr


def test_fork_that_ends_says_nothing_of_its_parents_rows(tmp_path: Path) -> None:
    done = python(WRITE + "import os\nif os.fork() == 0: sys.exit()\nos.wait()\nwriter.close()\n", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_fork_that_drops_its_copy_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writers = [ChunkWriter(tmp_path, 5)]
    writers[0].write({"id": 0})

    def child() -> None:
        writers.clear()
        gc.collect()

    assert forked(child) == 0
    assert "not published" not in capfd.readouterr().err
    writers[0].close()
