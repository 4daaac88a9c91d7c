"""What rechunking makes of a stream, what it refuses, and how it goes on; killed processes: tests/cli/test_rechunk."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyshard import ChunkWriter
from lazyshard.conversion import rechunking
from lazyshard.conversion.rechunking import Rechunked, rechunk
from lazyshard.errors import ChunkCorrupt, LazyShardError, StreamInvalid, StreamMismatch, StreamMissing, WaitTimeout
from lazyshard.format import CheckedLines
from lazyshard.stream.retire import retire
from tests.conversion.adoptable import contents
from tests.stream.damage import Damage, cut, delete, each, edit, flip, found, put, stream
from tests.stream.foreign_seals import seal_rows
from tests.stream.streams import foreign, head, produce, rows, seal, wait_until


def chunks(directory: Path) -> list[bytes]:
    """The chunks' rows; every one of them is as its seal says."""
    assert not found(directory)
    return [path.read_bytes() for path in sorted(directory.glob("chunk_*.jsonl"))]


def lines(*groups: Sequence[int]) -> list[bytes]:
    return [b"".join(b'{"id":%d}\n' % number for number in group) for group in groups]


def test_other_number_of_rows(tmp_path: Path) -> None:
    before = contents(stream(tmp_path / "old"))
    told: list[tuple[str, int, int]] = []
    made = rechunk(tmp_path / "old", tmp_path / "new", 3, report=lambda *step: told.append(step))
    assert made == Rechunked(chunks=2, samples=5, copied=5, size=45, new=True)
    assert told == sorted(told) and set(told) == {("copying", done, 3) for done in range(4)}
    assert chunks(tmp_path / "new") == lines([0, 1, 2], [3, 4])
    assert head(tmp_path / "new").state == "finished"
    assert contents(tmp_path / "old") == before
    # Again there is nothing to do.
    before = contents(tmp_path / "new")
    assert rechunk(tmp_path / "old", tmp_path / "new", 3, end_at_damage=True) == Rechunked(2, 5, 0, 0, new=False)
    assert contents(tmp_path / "new") == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(samples=st.integers(0, 40), old=st.integers(1, 12), new=st.integers(1, 12))
def test_rows_are_the_same_whatever_the_numbers(
    samples: int, old: int, new: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("streams")
    produce(directory / "old", samples, old)
    rechunk(directory / "old", directory / "new", new)
    wanted = [range(start, min(start + new, samples)) for start in range(0, samples, new)]
    assert chunks(directory / "new") == lines(*wanted)


@pytest.mark.parametrize("tokens", [None, [1, 2]])
def test_bytes_of_the_rows_are_kept(tokens: list[int] | None, tmp_path: Path) -> None:
    """White space, digits, escapes, and a carriage return that another program has left before a newline."""
    odd = (b'{ "a" : 1.50,\t"b":"\\u00fc"}\r\n', '{"a":"ü"}\n'.encode())
    seal_rows(stream(tmp_path / "old", 4), 0, *odd, tokens=tokens)
    rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert (tmp_path / "new" / "chunk_00000.jsonl").read_bytes() == b"".join(odd) + b'{"id":2}\n'


def test_lengths_in_tokens_are_kept_where_all_rows_of_a_chunk_have_them(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "old", 2) as writer:
        for number in range(6):
            writer.write({"id": number}, tokens=10 + number if number < 4 else None)
    rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert chunks(tmp_path / "new") == lines([0, 1, 2], [3, 4, 5])
    kept = [seal(tmp_path / "new", chunk).tokens for chunk in (0, 1)]
    assert [None if tokens is None else tokens.tolist() for tokens in kept] == [[10, 11, 12], None]


def test_position_in_the_seals(tmp_path: Path) -> None:
    stream_id = json.loads((stream(tmp_path / "old") / "stream.json").read_bytes())["stream_id"]
    rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert [seal(tmp_path / "new", chunk).source for chunk in (0, 1)] == [
        {"kind": "rechunk", "stream_id": stream_id, "samples": 3},
        {"kind": "rechunk", "stream_id": stream_id, "samples": 5},
    ]


def test_foreign_directory(tmp_path: Path) -> None:
    """What our format does not hold is left out: a byte order mark, carriage returns, blank lines."""
    foreign(
        tmp_path / "old",
        b'\xef\xbb\xbf\n \n {"id":0}\r\n\n{"id":1}',
        b'{"id":2}\n{"id":3} \n\n',
        b'{"id":4}\n',
        end=True,
    )
    made = rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert (made.samples, made.size) == (5, 46)
    assert chunks(tmp_path / "new") == [b' {"id":0}\n{"id":1}\n{"id":2}\n', b'{"id":3}\n{"id":4}\n']
    # Again, where the number of rows of a chunk is told.
    assert rechunk(tmp_path / "old", tmp_path / "new", 3, source_samples_per_chunk=2) == Rechunked(
        2, 5, 0, 0, new=False
    )


def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_written: int) -> None:
    """Five rows in twos, of which a first call copies so many; an error ends it."""
    stream(tmp_path / "old")
    with monkeypatch.context() as patch:
        written = 0
        write = ChunkWriter.write_lines

        def write_some(writer: ChunkWriter, lines: Sequence[bytes] | CheckedLines, *, source: Any = None) -> Any:
            nonlocal written
            written += len(lines)
            if written > rows_written:
                raise KeyboardInterrupt
            return write(writer, lines, source=source)

        patch.setattr(ChunkWriter, "write_lines", write_some)
        with pytest.raises(KeyboardInterrupt):
            rechunk(tmp_path / "old", tmp_path / "new", 2)


