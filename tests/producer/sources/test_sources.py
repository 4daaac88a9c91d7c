"""Sources that are not there, are something else or have changed; standard input, named pipes, Python functions."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import RowInvalid
from lazyshard.format.batch import EncodedRow
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SOURCE_REFUSED, SettingInvalid, SourceRefused, exit_code
from lazyshard_producer.sources.generator import GeneratorSource
from lazyshard_producer.sources.sequential import StandardInput
from lazyshard_producer.sources.source import Context, Line, Rows
from tests.cli.commands import as_other_user
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import chunk_files, head, rows, run_arguments
from tests.producer.commands import Fails, Running
from tests.producer.sources.reading import lines, open_kind, position_after, refusal, take
from tests.producer.test_faults_rows import TextSource
from tests.stream.streams import needs_root, raised, refusal_of


def test_what_is_no_source(here: Path, fails: Fails) -> None:
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
        ("--follow", "nowhere", "nowhere: expected an existing, readable directory"),
        ("--follow", "b.jsonl", "b.jsonl: expected a directory"),
    ):
        fails(run_arguments(Path("out"), [Path("a.jsonl")], 2, option, path), 4, says)
    assert not Path("out").exists()


@needs_root
def test_unreadable_file_is_named_with_the_uid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails) -> None:
    (tmp_path / "a.jsonl").write_bytes(rows(0, 3))
    (tmp_path / "a.jsonl").chmod(0)
    # What a refusal imports may lie where only root can look.
    fails(run_arguments(tmp_path / "out", [Path("/dev/null")]), 4)
    arguments = run_arguments(Path("nowhere"), [Path("a.jsonl")])
    as_other_user(tmp_path, monkeypatch, lambda: fails(arguments, 4, "error: a.jsonl: ", "uid 65534"))


def test_sources_that_are_one_or_are_in_the_stream(here: Path, fails: Fails) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    directory = here / "incoming"
    directory.mkdir()
    for name, text in (("a.jsonl", rows(0, 10)), ("a.csv", rows(10, 20)), ("_END", b"")):
        (directory / name).write_bytes(text)
    (here / "a").write_bytes(rows(0, 10))
    (here / "table.csv").write_bytes(b"id,text\n1,a\n")
    tables, table = here / "tables", here / "tables" / "a.parquet"
    tables.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([{"id": 0}]), table)
    (here / "twice").hardlink_to(directory / "a.csv")
    (here / "link").symlink_to(directory)
    mixed = ("--follow", directory, "--weight", 1, "--source", f"{here}/link/a.jsonl", "--weight", 1)
    once, outside = "every source once", "outside the stream's directory"
    for out, sources, says in (
        ("out", ("--source", tables, table), f"{table}: expected {once}"),
        ("out", ("--source", directory / "a.csv", here / "twice"), f"{here}/twice: expected {once}"),
        ("out", mixed, f"link/a.jsonl: expected {once}"),
        ("out", ("--source", "a", "a"), f"a: expected {once}, found the same file as a"),
        ("incoming", ("--follow", directory), outside),
        ("incoming", ("--source", directory / "a.csv"), outside),
        ("out", ("--source", "a", "table.csv", "--on-bad-row", "skip"), "table.csv: expected JSON Lines"),
    ):
        fails(run_arguments(here / out, [], 5, *sources), 4, says)
    assert not (here / "out").exists()
    assert sorted(path.name for path in directory.iterdir()) == ["_END", "a.csv", "a.jsonl"]


@pytest.mark.parametrize(
    ("changed", "data", "order", "says"),
    [
        ("b", rows(15, 20)[:-1] + b" " + rows(20, 40), "ab", "{b}: not the file"),  # the last committed byte
        ("a", rows(0, 14), "ab", f"{{a}}: expected at least the {len(rows(0, 15))} bytes"),
        ("a", None, "ab", "{a}: expected a readable file"),
        ("c", rows(0, 1), "ba", "source 1 was {a}, now it is {b}"),
        ("c", rows(0, 1), "cab", "source 1 was {a}, now it is {c}"),
        ("c", rows(0, 1), "ac", "source 2 was {b}, now it is {c}"),
        ("c", rows(0, 1), "a", "source 2 was {b}, now it is missing"),
    ],
)
def test_changed_sources_are_refused(
    changed: str, data: bytes | None, order: str, says: str, out: Path, tmp_path: Path, fails: Fails
) -> None:
    """Of a stream of two chunks, which a bad line has stopped four rows later."""
    paths = {name: tmp_path / name for name in "abc"}
    paths["a"].write_bytes(rows(0, 15))
    paths["b"].write_bytes(rows(15, 24) + b"bad\n" + rows(24, 40))
    assert main(run_arguments(out, [paths["a"], paths["b"]])) == 3
    before = chunk_files(out)
    assert len(before) == 2
    paths["b"].write_bytes(rows(15, 40))
    if data is None:
        paths[changed].unlink()
    else:
        paths[changed].write_bytes(data)
    fails(run_arguments(out, [paths[name] for name in order]), 4, says.format(**paths))
    assert chunk_files(out) == before
    assert not (out / "stream.end").exists()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def open_pipe(path: Path, position: dict[str, Any] | None = None, **settings: Any) -> "closing[StandardInput]":
    return closing(open_kind(StandardInput, path, position, **settings))


def read_now(source: StandardInput) -> list[Line] | None:
    rows = source.read()
    return None if rows is None else list(rows.lines)


def test_rows_come_as_they_are_written(fifo: Path) -> None:
    with open_pipe(fifo) as source:
        assert source.live
        assert str(fifo) in source.waits_for()
        assert read_now(source) == []  # nobody has opened it yet
        assert read_now(source) == []
        with fifo.open("wb", buffering=0) as writer:
            writer.write(b"1\n2")
            assert read_now(source) == [b"1\n"]
            assert read_now(source) == []
            writer.write(b"2\n\n3")
            assert read_now(source) == [b"22\n"]
        assert read_now(source) == [b"3"]
        assert read_now(source) is None
        assert read_now(source) is None
        assert (source.blank, source.progress) == (1, (7, None))
        assert source.reached.at[:4] == (7, 4, 1, True)


def test_asked_to_end_it_gives_what_has_come(fifo: Path) -> None:
    for last, given in ((b'{"a":1}', [b'{"a":1}']), (b'{"a":', []), (b"", [])):
        with open_pipe(fifo) as source, fifo.open("wb", buffering=0) as writer:
            writer.write(b"1\n" + last)
            source.end()
            assert lines(source) == [b"1\n", *given]
            assert source.reached.at.offset == 2 + len(b"".join(given))


def test_appending_takes_all_as_new_and_counts_on(fifo: Path) -> None:
    with open_pipe(fifo) as source:
        fifo.write_bytes(b"1\n\n22\n3\n")
        position = source.entry(position_after(source, take(source, 3)))
    for run, text in enumerate((b"\xef\xbb\xbf1\n4\n", b"1\n4\n5\n"), 1):
        with open_pipe(fifo, position, resume="append") as source:
            fifo.write_bytes(text)
            assert lines(source, 2)[-1] == b"4\n"
            assert source.blank == 1
            assert source.progress == (8 + 7 * (run - 1) + len(text), None)
            position = source.entry(source.reached)
    # The next run may continue within the last input.
    with open_pipe(fifo, position) as source:
        fifo.write_bytes(b"1\n4\n5\n6\n")
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


COUNT_TO_FIVE = """
def rows(position):
    for number in range(position or 0, 5):
        yield {"id": number}, number + 1
