"""What rechunking makes of a stream, what it refuses, and how it goes on; killed processes: tests/cli/test_rechunk."""

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
from lazyshard.errors import ChunkCorrupt, LazyShardError, StreamInvalid, StreamMismatch, StreamMissing, WaitTimeout
from lazyshard.format import CheckedLines
from lazyshard.storage import rechunking
from lazyshard.storage.rechunking import Rechunked, rechunk
from lazyshard.storage.retire import retire
from tests.storage.adoptable import contents
from tests.storage.damage import Damage, cut, delete, edit, flip, found, put, stream
from tests.storage.foreign_seals import seal_rows
from tests.storage.streams import foreign, head, produce, rows, seal, wait_until


def chunks(directory: Path) -> list[bytes]:
    """The chunks' rows; every one of them is as its seal says."""
    assert not found(directory)
    return [path.read_bytes() for path in sorted(directory.glob("chunk_*.jsonl"))]


def lines(*groups: Sequence[int]) -> list[bytes]:
    return [b"".join(b'{"id":%d}\n' % number for number in group) for group in groups]


@pytest.mark.parametrize(
    ("per_chunk", "wanted"),
    [
        (1, [[0], [1], [2], [3], [4]]),
        (2, [[0, 1], [2, 3], [4]]),
        (3, [[0, 1, 2], [3, 4]]),
        (5, [[0, 1, 2, 3, 4]]),
        (100, [[0, 1, 2, 3, 4]]),
    ],
)
def test_other_number_of_rows(per_chunk: int, wanted: list[list[int]], tmp_path: Path) -> None:
    before = contents(stream(tmp_path / "old"))
    made = rechunk(tmp_path / "old", tmp_path / "new", per_chunk)
    assert made == Rechunked(chunks=len(wanted), samples=5, copied=5, size=45, new=True)
    assert chunks(tmp_path / "new") == lines(*wanted)
    assert head(tmp_path / "new").state == "finished"
    assert contents(tmp_path / "old") == before


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


def test_lengths_in_tokens_are_kept(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "old", 2) as writer:
        for number in range(5):
            writer.write({"id": number}, tokens=10 + number)
    rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert chunks(tmp_path / "new") == lines([0, 1, 2], [3, 4])
    kept = [seal(tmp_path / "new", chunk).tokens for chunk in (0, 1)]
    assert [tokens.tolist() for tokens in kept if tokens is not None] == [[10, 11, 12], [13, 14]]


def test_lengths_are_left_out_of_a_chunk_where_a_row_has_none(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "old", 2) as writer:
        for number in range(6):
            writer.write({"id": number}, tokens=number if number < 4 else None)
    rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert seal(tmp_path / "new", 0).tokens is not None
    assert seal(tmp_path / "new", 1).tokens is None


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
    assert rechunk(tmp_path / "old", tmp_path / "new", 3) == Rechunked(2, 5, 0, 0, new=False)


def test_rows_of_a_foreign_chunk_can_be_told(tmp_path: Path) -> None:
    foreign(tmp_path / "old", b'{"id":0}\n', end=True)
    rechunk(tmp_path / "old", tmp_path / "new", 3, source_samples_per_chunk=2)
    assert chunks(tmp_path / "new") == lines([0])


def test_again_there_is_nothing_to_do(tmp_path: Path) -> None:
    rechunk(stream(tmp_path / "old"), tmp_path / "new", 3)
    before = contents(tmp_path / "new")
    assert rechunk(tmp_path / "old", tmp_path / "new", 3) == Rechunked(2, 5, 0, 0, new=False)
    assert contents(tmp_path / "new") == before


