"""From a row back to its line, and from a place in a source to its rows: on streams that the producer has made."""

import gzip
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest

from lazyshard.errors import StateMismatch
from lazyshard.inspection.tracing_sources import Origin, Origins, PlaceRows, SourcePlace, find_source, find_text
from lazyshard.stream.listing import retire
from lazyshard.stream.stream import open_now
from lazyshard_producer.cli import main as produce_main
from tests.stream.streams import foreign, owners, produce, raised, refusal_of, sequence, write_pieces

A = [f'{{"a": {number}}}\n' for number in range(7)]
B = [f'  {{"b": {number}}} \r\n' for number in range(6)]
STREAM = Path("stream")
IN_ORDER = [*(f"a.jsonl:{line}" for line in (1, 2, 4, 5, 6, 7, 8)), *(f"b.jsonl:{line}" for line in range(1, 7))]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def produced(*sources: object, a: list[str] = A) -> Origins:
    """A stream of a.jsonl and b.jsonl, 13 rows in chunks of 4, in the current folder."""
    Path("a.jsonl").write_text("".join([*a[:2], "\n", *a[2:]]), encoding="utf-8")
    Path("b.jsonl").write_bytes("".join(B).encode())
    arguments = ["run", "--source", *map(str, sources or ("a.jsonl", "b.jsonl")), "--out", "stream"]
    assert produce_main([*arguments, "--samples-per-chunk", "4", "--no-progress"]) == 0
    return Origins(STREAM, range(4), 4)


def told(origins: Origins, samples: Iterable[int] = range(13)) -> list[str]:
    return [" or ".join(map(str, origins.of(*divmod(sample, 4)))) for sample in samples]


def find(name: str, first: int = 0, stop: int = 4, **place: int) -> PlaceRows:
    return find_source(STREAM, range(first, stop), 4, SourcePlace(name, **place))


