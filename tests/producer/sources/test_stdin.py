"""Standard input and named pipes: what comes, when it comes, once."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.sources.sequential import StandardInput
from lazyshard_producer.sources.source import Line
from tests.harness.processes.environment import environment
from tests.producer.sources.reading import lines, open_kind, position_after, take

TEXT = b"\xef\xbb\xbf\n" + b"\r\n".join(b"%d" % n * (n * 30) for n in range(1, 10)) + b"\n\r\n\nx"
ROWS = [b"%d" % n * (n * 30) + b"\r\n" for n in range(1, 9)] + [b"9" * 270 + b"\n", b"x"]


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def open_pipe(path: Path, position: dict[str, Any] | None = None, **settings: Any) -> "closing[StandardInput]":
    return closing(open_kind(StandardInput, path, position, **settings))


@contextmanager
def writing(path: Path, *parts: bytes) -> Iterator[int]:
    """A writer that has the pipe open, after somebody reads it."""
    fd = os.open(path, os.O_WRONLY)
    try:
        for part in parts:
            os.write(fd, part)
        yield fd
    finally:
        os.close(fd)


def write(path: Path, text: bytes) -> None:
    with writing(path, text):
        pass


def read_now(source: StandardInput) -> list[Line] | None:
    """The rows of one look, None at the end."""
    rows = source.read()
    return None if rows is None else list(rows.lines)


def test_rows_come_as_they_are_written(fifo: Path) -> None:
    with open_pipe(fifo) as source:
        assert source.live
        assert source.waits_for() == f"rows on the pipe {fifo}"
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
        assert source.reached.lines == (7, 4, 1, True)


def test_the_end_is_where_the_last_of_several_writers_leaves(fifo: Path) -> None:
    with open_pipe(fifo) as source:
        with writing(fifo, b"1\n"):
            with writing(fifo, b"2\n"):
                assert read_now(source) == [b"1\n", b"2\n"]
            assert read_now(source) == []
        assert read_now(source) is None


def test_a_writer_that_writes_nothing_is_an_end(fifo: Path) -> None:
    with open_pipe(fifo) as source:
        with writing(fifo):
            assert read_now(source) == []
        assert read_now(source) is None


def test_waiting_ends_when_something_comes(fifo: Path) -> None:
    with open_pipe(fifo) as source:
        started = time.monotonic()
        source.wait(0.05)
        assert time.monotonic() - started >= 0.05
        thread = threading.Thread(target=lambda: fifo.write_bytes(b"1\n"))
        thread.start()
        source.wait(60)  # the test's time limit is 120 s, this would pass only the half of it
        thread.join()
        assert lines(source) == [b"1\n"]
        source.wait(60)


def test_asked_to_end_it_gives_what_has_come(fifo: Path) -> None:
    for last, given in ((b'{"a":1}', [b'{"a":1}']), (b'{"a":', []), (b"", [])):
        with open_pipe(fifo) as source, writing(fifo, b"1\n" + last):
            source.end()
            assert lines(source) == [b"1\n", *given]
            assert source.reached.lines.offset == 2 + len(b"".join(given))


def test_going_on_passes_over_the_same_rows_of_the_same_input(fifo: Path) -> None:
    for count in range(len(ROWS) + 1):
        with open_pipe(fifo) as source:
            write(fifo, TEXT)
            taken = take(source, count)
            position = source.entry(position_after(source, taken))
        with open_pipe(fifo, position) as source:
            assert source.entry(source.start) == position
            write(fifo, TEXT)
            assert lines(source) == ROWS[count:]
            assert (source.reached.lines.line, source.blank) == (13, 3)


def test_the_published_part_is_waited_for(fifo: Path) -> None:
    with open_pipe(fifo) as source:
        with writing(fifo, b"1\n22\n3\n"):
            taken = take(source, 2)
        position = source.entry(position_after(source, taken))
    with open_pipe(fifo, position) as source, writing(fifo, b"1\n2") as writer:
        assert read_now(source) == []
        expected = f"the part of the pipe {fifo} that is published, once more: 3 of 5 bytes have come"
        assert source.waits_for() == expected
        os.write(writer, b"2\n3\n")
        assert read_now(source) == [b"3\n"]
        assert source.progress == (7, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"1\n23\n3\n", "expected XXH3 [0-9a-f]{16} of the first 5 bytes .2 lines., whose rows are published, found"),
        (b"1\n22", "expected at least the 5 bytes that were read, found 4"),
        (b"", "expected at least the 5 bytes that were read, found 0"),
    ],
)
def test_another_input_is_refused_with_what_to_do(text: bytes, message: str, fifo: Path) -> None:
    with open_pipe(fifo) as source:
        with writing(fifo, b"1\n22\n3\n"):
            taken = take(source, 2)
        position = source.entry(position_after(source, taken))
    with open_pipe(fifo, position) as source:
        write(fifo, text)
        with pytest.raises(SourceRefused, match=f"{message}.*; give the same input from its start.*--resume append"):
            lines(source)


def test_appending_takes_all_as_new_and_counts_on(fifo: Path) -> None:
    with open_pipe(fifo) as source:
        write(fifo, b"1\n\n22\n3\n")
        position = source.entry(position_after(source, take(source)))
    for run, text in enumerate((b"\xef\xbb\xbf1\n4\n", b"1\n4\n5\n"), 1):
        with open_pipe(fifo, position, resume="append") as source:
            with writing(fifo, text):
                assert lines(source, 2)[-1] == b"4\n"
            assert source.blank == 1
            assert source.progress == (8 + 7 * (run - 1) + len(text), None)
            position = source.entry(source.reached)
    # The next run may go on within the last input.
    with open_pipe(fifo, position) as source:
        with writing(fifo, b"1\n4\n5\n6\n"):
            assert lines(source, 1) == [b"6\n"]
        assert source.blank == 1


def test_a_position_of_another_kind_is_refused(fifo: Path) -> None:
    with open_pipe(fifo) as source:
        position = source.entry(source.start)
    for wrong in ({"kind": "jsonl"}, {"offset": -1}, {"bytes_before": None}, {"blank_before": True}):
        with pytest.raises(SourceRefused, match="no position to go on from"):
            open_kind(StandardInput, fifo, position | wrong)


def test_something_else_than_a_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1\n")
    with pytest.raises(SourceRefused, match="expected a named pipe, found something else"):
        open_kind(StandardInput, tmp_path / "file")
    with pytest.raises(SourceRefused, match="no such file"):
        open_kind(StandardInput, tmp_path / "none")


READER = """
import sys
from pathlib import Path
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.sources.source import Context
from lazyshard_producer.sources.sequential import StandardInput
source = StandardInput(SourceSettings(path="-"), None, Context(Path("out"), 1 << 20))
while (rows := source.read()) is not None:
    for line in rows.lines:
        print(len(line) if isinstance(line, bytes) else line.reason, flush=True)
    if not rows.lines:
        source.wait(60)
