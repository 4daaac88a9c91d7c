import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import RowInvalid
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SOURCE_REFUSED, SettingInvalid, SourceRefused, exit_code
from lazyshard_producer.sources import generator
from lazyshard_producer.sources.generator import GeneratorFailed, GeneratorSource
from lazyshard_producer.sources.source import Context, Line
from tests.harness.processes.producing import start, wait_until

COUNT_TO_FIVE = """
def rows(position):
    for number in range(position or 0, 5):
        yield {"id": number}, number + 1
"""

Open = Callable[..., GeneratorSource]


@pytest.fixture
def open_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens the function `rows` of some source text, as the module `users` in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    opened: list[GeneratorSource] = []

    def open_it(text: str, position: dict[str, Any] | None = None, limit: int = 100, name: str = "rows") -> Any:
        (tmp_path / "users.py").write_text(text)
        monkeypatch.delitem(sys.modules, "users", raising=False)
        context = Context(tmp_path / "stream", limit)
        opened.append(GeneratorSource(SourceSettings(path=f"python:users:{name}"), position, context))
        return opened[-1]

    yield open_it
    for source in opened:
        source.close()
        source.close()
    sys.modules.pop("users", None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("python:")]


def read_all(source: GeneratorSource) -> list[tuple[Line, dict[str, Any]]]:
    """All rows, each with the position after it."""
    rows: list[tuple[Line, dict[str, Any]]] = []
    while (piece := source.read()) is not None:
        rows += [(line, source.entry(piece.position(index))) for index, line in enumerate(piece.lines)]
        if not piece.lines:
            source.wait(60)
    return rows


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


def test_bytes_are_taken_as_they_are(open_generator: Open) -> None:
    rows = read_all(open_generator("def rows(position):\n yield b'{ }', [None]\n yield b'no row\\r\\n', {'a': 1}\n"))
    assert [(line, position["position"]) for line, position in rows] == [(b"{ }", [None]), (b"no row\r\n", {"a": 1})]


def test_a_position_is_what_it_was_when_its_row_was_given(open_generator: Open) -> None:
    text = "def rows(position):\n at = {'n': 0}\n for at['n'] in range(3):\n  yield {}, at\n"
    rows = read_all(open_generator(text))
    assert [position["position"] for _, position in rows] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_rows_that_are_none_do_not_end_it(open_generator: Open) -> None:
    text = "def rows(position):\n yield {'a': float('nan')}, 1\n yield {'a': 'x' * 93}, 2\n yield {'a': 1}, 3\n"
    (nan, first), (long, _), (good, last) = read_all(open_generator(text))
    assert isinstance(nan, RowInvalid) and isinstance(long, RowInvalid)
    assert (nan.reason, long.reason) == (
        "NaN and infinities are not JSON; write null or a string",
        "longer than the 100 bytes of --max-row-bytes",
    )
    assert (good, first["rows"], last["rows"]) == (b'{"a":1}\n', 1, 3)


def test_the_longest_row(open_generator: Open) -> None:
    ((line, _),) = read_all(open_generator("def rows(position):\n yield {'a': 'x' * 92}, 0\n"))
    assert isinstance(line, bytes) and len(line) == 101


@pytest.mark.parametrize(
    ("text", "name", "match"),
    [
        ("", "rows", "users has no rows"),
        ("rows = 3", "rows", "is no function but a int"),
        ("import nowhere_to_be_found", "rows", "importing users raised ModuleNotFoundError: No module named 'nowhere"),
        ("1 / 0", "rows", "importing users raised ZeroDivisionError"),
        ("class A:\n pass", "A.rows", "users has no A.rows"),
    ],
)
def test_no_such_function(open_generator: Open, text: str, name: str, match: str) -> None:
    with pytest.raises(SettingInvalid, match=f"--source python:users:{name}: .*{match}"):
        open_generator(text, name=name)


def test_no_such_module(tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid, match=r"importing nowhere_at_all raised ModuleNotFoundError.*PYTHONPATH"):
        GeneratorSource(SourceSettings(path="python:nowhere_at_all:rows"), None, Context(tmp_path, 100))


@pytest.mark.parametrize(
    "body",
    [
        "return [({}, 1)]",
        "pass",
        "yield {'a': 1}",
        "yield None",
        "yield {}, 1, 2",
        "yield '{}', 1",
        "yield {}, {1}",
        "yield {}, float('nan')",
        "yield {}, b'x' * 999",
        # What cannot be shown: an integer of more than 4,300 digits, what has no end.
        "yield 10**5000, 1",
        "yield {}, 10**5000",
        "raise KeyError(10**5000)\n yield",
        "row = []\n for _ in range(10**5): row = [row]\n yield row, 1",
    ],
)
def test_what_the_protocol_has_no_place_for(open_generator: Open, body: str) -> None:
    with pytest.raises(GeneratorFailed, match=r"^python:users:rows: ") as found:
        read_all(open_generator(f"def rows(position):\n {body}"))
    assert len(str(found.value)) < 500