@pytest.mark.parametrize(("written", "kept"), [(0, 0), (2, 2), (4, 4)])
def test_interrupted_call_goes_on(written: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half(tmp_path, monkeypatch, written)
    assert (head(tmp_path / "new").state, head(tmp_path / "new").samples) == ("idle", kept)
    made = rechunk(tmp_path / "old", tmp_path / "new", 2)
    assert made == Rechunked(chunks=3, samples=5, copied=5 - kept, size=9 * (5 - kept), new=True)
    assert chunks(tmp_path / "new") == lines([0, 1], [2, 3], [4])


def test_only_the_end_is_missing(tmp_path: Path) -> None:
    rechunk(stream(tmp_path / "old"), tmp_path / "new", 3)
    delete("stream.end")(tmp_path / "new")
    edit("head.json", chunks=1, samples=3, ended=False, state="failed")(tmp_path / "new")
    assert rechunk(tmp_path / "old", tmp_path / "new", 3) == Rechunked(2, 5, 0, 0, new=False)
    assert chunks(tmp_path / "new") == lines([0, 1, 2], [3, 4])


@pytest.mark.parametrize(
    "damage",
    [
        # Another stream of the same rows; and fewer rows than are copied.
        edit("stream.json", stream_id="0" * 32),
        each(edit("head.json", chunks=1, samples=2), edit("stream.end", chunks=1, samples=2)),
    ],
)
def test_copy_of_another_stream(damage: Damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half(tmp_path, monkeypatch, 4)
    before = contents(tmp_path / "new")
    damage(tmp_path / "old")
    with pytest.raises(StreamMismatch, match=f"{tmp_path}/new: expected"):
        rechunk(tmp_path / "old", tmp_path / "new", 2)
    assert contents(tmp_path / "new") == before


def test_foreign_directory_that_holds_other_rows_by_now(tmp_path: Path) -> None:
    """It has no identity; the last row that was copied is compared."""
    foreign(tmp_path / "old", *lines([0, 1], [2, 3]), end=True)
    rechunk(tmp_path / "old", tmp_path / "new", 3)
    delete("stream.end")(tmp_path / "new")
    edit("head.json", chunks=1, samples=3, ended=False)(tmp_path / "new")
    foreign(tmp_path / "old", *lines([0, 1], [7, 8]))
    with pytest.raises(StreamMismatch, match=r"new: expected row 2 as in .*old \(XXH3 .*, found another row \(XXH3 "):
        rechunk(tmp_path / "old", tmp_path / "new", 3)


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (
            lambda path: produce(path, 4, 3, end=False),
            "found one not made by `lazyshard rechunk`; choose another directory",
        ),
        (lambda path: produce(path, 4, 2), "the stream has 2 samples per chunk, asked for 3"),
        (lambda path: produce(path, 0, 3), "expected 5 rows, as .* holds, but it has ended with 0"),
        (lambda path: foreign(path, b"{}\n"), "holds chunk files but no stream.json"),
    ],
)
def test_directory_of_somebody_else(fill: Damage, message: str, tmp_path: Path) -> None:
    stream(tmp_path / "old")
    fill(tmp_path / "new")
    before = contents(tmp_path / "new")
    with pytest.raises(LazyShardError, match=message):
        rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert contents(tmp_path / "new") == before


