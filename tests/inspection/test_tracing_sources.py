"""From a row back to its line, and from a place in a source to its rows: on streams that the producer has made."""

import gzip
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from lazyshard.errors import StateMismatch
from lazyshard.inspection.tracing_sources import Origin, Origins, PlaceRows, SourcePlace, find_source, find_text
from lazyshard.stream.retention import retire
from lazyshard.stream.stream import open_now
from lazyshard_producer.cli import main as produce_main
from tests.stream.streams import foreign, produce

A = [f'{{"a": {number}}}\n' for number in range(7)]
B = [f'  {{"b": {number}}} \r\n' for number in range(6)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def produced(*sources: object) -> Origins:
    """A stream of a.jsonl and b.jsonl, 13 rows in chunks of 4, in the current folder."""
    Path("a.jsonl").write_text("".join([*A[:2], "\n", *A[2:]]), encoding="utf-8")
    Path("b.jsonl").write_bytes("".join(B).encode())
    made("--source", *(sources or ("a.jsonl", "b.jsonl")))
    return Origins(Path("stream"), range(4))


def made(*arguments: object) -> None:
    command = ["run", *map(str, arguments), "--out", "stream", "--samples-per-chunk", "4", "--no-progress"]
    assert produce_main(command) == 0


def told(origins: Origins, samples: int = 13) -> list[str]:
    return [" or ".join(map(str, origins.of(*divmod(sample, 4)))) for sample in range(samples)]


IN_ORDER = [*(f"a.jsonl:{line}" for line in (1, 2, 4, 5, 6, 7, 8)), *(f"b.jsonl:{line}" for line in range(1, 7))]


def test_the_line_of_every_row_of_two_files(tmp_path: Path) -> None:
    assert told(produced()) == IN_ORDER


def test_files_mixed_by_weights(tmp_path: Path) -> None:
    found = told(produced("a.jsonl", "--weight", 1, "--source", "b.jsonl", "--weight", 1))
    assert found[:4] == ["a.jsonl:1", "b.jsonl:1", "a.jsonl:2", "b.jsonl:2"]
    assert sorted(found) == sorted(IN_ORDER)


@pytest.mark.parametrize("block", [4, 6, 100])
def test_rows_shuffled_in_blocks(tmp_path: Path, block: int) -> None:
    origins = produced("a.jsonl", "b.jsonl", "--shuffle", block)
    reader = open_now(tmp_path / "stream")
    lines = {"a": (tmp_path / "a.jsonl").read_text().splitlines(), "b": [line.strip() for line in B]}
    for sample, place in enumerate(told(origins)):
        name, number = place.split(".jsonl:")
        assert lines[name][int(number) - 1] == reader.open_chunk(sample // 4).line(sample % 4).decode().strip()
    # The first chunk alone ends within a block, unless that has its very size: what was read for it cannot be told yet.
    (of_first,) = {len(Origins(tmp_path / "stream", range(1)).of(0, row)) for row in range(4)}
    assert of_first == (1 if block == 4 else 0)


def test_lines_that_are_alike_are_all_told(tmp_path: Path) -> None:
    with mock.patch.dict(globals(), {"A": ["{}\n", '{"a": 1}\n', "{}\n"]}):
        origins = produced()
    assert told(origins, 3) == ["a.jsonl:1 or a.jsonl:4", "a.jsonl:2", "a.jsonl:1 or a.jsonl:4"]


def test_what_a_chunk_was_made_of_where_no_line_equals_the_row(tmp_path: Path) -> None:
    origins = produced()
    (tmp_path / "b.jsonl").write_bytes("".join(B).replace("3", "8").encode())
    assert origins.of(2, 1) == (Origin("b.jsonl", (3,), (2, 6)),)
    (changed,) = origins.of(2, 2)
    assert (changed.lines, changed.among, changed.why is None) == ((), (2, 6), False)
    (tmp_path / "b.jsonl").unlink()
    # Of a chunk that two files went into: either, as long as the row is in none of them.
    found = [re.sub(r" \(.*?\)", "", text) for text in told(Origins(tmp_path / "stream", range(4)))]
    assert found[6:9] == ["a.jsonl:8", "a.jsonl, lines 6 to 8 or b.jsonl, line 1", "b.jsonl, lines 2 to 5"]


def test_compressed_files_tell_lines_that_come_into_question(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("".join(f'{{"a":{n}}}\n' for n in range(13)).encode()))
    found = told(produced("a.jsonl.gz"))
    assert found[0] == "a.jsonl.gz, lines 1 to 4 (the file is compressed)"
    assert found[12] == "a.jsonl.gz, line 13 (the file is compressed)"
    place = find_source(tmp_path / "stream", range(4), 4, SourcePlace("a.jsonl.gz", line=7))
    assert (place.chunks, place.samples, "--text" in (place.why or "")) == ((1, 2), (), True)


def test_sources_without_lines_are_named(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text("def rows(at):\n for n in range(13):\n  yield {'id': n}, n\n")
    with mock.patch.object(sys, "path", [str(tmp_path), *sys.path]):
        found = told(produced("python:users:rows"))
    assert set(found) == {"python:users:rows (a source of kind python has no lines)"}


def test_rows_of_a_stream_are_lines_of_its_chunks(tmp_path: Path) -> None:
    produce(tmp_path / "old", 13, 3)
    found = told(produced("old"))
    assert found == [f"old/chunk_{number // 3:05d}.jsonl:{number % 3 + 1}" for number in range(13)]
    (tmp_path / "old" / "chunk_00001.jsonl.completed").unlink()
    again = told(Origins(tmp_path / "stream", range(4)))
    assert again[0] == "old/chunk_00000.jsonl:1"
    assert again[3].startswith("old/chunk_00000.jsonl, lines 1 to 3 (no line there equals the row) or old (the stream ")


def test_after_deletion_nothing_is_told_of_the_first_chunk_left(tmp_path: Path) -> None:
    produced()
    retire(tmp_path / "stream", 1, 4)
    origins = Origins(tmp_path / "stream", range(1, 4))
    assert (origins.of(0, 0), origins.of(1, 0)) == ((), ())
    assert str(origins.of(2, 0)[0]) == "b.jsonl:2"


LINES = [f'{{"id": {number}}}\n' for number in range(20)]
"""10 bytes each up to line 10, then 11."""


def produced_of(folder: Path, *more: object, lines: list[str] = LINES) -> Path:
    (folder / "in.jsonl").write_text("".join(lines), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made("--source", "in.jsonl", *more)
    return folder / "stream"


def find(folder: Path, first: int = 0, *, chunks: int = 5, **place: int) -> PlaceRows:
    return find_source(folder / "stream", range(first, chunks), 4, SourcePlace(str(folder / "in.jsonl"), **place))


def test_rows_of_bytes_and_lines(tmp_path: Path) -> None:
    produced_of(tmp_path, lines=[*LINES[:11], "\n", *LINES[11:]])
    assert find(tmp_path, byte=0) == find(tmp_path, byte=9) == find(tmp_path, line=1) == PlaceRows((0, 1), (0,))
    assert find(tmp_path, byte=10) == find(tmp_path, line=2) == PlaceRows((0, 1), (1,))
    assert find(tmp_path, byte=40) == PlaceRows((1, 2), (4,))
    for line, sample in ((11, 10), (13, 11), (21, 19)):
        assert find(tmp_path, line=line) == PlaceRows((sample // 4, sample // 4 + 1), (sample,))
    # One that is blank, and one that is not there.
    for line in (12, 22):
        with pytest.raises(StateMismatch, match=f"line {line}"):
            find(tmp_path, line=line)


def test_shuffled_rows_are_searched_in_their_block(tmp_path: Path) -> None:
    stream = produced_of(tmp_path, "--shuffle", 10)
    reader = open_now(stream)
    wanted = {reader.open_chunk(n // 4).line(n % 4): n for n in range(20)}
    for number, line in enumerate(LINES, 1):
        assert find(tmp_path, line=number).samples == (wanted[line.encode()],)
    # Of the first block, as long as only its first chunk is there.
    first = reader.open_chunk(0)
    ids = [int(first.parse([first.line(n)], n)[0]["id"]) for n in range(4)]
    there = [n for n in range(4) if find(tmp_path, chunks=1, line=ids[n] + 1).samples]
    assert there == [0, 1, 2, 3]


def test_a_source_that_has_changed_tells_the_chunk(tmp_path: Path) -> None:
    produced_of(tmp_path)
    (tmp_path / "in.jsonl").write_text("".join(LINES).replace("7", "8"), encoding="utf-8")
    found = find(tmp_path, line=8)
    assert (found.chunks, found.samples, "no row there equals" in (found.why or "")) == ((1, 2), (), True)
    (tmp_path / "in.jsonl").unlink()
    assert "cannot be read" in (find(tmp_path, line=8).why or "")


def test_rows_that_are_alike_and_lines_with_white_space(tmp_path: Path) -> None:
    produced_of(tmp_path, lines=["{}\n"] * 20)
    assert find(tmp_path, line=6) == PlaceRows((1, 2), (4, 5, 6, 7))
    (tmp_path / "spaces").mkdir()
    produced_of(tmp_path / "spaces", lines=[f"  {line.rstrip()} \r\n" for line in LINES])
    assert find(tmp_path / "spaces", line=8).samples == (7,)


def test_deleted_chunks_are_named_as_a_range(tmp_path: Path) -> None:
    retire(produced_of(tmp_path), 2, 5)
    found = find(tmp_path, 2, line=2)
    assert (found.chunks, "below 2 are deleted" in (found.why or "")) == ((0, 3), True)
    assert find(tmp_path, 2, line=9).samples == (8,)


def test_sources_that_the_stream_does_not_have(tmp_path: Path) -> None:
    stream, plain = produced_of(tmp_path), produce(tmp_path / "plain", 4)
    for of, chunks, name in ((stream, range(5), "other.jsonl"), (plain, range(2), "a"), (plain, range(0), "a")):
        with pytest.raises(StateMismatch):
            find_source(of, chunks, 2, SourcePlace(name, line=1))
    with pytest.raises(StateMismatch):
        Origins(plain, range(2)).of(0, 0)


def test_texts(tmp_path: Path) -> None:
    foreign(tmp_path, b'{"a":"x\\"y"}\n{"a":"\xc3\xa4"}\n', b'{"a":"\\u00e4"}\n{"a":"b"}\n')
    stream = open_now(tmp_path)
    told: list[tuple[str, int, int]] = []
    found = list(find_text(stream, range(2), "\u00e4", lambda *look: told.append(look)))
    assert found == [1, 2]
    assert told == [("searching", 0, 2), ("searching", 1, 2), ("searching", 2, 2)]
    assert list(find_text(stream, range(2), 'x"y')) == [0]
    assert list(find_text(stream, range(1, 2), '"a"')) == [2, 3]