print(source.entry(source.reached))
"""


def start_reader(stdin: Any = subprocess.PIPE) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", READER],
        env=environment(),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_standard_input_of_a_process_through_a_pipe() -> None:
    text = b"1\n" + b"x" * 3_000_000 + b"\n" + b"22\n" * 5000
    with start_reader() as process:
        out, err = process.communicate(text)
    assert err == b""
    *sizes, position = out.splitlines()
    assert sizes == [b"2", b"longer than the 1048576 bytes of --max-row-bytes", *[b"3"] * 5000]
    assert b"'kind': 'stdin', 'path': '-', 'offset': %d, 'line': 5002" % len(text) in position


@pytest.mark.parametrize("text", [b"", b"1\n22\n333"])
def test_standard_input_from_a_file(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text)
    with (tmp_path / "file").open("rb") as file, start_reader(stdin=file) as process:
        out, err = process.communicate()
    assert err == b""
    assert out.splitlines()[:-1] == [b"2", b"3", b"3"] * bool(text)


def test_standard_input_that_is_closed_is_refused() -> None:
    command = f"exec {sys.executable} -c '{READER}' <&-"
    done = subprocess.run(["sh", "-c", command], env=environment(), capture_output=True, check=False)
    assert b"SourceRefused: -: expected a readable file, found bad file descriptor" in done.stderr


def test_a_signal_is_answered_while_nothing_comes() -> None:
    with start_reader() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"1\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"2\n"
        process.send_signal(signal.SIGINT)
        process.wait(30)
    assert process.returncode == -signal.SIGINT


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
    command = [sys.executable, "-m", "lazyshard_producer", "run", "--source", "-", "--out", str(tmp_path / "out")]
    command += ["--samples-per-chunk", "2", "--no-progress"]

    def produce(text: bytes, *options: str) -> int:
        return subprocess.run([*command, *options], input=text, env=environment(), timeout=60).returncode

    assert produce(b'{"id": 1}\n{"id": 2}\n') == 0
    assert produce(text, *options) == code