def test_a_function_that_takes_no_position(open_generator: Open) -> None:
    with pytest.raises(GeneratorFailed, match="raised TypeError"):
        read_all(open_generator("def rows():\n yield {}, 1"))


def test_an_exception_comes_after_the_rows_before_it_with_its_lines(open_generator: Open) -> None:
    text = """
def rows(position):
    yield {}, 1
    fetch()

def fetch():
    raise OSError("no answer")
"""
    source = open_generator(text)
    source.wait(60)
    piece = source.read()
    assert piece is not None and piece.lines == [b"{}\n"]
    with pytest.raises(GeneratorFailed) as found:
        read_all(source)
    assert str(found.value) == (
        "python:users:rows: raised OSError: no answer at users.py:7 (fetch), called from users.py:4 (rows); mend it "
        "and run the same command again, nothing is lost"
    )
    assert found.value.frames == ("users.py:4 (rows)", "users.py:7 (fetch)")
    assert isinstance(found.value.__cause__, OSError)
    assert exit_code(found.value) == SOURCE_REFUSED


def test_a_function_that_exits_ends_the_run_only(open_generator: Open) -> None:
    with pytest.raises(GeneratorFailed, match=r"raised SystemExit: 3 at users\.py:2"):
        read_all(open_generator("def rows(position):\n raise SystemExit(3)\n yield\n"))


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
    source.wait(60)
    first = source.read()
    assert first is not None and first.lines == [b'{"id":0}\n']
    nothing = source.read()
    assert nothing is not None and not nothing.lines
    source.wait(0.01)
    assert source.waits_for().startswith("the next row of python:users:rows, asked ")
    sys.modules["users"].go_on.set()
    assert [line for line, _ in read_all(source)] == [b'{"id":1}\n']


def test_the_end_that_was_asked_for_closes_the_generator(open_generator: Open) -> None:
    source = open_generator(BLOCKS)
    source.wait(60)
    source.end()
    first = source.read()
    assert first is not None and first.lines == [b'{"id":0}\n']
    assert source.read() is None
    sys.modules["users"].go_on.set()
    source.close()
    assert sys.modules["users"].closed.is_set()


def test_closing_leaves_a_function_alone_that_does_not_come_back(
    open_generator: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "CLOSE_S", 0.01)
    source = open_generator(BLOCKS)
    source.wait(60)
    source.close()
    users = sys.modules["users"]
    assert not users.closed.is_set()
    monkeypatch.undo()
    users.go_on.set()


def test_a_source_that_is_never_read_calls_nothing(open_generator: Open) -> None:
    source = open_generator("def rows(position):\n raise ValueError\n")
    source.end()
    assert source.read() is None


def test_the_function_runs_ahead_of_the_reader_by_a_bounded_number_of_rows(open_generator: Open) -> None:
    text = """
import itertools
counter = itertools.count()
asked = 0

def rows(position):
    global asked
    for asked in counter:
        yield {"text": "x" * 10_000}, asked
"""
    source = open_generator(text, limit=1 << 20)
    taken = 0
    for _ in range(50):
        source.wait(60)
        piece = source.read()
        assert piece is not None
        taken += len(piece.lines)
        assert len(piece.lines) <= 106
    assert sys.modules["users"].asked <= taken + 106


def test_a_run_that_is_held_back_has_asked_for_no_more_than_two_chunks_that_are_not_published(tmp_path: Path) -> None:
    # A row that somebody has paid for, as those of a teacher model, is not to be made long before it may be published.
    (tmp_path / "users.py").write_text("""
def rows(position):
    with open("asked.txt", "w", buffering=1) as asked:
        for number in range(10_000):
            asked.write("row\\n")
            yield {"id": number}, number + 1
""")
    out = tmp_path / "stream"
    command = ["run", "--source", "python:users:rows", "--out", out, "--samples-per-chunk", 3, "--max-ahead", 4]
    with start(*command, "--no-progress", cwd=tmp_path) as process:
        wait_until(lambda: (out / "head.json").exists() and b'"waiting"' in (out / "head.json").read_bytes(), process)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(list(out.glob("chunk_*.jsonl"))) == 4
    asked = len((tmp_path / "asked.txt").read_text().splitlines())
    assert 12 <= asked <= 12 + 2 * 3, f"{asked} rows were asked for, of which 12 are published"


@pytest.mark.parametrize(
    "change", [{"kind": "jsonl"}, {"path": "python:other:rows"}, {"rows": -1}, {"bytes": None}, {"rows": True}]
)
def test_a_position_that_is_none_of_this_source(open_generator: Open, change: dict[str, Any]) -> None:
    position = {"kind": "python", "path": "python:users:rows", "rows": 1, "bytes": 9, "position": 1}
    with pytest.raises(SourceRefused, match="no position to go on from"):
        open_generator(COUNT_TO_FIVE, position | change)
    del position["position"]
    with pytest.raises(SourceRefused, match="no position to go on from"):
        open_generator(COUNT_TO_FIVE, position)