"""
Open = Callable[..., GeneratorSource]


@pytest.fixture
def open_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the function `rows` of some source text, as the module `users` in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    opened: list[GeneratorSource] = []

    def open_it(
        text: str, position: dict[str, Any] | None = None, name: str = "users:rows", arrays: bool = False
    ) -> Any:
        (tmp_path / "users.py").write_text(text)
        monkeypatch.delitem(sys.modules, "users", raising=False)
        context = Context(tmp_path / "stream", 100, arrays=arrays)
        opened.append(GeneratorSource(SourceSettings(path=f"python:{name}"), position, context))
        return opened[-1]

    yield open_it
    for source in opened:
        source.close()
        source.close()
    sys.modules.pop("users", None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("python:")]


def read_all(source: GeneratorSource) -> list[tuple[Line, dict[str, Any]]]:
    rows: list[tuple[Line, dict[str, Any]]] = []
    while (piece := source.read()) is not None:
        rows += [(line, source.entry(piece.position(index))) for index, line in enumerate(piece.lines)]
        if not piece.lines:
            source.wait(60)
    return rows


def read_first(source: GeneratorSource, *lines: bytes) -> Rows:
    source.wait(60)
    piece = source.read()
    assert piece is not None and list(piece.lines) == list(lines)
    return piece


def test_rows_positions_and_places(open_generator: Open) -> None:
    source = open_generator(COUNT_TO_FIVE)
    assert (source.name, source.live, source.blank) == ("python:users:rows", True, 0)
    start = source.entry(source.start)
    assert start == {"kind": "python", "path": "python:users:rows", "rows": 0, "bytes": 0, "position": None}
    source.wait(60)
    piece = source.read()
    assert piece is not None
    assert piece.place(0) == ("python:users:rows", 1, None)
    assert source.entry(piece.position(0)) == start | {"rows": 1, "bytes": 9, "position": 1}
    rest = read_all(source)
    assert [*piece.lines, *(line for line, _ in rest)] == [b'{"id":%d}\n' % number for number in range(5)]
    assert source.progress == (45, None)
    assert source.read() is None


def test_going_on_after_any_row_gives_the_rest(open_generator: Open) -> None:
    rows = read_all(open_generator(COUNT_TO_FIVE))
    for taken, (_, position) in enumerate(rows, 1):
        assert read_all(open_generator(COUNT_TO_FIVE, position)) == rows[taken:]


@pytest.mark.parametrize(
    ("body", "lines", "positions"),
    [
        ("yield b'{ }', [None]\n yield b'no row\\r\\n', {'a': 1}", [b"{ }", b"no row\r\n"], [[None], {"a": 1}]),
        # A position is what it was when its row was given.
        ("at = {'n': 0}\n for at['n'] in range(2):\n  yield {}, at", [b"{}\n", b"{}\n"], [{"n": 0}, {"n": 1}]),
        ("yield {'a': 'x' * 92}, (1,)", [b'{"a":"%s"}\n' % (b"x" * 92)], [[1]]),  # the longest row
    ],
)
def test_what_the_function_gives(body: str, lines: list[bytes], positions: list[Any], open_generator: Open) -> None:
    rows = read_all(open_generator(f"def rows(position):\n {body}\n"))
    assert [line for line, _ in rows] == lines
    assert [position["position"] for _, position in rows] == positions


def test_rows_hold_bytes_where_the_stream_holds_arrays(open_generator: Open) -> None:
    text = "def rows(position):\n yield {'a': b'xyz'}, 1\n yield {'a': 'x' * 92}, 2\n yield {'a': b'x' * 80}, 3\n"
    (row, _), (longest, _), (long, _) = read_all(open_generator(text, arrays=True))
    assert row == EncodedRow(b'{"a":{"$bytes":[3,0,null]}}\n', b"xyz" + bytes(5))
    assert longest == EncodedRow(b'{"a":"%s"}\n' % (b"x" * 92), b"")
    assert isinstance(long, RowInvalid)
    assert [isinstance(line, RowInvalid) for line, _ in read_all(open_generator(text))] == [True, False, True]


def test_rows_that_are_none_do_not_end_it(open_generator: Open) -> None:
    text = "def rows(position):\n yield {'a': float('nan')}, 1\n yield {'a': 'x' * 93}, 2\n yield {'a': 1}, 3\n"
    (nan, first), (long, _), (good, last) = read_all(open_generator(text))
    assert isinstance(nan, RowInvalid) and isinstance(long, RowInvalid)
    assert "NaN" in str(nan) and "100 bytes" in str(long)
    assert (good, first["rows"], last["rows"]) == (b'{"a":1}\n', 1, 3)


def test_no_such_function(open_generator: Open) -> None:
    for text, name in (("", "rows"), ("class A:\n pass", "A.rows")):
        says = f"--source python:users:{name}: .*users has no {name}"
        refusal_of(SettingInvalid, says, open_generator, text, name=f"users:{name}")


@pytest.mark.parametrize(
    "body",
    [
        "return [({}, 1)]",
        "yield {'a': 1}",
        "yield None",
        "yield '{}', 1",
        "yield {}, float('nan')",
        "yield {}, b'x' * 999",
        # What cannot be shown: an integer of more than 4,300 digits, what has no end.
        "yield {}, 10**5000",
        "raise KeyError(10**5000)\n yield",
        "raise SystemExit(3)\n yield",
        "row = []\n for _ in range(10**5): row = [row]\n yield row, 1",
    ],
)
def test_what_the_protocol_has_no_place_for(open_generator: Open, body: str) -> None:
    error = raised(SourceRefused, read_all, open_generator(f"def rows(position):\n {body}"))
    assert error.file == "python:users:rows"
    assert len(str(error)) < 500


def test_an_exception_comes_after_the_rows_before_it_with_its_lines(open_generator: Open) -> None:
    text = "def rows(position):\n yield {}, 1\n fetch()\n\ndef fetch():\n raise OSError('no answer')\n"
    source = open_generator(text)
    read_first(source, b"{}\n")
    error = raised(SourceRefused, read_all, source)
    assert "OSError: no answer" in str(error)
    assert " at users.py:6 (fetch), called from users.py:3 (rows); " in str(error)
    assert isinstance(error.__cause__, OSError)
    assert exit_code(error) == SOURCE_REFUSED


BLOCKS = """
import threading
go_on = threading.Event()
closed = threading.Event()

