"""Sources that are not there, are something else, or have changed between two runs; standard input and named pipes."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.cli import main
from lazyshard_producer.sources.sequential import StandardInput
from lazyshard_producer.sources.source import Line
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line, chunk_files, rows, run_arguments
from tests.producer.sources.reading import lines, open_kind, position_after, refusal, take
from tests.producer.test_faults_rows import TextSource


def test_what_is_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("a.jsonl").write_bytes(rows(0, 3))
    Path("b.jsonl").write_bytes(rows(0, 3))
    for option, path, says in (
        ("--source", "missing", "missing: expected a readable file, found no such file"),
        ("--source", "loop", "symbolic links"),
        ("--source", "folder", "folder: expected a file, found a directory"),
        ("--source", "/dev/null", "/dev/null: expected a plain file"),
        ("--source", "web/*.jsonl", "web/*.jsonl: expected files that match"),
        ("--follow", "nowhere", "nowhere: expected a readable directory"),
        ("--follow", "b.jsonl", "b.jsonl: expected a directory"),
    ):
        assert main(run_arguments(Path("out"), [Path("a.jsonl")], 2, option, path)) == 4
        assert_one_line(capsys.readouterr().err, says)
    assert not Path("out").exists()


def main_as_nobody(arguments: list[str]) -> int:
    # What a refusal imports may lie where only root can look.
    main(["run", "--source", "/dev/null", "--out", "nowhere", "--samples-per-chunk", "1"])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    return main(arguments)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run the command as somebody else")
def test_an_unreadable_file_is_refused_with_path_and_uid(nursery: Commands) -> None:
    source = Path("/dev/shm") / f"lazyshard-unreadable-{os.getpid()}.jsonl"
    source.write_bytes(rows(0, 3))
    source.chmod(0)
    try:
        ended = nursery.call(main_as_nobody, run_arguments(Path("/dev/shm/nowhere"), [source]))
    finally:
        source.unlink()
    assert ended.status == 4, ended.said
    assert f"error: {source}: " in ended.said and "uid 65534" in ended.said


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "incoming"
    path.mkdir()
    (path / "a.jsonl").write_bytes(rows(0, 10))
    (path / "a.csv").write_bytes(rows(10, 20))
    (path / "_END").touch()
    return path


def test_sources_that_are_one_or_are_in_the_stream(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_bytes(rows(0, 10))
    tables, table = tmp_path / "tables", tmp_path / "tables" / "a.parquet"
    tables.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([{"id": 0}]), table)
    (tmp_path / "twice").hardlink_to(directory / "a.csv")
    (tmp_path / "link").symlink_to(directory)
    mixed = ("--follow", directory, "--weight", 1, "--source", f"{tmp_path}/link/a.jsonl", "--weight", 1)
    once, outside = "every source once", "outside the stream's directory"
    for out, sources, says in (
        ("out", ("--source", tables, table), f"{table}: expected {once}"),
        ("out", ("--source", directory / "a.csv", tmp_path / "twice"), f"{tmp_path}/twice: expected {once}"),
        ("out", mixed, f"link/a.jsonl: expected {once}"),
        ("out", ("--source", "a", "a"), f"a: expected {once}, found the same file as a"),
        ("incoming", ("--follow", directory), outside),
        ("incoming", ("--source", directory / "a.csv"), outside),
    ):
        assert main(run_arguments(tmp_path / out, [], 5, *sources)) == 4
        assert_one_line(capsys.readouterr().err, says)
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in directory.iterdir()) == ["_END", "a.csv", "a.jsonl"]


class Halfway:
    """A stream of 10 rows a chunk with 2 chunks, stopped by a bad line 4 rows later; it is mended."""

    def __init__(self, folder: Path) -> None:
        self.a, self.b, self.out = folder / "a", folder / "b", folder / "out"
        self.a.write_bytes(rows(0, 15))
        self.b.write_bytes(rows(15, 24) + b"bad\n" + rows(24, 40))
        assert main(run_arguments(self.out, [self.a, self.b])) == 3
        self.before = chunk_files(self.out)
        assert len(self.before) == 2
        self.b.write_bytes(rows(15, 40))

    def run(self, *sources: Path) -> int:
        return main(run_arguments(self.out, sources or (self.a, self.b)))


@pytest.fixture
def halfway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Halfway:
    stream = Halfway(tmp_path)
    capsys.readouterr()
    return stream


@pytest.mark.parametrize(
    ("changed", "data", "order", "says"),
    [
        ("a", b" " + rows(0, 15)[1:], "ab", "{a}: not the file"),  # the first byte
        ("b", rows(15, 20)[:-1] + b" " + rows(20, 40), "ab", "{b}: not the file"),  # the last committed byte
        ("b", rows(115, 140), "ab", "{b}: not the file"),
        ("a", rows(0, 14), "ab", f"{{a}}: expected at least the {len(rows(0, 15))} bytes"),
        ("a", None, "ab", "{a}: expected a readable file"),
        ("c", rows(0, 1), "ba", "source 1 was {a}, now it is {b}"),
        ("c", rows(0, 1), "cab", "source 1 was {a}, now it is {c}"),
    ],
)
def test_changed_sources_are_refused(
    changed: str, data: bytes | None, order: str, says: str, halfway: Halfway, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {name: halfway.a.with_name(name) for name in "abc"}
    if data is None:
        paths[changed].unlink()
    else:
        paths[changed].write_bytes(data)
    assert halfway.run(*(paths[name] for name in order)) == 4
    assert_one_line(capsys.readouterr().err, says.format(**paths))
    assert chunk_files(halfway.out) == halfway.before
    assert not (halfway.out / "stream.end").exists()


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