@pytest.mark.parametrize(
    ("sources", "of_first"),
    [
        (["a.jsonl", "b.jsonl"], 1),
        (["a.jsonl", "--weight", 1, "--source", "b.jsonl", "--weight", 1], 1),
        (["a.jsonl", "b.jsonl", "--shuffle", 4], 1),  # What was read for a first chunk within a block is not known
        (["a.jsonl", "b.jsonl", "--shuffle", 6], 0),
        (["a.jsonl", "b.jsonl", "--shuffle", 100], 0),
    ],
)
def test_a_row_leads_to_its_line_and_the_line_to_its_row(sources: list[object], of_first: int) -> None:
    found = told(produced(*sources))
    assert sorted(found) == sorted(IN_ORDER)
    assert "--shuffle" in sources or found[:2] == ["a.jsonl:1", "b.jsonl:1" if "--weight" in sources else "a.jsonl:2"]
    reader = open_now(STREAM)
    for sample, place in enumerate(found):
        name, line = place.split(":")
        row = reader.open_chunk(sample // 4).line(sample % 4).decode().strip()
        assert Path(name).read_text().splitlines()[int(line) - 1].strip() == row
        chunk = sample // 4
        assert find(name, line=int(line)).samples == (sample,)
        assert chunk or find(name, stop=1, line=int(line)).samples == (sample,)
    assert {len(Origins(STREAM, range(1), 4).of(0, row)) for row in range(4)} == {of_first}


def test_rows_of_bytes_and_lines() -> None:
    produced()
    assert find("a.jsonl", byte=0) == find("a.jsonl", byte=8) == find("a.jsonl", line=1) == PlaceRows((0, 1), (0,))
    assert find("a.jsonl", byte=9) == find("a.jsonl", line=2) == PlaceRows((0, 1), (1,))
    assert find("a.jsonl", byte=37) == find("a.jsonl", line=6) == PlaceRows((1, 2), (4,))
    for line in (3, 9):  # One that is blank, and one that is not there
        refusal_of(StateMismatch, f"line {line}", find, "a.jsonl", line=line)


def test_lines_that_are_alike_are_all_told() -> None:
    origins = produced(a=["{}\n", '{"a": 1}\n', "{}\n"])
    assert told(origins, range(3)) == ["a.jsonl:1 or a.jsonl:4", "a.jsonl:2", "a.jsonl:1 or a.jsonl:4"]
    assert find("a.jsonl", line=4, stop=3) == PlaceRows((0, 1), (0, 2))


def test_what_a_chunk_was_made_of_where_no_line_equals_the_row() -> None:
    origins = produced()
    Path("b.jsonl").write_bytes("".join(B).replace("3", "8").encode())
    assert origins.of(2, 1) == (Origin("b.jsonl", (3,), (2, 6)),)
    (changed,) = origins.of(2, 2)
    assert (changed.lines, changed.among, changed.why is None) == ((), (2, 6), False)
    found = find("b.jsonl", line=4)
    assert (found.chunks, found.samples, "no row there equals" in (found.why or "")) == ((2, 3), (), True)
    Path("b.jsonl").unlink()
    assert "cannot be read" in (find("b.jsonl", line=4).why or "")
    texts = [re.sub(r" \(.*?\)", "", text) for text in told(Origins(STREAM, range(4), 4))]
    assert texts[6:9] == ["a.jsonl:8", "a.jsonl, lines 6 to 8 or b.jsonl, line 1", "b.jsonl, lines 2 to 5"]


def test_compressed_files_tell_lines_that_come_into_question_and_functions_have_none(tmp_path: Path) -> None:
    Path("a.jsonl.gz").write_bytes(gzip.compress("".join(f'{{"a":{n}}}\n' for n in range(13)).encode()))
    found = told(produced("a.jsonl.gz"))
    assert found[0] == "a.jsonl.gz, lines 1 to 4 (the file is compressed)"
    assert found[12] == "a.jsonl.gz, line 13 (the file is compressed)"
    place = find("a.jsonl.gz", line=7)
    assert (place.chunks, place.samples, "--text" in (place.why or "")) == ((1, 2), (), True)
    shutil.rmtree(STREAM)
    (tmp_path / "traced_users.py").write_text("def rows(at):\n for n in range(13):\n  yield {'id': n}, n\n")
    with mock.patch.object(sys, "path", [str(tmp_path), *sys.path]):
        found = told(produced("python:traced_users:rows"))
    assert set(found) == {"python:traced_users:rows (a source of kind python has no lines)"}


def test_rows_of_a_stream_are_lines_of_its_chunks() -> None:
    produce(Path("old"), 13, 3)
    assert told(produced("old")) == [f"old/chunk_{number // 3:05d}.jsonl:{number % 3 + 1}" for number in range(13)]
    Path("old", "chunk_00001.jsonl.completed").unlink()
    again = told(Origins(STREAM, range(4), 4))
    assert again[0] == "old/chunk_00000.jsonl:1"
    assert again[3].startswith("old/chunk_00000.jsonl, lines 1 to 3 (no line there equals the row) or old (the stream ")


def test_after_deletion_nothing_is_told_of_the_first_chunk_left() -> None:
    produced()
    retire(STREAM, 1, 4)
    assert told(Origins(STREAM, range(1, 4), 4), (0, 4, 8)) == ["", "", "b.jsonl:2"]
    found = find("a.jsonl", 1, line=2)
    assert (found.chunks, "below 1 are deleted" in (found.why or "")) == ((0, 2), True)
    assert find("b.jsonl", 1, line=2).samples == (8,)


def test_sources_that_the_stream_does_not_have() -> None:
    produced()
    plain = produce(Path("plain"), 4)
    for of, chunks, name in ((STREAM, range(4), "other.jsonl"), (plain, range(2), "a"), (plain, range(0), "a")):
        raised(StateMismatch, find_source, of, chunks, 2, SourcePlace(name, line=1))
    raised(StateMismatch, lambda: Origins(plain, range(2), 4).of(0, 0))


def test_texts(tmp_path: Path) -> None:
    foreign(tmp_path, b'{"a":"x\\"y"}\n{"a":"\xc3\xa4"}\n', b'{"a":"\\u00e4"}\n{"a":"b"}\n')
    stream = open_now(tmp_path)
    told: list[tuple[str, int, int]] = []
    found = list(find_text(stream, range(2), "\u00e4", lambda *look: told.append(look)))
    assert found == [1, 2]
    assert told == [("searching", 0, 2), ("searching", 1, 2), ("searching", 2, 2)]
    assert list(find_text(stream, range(2), 'x"y')) == [0]
    assert list(find_text(stream, range(1, 2), '"a"')) == [2, 3]


def test_rows_of_several_writers(tmp_path: Path) -> None:
    for name, rows in (("a", 9), ("b", 3), ("c", 3), ("d", 11)):
        write_pieces(stream := tmp_path / "s", name, rows, 4)
    sequence(stream)
    ids = owners(stream)
    assert ["".join(sorted({one[0] for one in chunk})) for chunk in ids] == ["d", "a", "d", "a", "ab", "cd", "d"]
    origins, chunks = Origins(stream, range(len(ids)), 4), range(len(ids))
    for chunk, row in [(number, row) for number in chunks for row in range(len(ids[number]))]:
        name, number = ids[chunk][row].split("-")
        place = str(tmp_path / f"{name}.jsonl")
        assert origins.writer(chunk, row) == (name, int(number))
        (origin,) = origins.of(chunk, row)
        assert (origin.path, origin.lines) == (place, (int(number) + 1,))
        # Its own piece, not all that the writer has read
        first = int(number) // 4 * 4
        assert origin.among == (first + 1, 1 + min(first + 4, {"a": 9, "b": 3, "c": 3, "d": 11}[name]))
        found = find_source(stream, chunks, 4, SourcePlace(place, line=int(number) + 1))
        assert found.samples == (4 * chunk + row,)
    with pytest.raises(StateMismatch, match="only 9 lines"):
        find_source(stream, chunks, 4, SourcePlace(str(tmp_path / "a.jsonl"), line=10))
    raised(StateMismatch, lambda: find_source(stream, chunks, 4, SourcePlace("e.jsonl", line=1)))


def test_rows_of_writers_where_chunks_are_deleted(tmp_path: Path) -> None:
    for name in "ab":
        write_pieces(stream := tmp_path / "s", name, 8, 2)
    sequence(stream)
    assert [chunk[0] for chunk in owners(stream)] == ["b-0", "a-0", "b-4", "a-4"]
    origins = Origins(stream, range(1, 4), 4)
    assert [origins.writer(chunk, 1) for chunk in range(4)] == [None, ("a", 1), ("b", 5), ("a", 5)]
    # What b had read before chunk 2 is in the seal of chunk 0.
    places = [str(one) for chunk in range(4) for one in origins.of(chunk, 1)]
    assert places == [f"{tmp_path}/a.jsonl:2", f"{tmp_path}/a.jsonl:6"]
    for line, samples in ((2, ()), (6, (9,))):
        found = find_source(stream, range(1, 4), 4, SourcePlace(str(tmp_path / "b.jsonl"), line=line))
        assert found.samples == samples


def test_lines_that_two_writers_share(tmp_path: Path) -> None:
    """Both read rows that are alike, each from a file of its own: only the rows of its writer are of a file."""
    stream = tmp_path / "s"
    for name in "ab":
        write_pieces(stream, name, 4, 2, text="same")
    sequence(stream)
    for name in "ab":
        (chunk,) = (chunk for chunk in range(2) if Origins(stream, range(2), 4).writer(chunk, 0) == (name, 0))
        found = find_source(stream, range(2), 4, SourcePlace(str(tmp_path / f"{name}.jsonl"), line=2))
        assert found.samples == tuple(range(4 * chunk, 4 * chunk + 4))