def rows(position):
    try:
        yield {"id": 0}, 1
        go_on.wait()
        yield {"id": 1}, 2
    finally:
        closed.set()
"""


def test_while_the_function_blocks_there_is_nothing(open_generator: Open) -> None:
    source = open_generator(BLOCKS)
    read_first(source, b'{"id":0}\n')
    nothing = source.read()
    assert nothing is not None and not nothing.lines
    source.wait(0.01)
    assert "python:users:rows, requested " in source.waits_for()
    sys.modules["users"].go_on.set()
    assert [line for line, _ in read_all(source)] == [b'{"id":1}\n']


def test_the_end_that_was_asked_for_closes_the_generator(open_generator: Open) -> None:
    source = open_generator(BLOCKS)
    source.wait(60)
    source.end()
    read_first(source, b'{"id":0}\n')
    assert source.read() is None
    sys.modules["users"].go_on.set()
    source.close()
    assert sys.modules["users"].closed.is_set()
    # One that is never read calls nothing.
    source = open_generator("def rows(position):\n raise ValueError\n")
    source.end()
    assert source.read() is None


def paid_for(position: Any) -> Iterator[tuple[dict[str, int], int]]:
    """Rows that are noted in the current directory."""
    with open("asked.txt", "w", buffering=1) as asked:
        for number in range(10_000):
            asked.write("row\n")
            yield {"id": number}, number + 1


def test_run_held_back_has_asked_for_two_unpublished_chunks_at_most(nursery: Commands, tmp_path: Path) -> None:
    # A row that somebody has paid for, as those of a teacher model, is not to be made long before it may be published.
    out = tmp_path / "stream"
    with Running(nursery, *run_arguments(out, [Path(f"python:{__name__}:paid_for")], 3, "--max-ahead", 4)) as run:
        run.wait_until(lambda: head(out).get("state") == "waiting")
        assert run.end(signal.SIGTERM)[0] == 0
    assert len(list(out.glob("chunk_*.jsonl"))) == 4
    asked = len((nursery.folder / "asked.txt").read_text().splitlines())
    assert 12 <= asked <= 12 + 2 * 3, f"{asked} rows were asked for, of which 12 are published"


def test_a_position_that_is_none_of_this_source(open_generator: Open) -> None:
    position = {"kind": "python", "path": "python:users:rows", "rows": 1, "bytes": 9, "position": 1}
    wrong = ({"kind": "jsonl"}, {"path": "python:other:rows"}, {"rows": -1}, {"bytes": None}, {"rows": True})
    without = {name: value for name, value in position.items() if name != "position"}
    for entry in (without, *(position | change for change in wrong)):
        assert "no position to continue from" in str(refusal(open_generator, COUNT_TO_FIVE, entry))
