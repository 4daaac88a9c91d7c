"""From a place in a source to the rows that it has become, and from a text: on streams that the producer has made."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from lazyshard.errors import StateMismatch
from lazyshard.storage.opening import open_now
from lazyshard.storage.retire import retire
from lazyshard.storage.tracing_sources import SourcePlace, SourceRows, find_source
from lazyshard.storage.tracing_text import find_text
from tests.producer.commands import run
from tests.storage.streams import foreign, produce

LINES = [f'{{"id": {number}}}\n' for number in range(20)]
"""10 bytes each up to line 10, then 11."""


def produced(folder: Path, *more: object, lines: list[str] = LINES) -> Path:
    (folder / "in.jsonl").write_text("".join(lines), encoding="utf-8")
    done = run("run", "--source", "in.jsonl", "--out", "stream", "--samples-per-chunk", "4", *more, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "stream"


def find(folder: Path, first: int = 0, *, chunks: int = 5, **place: int) -> SourceRows:
    return find_source(folder / "stream", range(first, chunks), 4, SourcePlace(str(folder / "in.jsonl"), **place))


def test_rows_of_bytes_and_lines(tmp_path: Path) -> None:
    produced(tmp_path, lines=[*LINES[:11], "\n", *LINES[11:]])
    assert find(tmp_path, byte=0) == find(tmp_path, byte=9) == find(tmp_path, line=1) == SourceRows((0, 1), (0,))
    assert find(tmp_path, byte=10) == find(tmp_path, line=2) == SourceRows((0, 1), (1,))
    assert find(tmp_path, byte=40) == SourceRows((1, 2), (4,))
    assert find(tmp_path, line=11) == SourceRows((2, 3), (10,))
    assert find(tmp_path, line=13) == SourceRows((2, 3), (11,))
    assert find(tmp_path, line=21) == SourceRows((4, 5), (19,))
    with pytest.raises(StateMismatch, match="line 12: that line is blank"):
        find(tmp_path, line=12)
    with pytest.raises(StateMismatch, match="line 22: of this source 21 lines are published so far; look for"):
        find(tmp_path, line=22)


def test_shuffled_rows_are_searched_in_their_block(tmp_path: Path) -> None:
    stream = produced(tmp_path, "--shuffle", 10)
    reader = open_now(stream)
    wanted = {reader.open_chunk(n // 4).line(n % 4): n for n in range(20)}
    for number, line in enumerate(LINES, 1):
        assert find(tmp_path, line=number).samples == (wanted[line.encode()],)
    # Of the first block, as long as only its first chunk is there.
    there = [n for n in range(4) if find(tmp_path, chunks=1, line=int(reader.open_chunk(0).row(n)["id"]) + 1).samples]
    assert there == [0, 1, 2, 3]


def test_rows_that_are_alike_are_all_named(tmp_path: Path) -> None:
    produced(tmp_path, lines=["{}\n"] * 20)
    assert find(tmp_path, line=6) == SourceRows((1, 2), (4, 5, 6, 7))


def test_a_source_that_has_changed_tells_the_chunk(tmp_path: Path) -> None:
    produced(tmp_path)
    (tmp_path / "in.jsonl").write_text("".join(LINES).replace("7", "8"), encoding="utf-8")
    found = find(tmp_path, line=8)
    assert (found.chunks, found.samples) == ((1, 2), ())
    assert found.why == (
        "no row there equals that line, so rows are not published as the lines are, or the file has changed since"
    )
    (tmp_path / "in.jsonl").unlink()
    assert find(tmp_path, line=8).why == "the file cannot be read (No such file or directory)"


def test_a_compressed_source_tells_the_chunk(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress("".join(LINES).encode()))
    done = run("run", "--source", "in.jsonl.gz", "--out", "stream", "--samples-per-chunk", 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = find_source(tmp_path / "stream", range(5), 4, SourcePlace(str(tmp_path / "in.jsonl.gz"), line=7))
    assert found == SourceRows((1, 2), why="the file is compressed; `--text` searches the published rows")


def test_a_line_with_white_space_around_it_is_found(tmp_path: Path) -> None:
    produced(tmp_path, lines=[f"  {line.rstrip()} \r\n" for line in LINES])
    assert find(tmp_path, line=8).samples == (7,)


def test_deleted_chunks_are_named_as_a_range(tmp_path: Path) -> None:
    retire(produced(tmp_path), 2, 5)
    found = find(tmp_path, 2, line=2)
    assert found.chunks == (0, 3)
    assert found.why == (
        "the chunks below 2 are deleted, and the row was most likely in one of them; if not, rows are not published as "
        "the lines are, or the file has changed since"
    )
    assert find(tmp_path, 2, line=9).samples == (8,)


def test_sources_that_the_stream_does_not_have(tmp_path: Path) -> None:
    produced(tmp_path)
    with pytest.raises(StateMismatch, match=r"other.jsonl: none of the stream's sources, which are: in.jsonl; look"):
        find_source(tmp_path / "stream", range(5), 4, SourcePlace("other.jsonl", line=1))
    produce(tmp_path / "plain", 4)
    with pytest.raises(StateMismatch, match="its seals hold no positions in sources: another program"):
        find_source(tmp_path / "plain", range(2), 2, SourcePlace("in.jsonl", line=1))
    with pytest.raises(StateMismatch, match="no chunk is there"):
        find_source(tmp_path / "plain", range(0), 2, SourcePlace("in.jsonl", line=1))


def test_texts(tmp_path: Path) -> None:
    foreign(tmp_path, b'{"a":"x\\"y"}\n{"a":"\xc3\xa4"}\n', b'{"a":"\\u00e4"}\n{"a":"b"}\n')
    stream = open_now(tmp_path)
    told: list[tuple[str, int, int]] = []
    found = list(find_text(stream, range(2), "\u00e4", lambda *look: told.append(look)))
    assert found == [1, 2]
    assert told == [("searching", 0, 2), ("searching", 1, 2), ("searching", 2, 2)]
    assert list(find_text(stream, range(2), 'x"y')) == [0]
    assert list(find_text(stream, range(1, 2), '"a"')) == [2, 3]