def test_empty_stream(tmp_path: Path) -> None:
    stream(tmp_path / "old", 0)
    assert rechunk(tmp_path / "old", tmp_path / "new", 3) == Rechunked(0, 0, 0, 0, new=True)
    assert rechunk(tmp_path / "old", tmp_path / "new", 3) == Rechunked(0, 0, 0, 0, new=False)
    assert not found(tmp_path / "new")


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
    ("damage", "message"),
    [
        # Another stream of the same rows.
        (
            edit("stream.json", stream_id="0" * 32),
            "expected a copy of stream 00000000000000000000000000000000, found a ",
        ),
        (edit("stream.end", chunks=1, samples=2), None),
    ],
)
def test_copy_of_another_stream(
    damage: Damage, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half(tmp_path, monkeypatch, 4)
    before = contents(tmp_path / "new")
    if message is None:
        edit("head.json", chunks=1, samples=2)(tmp_path / "old")
        message = "expected at most the 2 rows of stream [0-9a-f]{32}, found 4 rows; choose another directory"
    damage(tmp_path / "old")
    with pytest.raises(StreamMismatch, match=f"{tmp_path}/new: {message}"):
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


def test_target_beside_a_source_with_the_same_beginning(tmp_path: Path) -> None:
    assert rechunk(stream(tmp_path / "old"), tmp_path / "older", 3).samples == 5


def test_no_source(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(StreamMissing, match="there is no stream"):
        rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert not (tmp_path / "new").exists()


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
    with pytest.raises(
        StreamMismatch, match=r"expected 7 rows, as .*old holds, but it has ended with 4; choose another"
    ):
        rechunk(tmp_path / "old", tmp_path / "new", 3, end_at_damage=True)


def test_nothing_is_ended_where_the_first_row_is_damaged(tmp_path: Path) -> None:
    flip("chunk_00000.jsonl", 3)(stream(tmp_path / "old", 7))
    with pytest.raises(ChunkCorrupt, match=r"chunk_00000\.jsonl: row 0"):
        rechunk(tmp_path / "old", tmp_path / "new", 3, end_at_damage=True)
    assert not (tmp_path / "new" / "stream.end").exists()


def test_without_damage_it_ends_as_the_old_one(tmp_path: Path) -> None:
    made = rechunk(stream(tmp_path / "old"), tmp_path / "new", 3, end_at_damage=True)
    assert made == Rechunked(chunks=2, samples=5, copied=5, size=45, new=True)


def test_cut_chunk(tmp_path: Path) -> None:
    cut("chunk_00000.jsonl", 3)(stream(tmp_path / "old"))
    with pytest.raises(ChunkCorrupt, match="expected 18 bytes as sealed, found 3 bytes"):
        rechunk(tmp_path / "old", tmp_path / "new", 3)


def test_deleted_chunks_are_refused(tmp_path: Path) -> None:
    stream(tmp_path / "old", 6, end=False)
    retire(tmp_path / "old", 2, 3)
    produce(tmp_path / "old", 7)
    with pytest.raises(StreamInvalid, match="its chunks below 2 are deleted, so the rows from 0 to 3 are not there"):
        rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert not (tmp_path / "new").exists()


def test_deleted_chunks_are_told_first_of_a_stream_that_has_not_ended(tmp_path: Path) -> None:
    """Waiting for the end, as the other refusal says, would not bring them back."""
    stream(tmp_path / "old", 6, end=False)
    retire(tmp_path / "old", 2, 3)
    with pytest.raises(StreamInvalid, match="its chunks below 2 are deleted, so the rows from 0 to 3 are not there"):
        rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert not (tmp_path / "new").exists()


def test_chunks_that_are_copied_may_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half(tmp_path, monkeypatch, 4)
    delete("stream.end")(tmp_path / "old")
    edit("head.json", ended=False, chunks=2, samples=4)(tmp_path / "old")
    retire(tmp_path / "old", 2, 3)
    edit("head.json", ended=True, chunks=3, samples=5)(tmp_path / "old")
    put("stream.end", b'{"format":1,"chunks":3,"samples":5}')(tmp_path / "old")
    assert rechunk(tmp_path / "old", tmp_path / "new", 2).copied == 1
    assert chunks(tmp_path / "new") == lines([0, 1], [2, 3], [4])


@pytest.mark.parametrize("kind", ["native", "foreign"])
def test_stream_that_has_not_ended_is_refused(kind: str, tmp_path: Path) -> None:
    if kind == "native":
        stream(tmp_path / "old", 4, end=False)
    else:
        foreign(tmp_path / "old", *lines([0, 1], [2, 3]))
    with pytest.raises(StreamInvalid, match=r"old: has not ended; wait for its end, or .*: --follow"):
        rechunk(tmp_path / "old", tmp_path / "new", 3)
    assert not (tmp_path / "new").exists()


def test_foreign_stream_with_a_gap_has_not_ended(tmp_path: Path) -> None:
    foreign(tmp_path / "old", *lines([0, 1], [2, 3]), end=True)
    delete("chunk_00001.jsonl.completed")(tmp_path / "old")
    with pytest.raises(StreamInvalid, match="has not ended: chunk 1 lacks its data or its marker; "):
        rechunk(tmp_path / "old", tmp_path / "new", 3)


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


def test_progress(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    rechunk(stream(tmp_path / "old"), tmp_path / "new", 4, report=lambda *step: told.append(step))
    assert told == [("copying", done, 3) for done in (0, 1, 2, 3, 3)]
