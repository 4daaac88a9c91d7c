"""A Python function as a source: its rows and positions, what it may do wrong, and when it is asked for rows."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import RowInvalid
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SOURCE_REFUSED, SettingInvalid, SourceRefused, exit_code
from lazyshard_producer.sources.generator import GeneratorSource
from lazyshard_producer.sources.source import Context, Line, Rows
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import head, run_arguments
from tests.producer.commands import Running
from tests.producer.sources.reading import refusal
from tests.stream.streams import raised, refusal_of

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

    def open_it(text: str, position: dict[str, Any] | None = None, limit: int = 100, name: str = "users:rows") -> Any:
        (tmp_path / "users.py").write_text(text)
        monkeypatch.delitem(sys.modules, "users", raising=False)
        context = Context(tmp_path / "stream", limit)
        opened.append(GeneratorSource(SourceSettings(path=f"python:{name}"), position, context))
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


def read_first(source: GeneratorSource, *lines: bytes) -> Rows:
    """What comes first, which is this."""
    source.wait(60)
    piece = source.read()
    assert piece is not None and list(piece.lines) == list(lines)
    return piece


def failure(source: GeneratorSource) -> SourceRefused:
    return raised(SourceRefused, read_all, source)


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


def test_rows_that_are_none_do_not_end_it(open_generator: Open) -> None:
    text = "def rows(position):\n yield {'a': float('nan')}, 1\n yield {'a': 'x' * 93}, 2\n yield {'a': 1}, 3\n"
    (nan, first), (long, _), (good, last) = read_all(open_generator(text))
    assert isinstance(nan, RowInvalid) and isinstance(long, RowInvalid)
    assert "NaN" in str(nan) and "100 bytes" in str(long)
    assert (good, first["rows"], last["rows"]) == (b'{"a":1}\n', 1, 3)


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("", "users:rows", "users has no rows"),
        ("rows = 3", "users:rows", "expected a function, found int"),
        ("import nowhere_to_be_found", "users:rows", "ModuleNotFoundError: No module named 'nowhere"),
        ("class A:\n pass", "users:A.rows", "users has no A.rows"),
    ],
)
def test_no_such_function(open_generator: Open, text: str, name: str, says: str) -> None:
    refusal_of(SettingInvalid, f"--source python:{name}: .*{says}", open_generator, text, name=name)


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
    error = failure(open_generator(f"def rows(position):\n {body}"))
    assert error.file == "python:users:rows"
    assert len(str(error)) < 500


def test_an_exception_comes_after_the_rows_before_it_with_its_lines(open_generator: Open) -> None:
    text = "def rows(position):\n yield {}, 1\n fetch()\n\ndef fetch():\n raise OSError('no answer')\n"
    source = open_generator(text)
    read_first(source, b"{}\n")
    error = failure(source)
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