@pytest.mark.parametrize("target", ["old", "old/inner", "old/../old", "link", "link/inner"])
def test_target_in_the_source(target: str, tmp_path: Path) -> None:
    before = contents(stream(tmp_path / "old"))
    (tmp_path / "link").symlink_to("old")
    with pytest.raises(ValueError, match="is the directory of the stream itself, or lies in it"):
        rechunk(tmp_path / "old", tmp_path / target, 3)
    assert contents(tmp_path / "old") == before


def test_damaged_row_stops_it_and_the_rows_before_stay(tmp_path: Path) -> None:
    flip("chunk_00002.jsonl", 3)(stream(tmp_path / "old", 7))
    with pytest.raises(ChunkCorrupt, match=r"chunk_00002.jsonl: row 0 \(byte 0\): expected XXH3"):
        rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert chunks(tmp_path / "new") == lines([0, 1, 2])
    assert head(tmp_path / "new").state == "failed"
    flip("chunk_00002.jsonl", 3)(tmp_path / "old")
    assert rechunk(tmp_path / "old", tmp_path / "new", 3).copied == 4
    assert chunks(tmp_path / "new") == lines([0, 1, 2], [3, 4, 5], [6])


@pytest.mark.parametrize(
    ("damage", "found_there", "copied"),
    [
        (flip("chunk_00002.jsonl", 3), r"chunk_00002.jsonl: row 0 \(byte 0\): expected XXH3", [[0, 1, 2], [3]]),
        (flip("chunk_00002.jsonl", 12), r"chunk_00002.jsonl: row 1 \(byte 9\)", [[0, 1, 2], [3, 4]]),
        (cut("chunk_00001.jsonl", 3), "chunk_00001.jsonl: expected 18 bytes as sealed, found 3", [[0, 1]]),
        (delete("chunk_00001.jsonl"), "chunk 1 is published, but this file of it has not appeared", [[0, 1]]),
        (put("chunk_00003.jsonl.completed", b"{}"), "chunk_00003.jsonl.completed: ", [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_copy_can_end_at_the_damage(
    damage: Damage, found_there: str, copied: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(stream(tmp_path / "old", 8))
    made = rechunk(tmp_path / "old", tmp_path / "new", 3, end_at_damage=True)
    rows_there = sum(map(len, copied))
    assert made.damage is not None and re.search(found_there, made.damage)
    assert (made.chunks, made.samples, made.copied, made.new) == (len(copied), rows_there, rows_there, True)
    assert chunks(tmp_path / "new") == lines(*copied)
    assert head(tmp_path / "new").state == "finished"
    before = contents(tmp_path / "new")
    again = rechunk(tmp_path / "old", tmp_path / "new", 3, end_at_damage=True)
    assert again == Rechunked(len(copied), rows_there, 0, 0, new=False, damage=made.damage)
    with pytest.raises(StreamMismatch, match=f"expected 8 rows, as .*old holds, but it has ended with {rows_there};"):
        rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert contents(tmp_path / "new") == before


def test_copy_that_was_stopped_by_damage_can_be_ended(tmp_path: Path) -> None:
    flip("chunk_00002.jsonl", 3)(stream(tmp_path / "old", 7))
    with pytest.raises(ChunkCorrupt):
        rechunk(tmp_path / "old", tmp_path / "new", 3)
    made = rechunk(tmp_path / "old", tmp_path / "new", 3, end_at_damage=True)
    assert (made.chunks, made.samples, made.copied) == (2, 4, 1)
    assert chunks(tmp_path / "new") == lines([0, 1, 2], [3])


def test_copy_that_has_ended_at_damage_which_is_mended_by_now(tmp_path: Path) -> None:
    flip("chunk_00002.jsonl", 3)(stream(tmp_path / "old", 7))
    rechunk(tmp_path / "old", tmp_path / "new", 3, end_at_damage=True)
    flip("chunk_00002.jsonl", 3)(tmp_path / "old")
    with pytest.raises(StreamMismatch):
        rechunk(tmp_path / "old", tmp_path / "new", 3, end_at_damage=True)


def test_nothing_is_ended_where_the_first_row_is_damaged(tmp_path: Path) -> None:
    flip("chunk_00000.jsonl", 3)(stream(tmp_path / "old", 7))
    with pytest.raises(ChunkCorrupt, match=r"chunk_00000\.jsonl: row 0"):
        rechunk(tmp_path / "old", tmp_path / "new", 3, end_at_damage=True)
    assert not (tmp_path / "new" / "stream.end").exists()


def test_chunks_that_are_copied_may_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half(tmp_path, monkeypatch, 4)
    delete("stream.end")(tmp_path / "old")
    edit("head.json", ended=False, chunks=2, samples=4)(tmp_path / "old")
    retire(tmp_path / "old", 2, 3)
    edit("head.json", ended=True, chunks=3, samples=5)(tmp_path / "old")
    put("stream.end", b'{"format":1,"chunks":3,"samples":5}')(tmp_path / "old")
    assert rechunk(tmp_path / "old", tmp_path / "new", 2).copied == 1
    assert chunks(tmp_path / "new") == lines([0, 1], [2, 3], [4])


@pytest.mark.parametrize("what", ["live", "live and foreign", "a gap", "deleted", "deleted and live", "nothing"])
def test_stream_that_has_not_ended_or_is_not_whole_is_refused(what: str, tmp_path: Path) -> None:
    old = tmp_path / "old"
    if what == "nothing":
        old.mkdir()
    elif what in ("live and foreign", "a gap"):
        foreign(old, *lines([0, 1], [2, 3]), end=what == "a gap")
        if what == "a gap":
            delete("chunk_00001.jsonl.completed")(old)
    else:
        stream(old, 6, end=False)
        if what.startswith("deleted"):
            retire(old, 2, 3)
        if what == "deleted":
            produce(old, 7)
    message = "its chunks below 2 are deleted" if what.startswith("deleted") else "has not ended|there is no stream"
    with pytest.raises((StreamInvalid, StreamMissing), match=message):
        rechunk(old, tmp_path / "new", 3)
    assert not (tmp_path / "new").exists()


def test_follow_copies_what_comes_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rechunking, "HEARTBEAT_S", 0.0)
    old, new = tmp_path / "old", tmp_path / "new"
    writer = ChunkWriter(old, 2)
    made: list[Rechunked] = []
    thread = threading.Thread(target=lambda: made.append(rechunk(old, new, 3, follow=True)))
    thread.start()
    try:
        for row in rows(0, 4):
            writer.write(row)
        wait_until(lambda: (new / "head.json").exists() and head(new).samples == 3, "the first chunk")
        note = f"sample 4 of {old}, which is still being produced"
        wait_until(lambda: (head(new).state, head(new).note) == ("waiting", note), "the word that it waits")
        writer.write({"id": 4})
    finally:
        writer.close()
        thread.join()
    assert made == [Rechunked(chunks=2, samples=5, copied=5, size=45, new=True)]
    assert chunks(new) == lines([0, 1, 2], [3, 4])


def test_follow_gives_up(tmp_path: Path) -> None:
    stream(tmp_path / "old", 4, end=False)
    with pytest.raises(WaitTimeout, match=r"waiting for chunk 2 of .*old"):
        rechunk(tmp_path / "old", tmp_path / "new", 3, follow=True, max_wait=0.0)
    assert chunks(tmp_path / "new") == lines([0, 1, 2])
    produce(tmp_path / "old", 5)
    assert rechunk(tmp_path / "old", tmp_path / "new", 3, follow=True).copied == 2
