"""What becomes of a directory that is adopted, and of other programs at work on it.

What is refused: test_adoption_refusals; crashes: test_adoption_crashes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import (
    ChunkCorrupt,
    ManifestInvalid,
    ProducerFenced,
    ProducerLocked,
    StreamEnded,
    StreamInvalid,
    StreamMismatch,
)
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.storage.adoption import Adopted, adopt
from lazyshard.storage.adoption_rows import Phase, Report
from lazyshard.storage.lock import WriterLock
from tests.storage.adoptable import FULL, KEPT, SHORT, bare, contents, data, marked, seal_of, values, write
from tests.storage.streams import forked, head, names, produce, rows, seal


@pytest.mark.parametrize("make", [bare, marked])
@pytest.mark.parametrize("chunks", [FULL, SHORT, FULL[:1]])
def test_directory_becomes_an_ended_stream(
    make: Callable[..., Path], chunks: tuple[bytes, ...], tmp_path: Path
) -> None:
    make(tmp_path, *chunks)
    before = data(tmp_path)
    count = sum(chunk.count(b"\n") for chunk in chunks)
    adopted = adopt(tmp_path, clock=lambda: 12.5)
    size = sum(map(len, chunks))
    assert adopted == Adopted(adopted.stream_id, 2, len(chunks), count, size, ended=True, new=True)
    assert data(tmp_path) == before
    own = {"stream.json", "stream.end", "head.json", *KEPT}
    assert set(names(tmp_path)) == own | {n(i) for i in range(len(chunks)) for n in (chunk_name, seal_name)}
    assert values(tmp_path, "stream.end") == {"format": 1, "chunks": len(chunks), "samples": count}
    assert values(tmp_path, "stream.json")["stream_id"] == adopted.stream_id
    last = head(tmp_path)
    assert (last.chunks, last.samples, last.ended, last.state) == (len(chunks), count, True, "finished")
    reader = StreamReader(tmp_path)
    assert (reader.stream_id, list(reader)) == (adopted.stream_id, rows(0, count))
    with pytest.raises(StreamEnded):
        ChunkWriter(tmp_path)


def test_seals_say_what_a_producer_would_have_said(tmp_path: Path) -> None:
    adopt(bare(tmp_path / "adopted", *SHORT), clock=lambda: 12.5)
    produce(tmp_path / "produced", 5)
    for chunk in range(3):
        ours, theirs = seal(tmp_path / "adopted", chunk), seal(tmp_path / "produced", chunk)
        assert np.array_equal(ours.offsets, theirs.offsets)
        assert np.array_equal(ours.digests, theirs.digests)
        assert (ours.tokens, ours.source, ours.sealed_at) == (None, None, 12.5)
    assert seal(tmp_path / "adopted", 2).digests.tolist() == [xxhash.xxh3_64_intdigest(b'{"id":4}\n')]


def test_changed_row_of_an_adopted_stream_is_found(tmp_path: Path) -> None:
    adopt(marked(tmp_path, *FULL))
    (tmp_path / chunk_name(1)).write_bytes(FULL[0])
    with pytest.raises(ChunkCorrupt, match="expected XXH3"):
        list(StreamReader(tmp_path))


@pytest.mark.parametrize("make", [bare, marked])
def test_open_stream_goes_on(make: Callable[..., Path], tmp_path: Path) -> None:
    adopted = adopt(make(tmp_path, *FULL), end=False)
    assert (adopted.samples, adopted.ended) == (6, False)
    assert (head(tmp_path).chunks, head(tmp_path).ended, head(tmp_path).state) == (3, False, "idle")
    assert "stream.end" not in names(tmp_path)
    assert StreamReader(tmp_path).seen.samples == 6
    with ChunkWriter(tmp_path) as writer:
        assert (writer.published_samples, writer.source) == (6, None)
        for row in rows(6, 9):
            writer.write(row)
    assert list(StreamReader(tmp_path)) == rows(0, 9)


def test_single_chunk_may_be_shorter_than_asked_for(tmp_path: Path) -> None:
    assert adopt(bare(tmp_path, FULL[0]), 10).samples_per_chunk == 10
    assert StreamReader(tmp_path).seen.samples == 2


def test_notes_in_foreign_markers_and_ends_are_replaced(tmp_path: Path) -> None:
    marked(tmp_path, *FULL)
    for chunk, note in enumerate((b"done\n", b'{"rows": 2}', b"2")):
        (tmp_path / seal_name(chunk)).write_bytes(note)
    (tmp_path / "stream.end").write_bytes(b"over\n")
    adopt(tmp_path)
    assert list(StreamReader(tmp_path)) == rows(0, 6)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    bare(tmp_path, *FULL)
    for name in ("README", "chunk_00001.jsonl.sha256", "chunks.txt", "chunk_00000.idx"):
        (tmp_path / name).write_bytes(b"note")
    adopt(tmp_path)
    assert (tmp_path / "chunk_00001.jsonl.sha256").read_bytes() == b"note"


def test_report_counts_chunks_in_both_phases(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    adopt(bare(tmp_path, *FULL), report=lambda *step: seen.append(step))
    assert seen == [(phase, done, 3) for phase in ("checking", "sealing") for done in range(4)]


def test_seal_with_tokens_and_source_is_kept(tmp_path: Path) -> None:
    stream = marked(tmp_path / "stream", *FULL)
    seal_of(stream, 2, tokens="AQAAAAIAAAA=", source={"at": 6})
    adopt(stream, end=False)
    assert seal(stream, 2).source == {"at": 6}
    with ChunkWriter(stream) as writer:
        assert writer.source == {"at": 6}


def test_stream_of_ours_is_left_as_it_is(tmp_path: Path) -> None:
    produce(tmp_path, 5)
    before = contents(tmp_path)
    assert (adopted := adopt(tmp_path)) == Adopted(adopted.stream_id, 2, 3, 5, None, ended=True, new=False)
    assert adopt(tmp_path, end=False) == adopted
    with pytest.raises(StreamMismatch, match="the stream has 2 samples per chunk, asked for 3"):
        adopt(tmp_path, 3)
    assert contents(tmp_path) == before
    (tmp_path / "stream.json").write_bytes(b"{}")
    with pytest.raises(ManifestInvalid):
        adopt(tmp_path)


def test_live_producer_is_left_alone(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        for row in rows(0, 3):
            writer.write(row)
        (tmp_path / "head.json").unlink()
        assert adopt(tmp_path).new is False
        assert not (tmp_path / "head.json").exists()
        writer.heartbeat()


def test_second_writer_is_named_and_nothing_changed(tmp_path: Path) -> None:
    bare(tmp_path, *FULL)
    lock = WriterLock(tmp_path)
    lock.acquire(0.0)
    before = contents(tmp_path)
    with pytest.raises(ProducerLocked, match=f"process {os.getpid()} on "):
        adopt(tmp_path)
    assert contents(tmp_path) == before
    lock.release()


def test_adopted_by_another_process_after_the_first_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare(tmp_path, *FULL)
    acquire = WriterLock.acquire

    def first() -> None:
        monkeypatch.undo()
        adopt(tmp_path)

    def late(lock: WriterLock, *arguments: Any) -> Any:
        assert forked(first) == 0
        return acquire(lock, *arguments)

    monkeypatch.setattr(WriterLock, "acquire", late)
    assert adopt(tmp_path).new is False
    assert list(StreamReader(tmp_path)) == rows(0, 6)


def when(phase: Phase, chunks: int, action: Callable[[], object]) -> Report:
    """Acts when so many chunks of a phase are done."""

    def report(now: Phase, done: int, total: int) -> None:
        if (now, done) == (phase, chunks):
            action()

    return report


def test_taken_over_while_sealing_stops_at_once(tmp_path: Path) -> None:
    bare(tmp_path, *FULL)
    owner = tmp_path / "stream.owner"
    other = b'{"format":1,"epoch":9,"token":"aa","host":"far","pid":7,"since":1.0}'
    with pytest.raises(ProducerFenced, match="process 7 on far"):
        adopt(tmp_path, report=when("sealing", 1, lambda: owner.write_bytes(other)))
    assert owner.read_bytes() == other
    assert {seal_name(1), "stream.json"}.isdisjoint(names(tmp_path))


@pytest.mark.parametrize(("phase", "chunks"), [("checking", 3), ("sealing", 1)])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (write(chunk_name(2), FULL[0]), "chunk_00002.jsonl: was changed while the directory was being adopted"),
        (write(chunk_name(3), b"{"), "chunk_00003.jsonl: appeared or went while the directory was being adopted"),
    ],
)
def test_program_that_is_still_writing_is_noticed(
    phase: Phase, chunks: int, change: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    bare(tmp_path, *FULL)
    with pytest.raises(StreamInvalid, match=message):
        adopt(tmp_path, report=when(phase, chunks, lambda: change(tmp_path)))
    assert {"stream.json", "stream.end", "head.json", ".tmp"}.isdisjoint(names(tmp_path))
