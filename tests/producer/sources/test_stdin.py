"""Standard input and named pipes: what comes, when it comes, once."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.cli import main
from lazyshard_producer.sources.sequential import StandardInput
from lazyshard_producer.sources.source import Line
from tests.harness.processes.producing import run_arguments
from tests.producer.fault_sources import TextSource
from tests.producer.sources.reading import lines, open_kind, position_after, refusal, take


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def open_pipe(path: Path, position: dict[str, Any] | None = None, **settings: Any) -> "closing[StandardInput]":
    return closing(open_kind(StandardInput, path, position, **settings))


@contextmanager
def writing(path: Path, text: bytes = b"") -> Iterator[int]:
    """A writer that has the pipe open, after somebody reads it."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text)
        yield fd
    finally:
        os.close(fd)


def read_now(source: StandardInput) -> list[Line] | None:
    """The rows of one look, None at the end."""
    rows = source.read()
    return None if rows is None else list(rows.lines)


def position_of(path: Path, text: bytes, count: int) -> dict[str, Any]:
    """The position after so many rows of this input."""
    with open_pipe(path) as source:
        with writing(path, text):
            taken = take(source, count)
        return source.entry(position_after(source, taken))


def test_rows_come_as_they_are_written(fifo: Path) -> None:
    with open_pipe(fifo) as source:
        assert source.live
        assert str(fifo) in source.waits_for()
        assert read_now(source) == []  # nobody has opened it yet
        assert read_now(source) == []
        with writing(fifo, b"1\n2") as writer:
            assert read_now(source) == [b"1\n"]
            assert read_now(source) == []
            os.write(writer, b"2\n\n3")
            assert read_now(source) == [b"22\n"]
        assert read_now(source) == [b"3"]
        assert read_now(source) is None
        assert read_now(source) is None
        assert (source.blank, source.progress) == (1, (7, None))
        assert source.reached.at[:4] == (7, 4, 1, True)


def test_asked_to_end_it_gives_what_has_come(fifo: Path) -> None:
    for last, given in ((b'{"a":1}', [b'{"a":1}']), (b'{"a":', []), (b"", [])):
        with open_pipe(fifo) as source, writing(fifo, b"1\n" + last):
            source.end()
            assert lines(source) == [b"1\n", *given]
            assert source.reached.at.offset == 2 + len(b"".join(given))


def test_appending_takes_all_as_new_and_counts_on(fifo: Path) -> None:
    position = position_of(fifo, b"1\n\n22\n3\n", 3)
    for run, text in enumerate((b"\xef\xbb\xbf1\n4\n", b"1\n4\n5\n"), 1):
        with open_pipe(fifo, position, resume="append") as source:
            with writing(fifo, text):
                assert lines(source, 2)[-1] == b"4\n"
            assert source.blank == 1
            assert source.progress == (8 + 7 * (run - 1) + len(text), None)
            position = source.entry(source.reached)
    # The next run may continue within the last input.
    with open_pipe(fifo, position) as source:
        with writing(fifo, b"1\n4\n5\n6\n"):
            assert lines(source, 1) == [b"6\n"]
        assert source.blank == 1


def test_standard_input_that_is_closed_is_refused() -> None:
    kept = os.dup(0)
    os.close(0)
    try:
        error = refusal(open_kind(StandardInput, "-").read)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert error.file == "-"


@pytest.mark.parametrize(
    ("text", "options", "code"),
    [
        (b'{"id": 1}\n{"id": 2}\n', (), 0),
        (b'{"id": 1}\n{"id": 2}\n\n', (), 0),
        (b'{"id": 1}\n{"id": 2}\n{"id": 3}\n', (), 5),
        (b'{"id": 3}\n', ("--resume", "append"), 5),
        (b"", ("--resume", "append"), 0),
        (b'{"id": 9}\n', (), 4),
    ],
)
def test_input_of_a_stream_that_has_ended(text: bytes, options: tuple[str, ...], code: int, tmp_path: Path) -> None:
    source = TextSource("standard input", tmp_path)

    def produce(text: bytes, *options: str) -> int:
        source.write(text)
        with source.given():
            return main(run_arguments(tmp_path / "out", [], 2, *source.arguments, *options))

    assert produce(b'{"id": 1}\n{"id": 2}\n') == 0
    assert produce(text, *options) == code
