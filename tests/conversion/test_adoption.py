"""What becomes of a directory that is adopted, of other programs at work on it, and of an adoption that is killed."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import xxhash

from lazyshard import ChunkWriter, StreamReader
from lazyshard.conversion import adoption_publishing
from lazyshard.conversion.adoption import Adopted, adopt
from lazyshard.conversion.adoption_rows import Phase, Report
from lazyshard.errors import (
    ManifestInvalid,
    ProducerFenced,
    ProducerLocked,
    StreamEnded,
    StreamInvalid,
    StreamMismatch,
    StreamUnsealed,
)
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.store import durable
from lazyshard.stream.lock import WriterLock
from tests.conversion.adoptable import FULL, KEPT, SHORT, bare, contents, data, marked, seal_of, values, write
from tests.stream.streams import forked, head, names, produce, rows, seal


@pytest.mark.parametrize("make", [bare, marked])
@pytest.mark.parametrize("chunks", [FULL, SHORT, FULL[:1]])
def test_directory_becomes_an_ended_stream(
    make: Callable[..., Path], chunks: tuple[bytes, ...], tmp_path: Path
) -> None:
    make(tmp_path, *chunks)
    before = data(tmp_path)
    count = sum(chunk.count(b"\n") for chunk in chunks)
    (tmp_path / "chunk_00000.jsonl.sha256").write_bytes(b"somebody's")
    seen: list[tuple[str, int, int]] = []
    adopted = adopt(tmp_path, clock=lambda: 12.5, report=lambda *step: seen.append(step))
    total = len(chunks)
    assert seen == [(phase, done, total) for phase in ("checking", "sealing") for done in range(total + 1)]
    size = sum(map(len, chunks))
    assert adopted == Adopted(adopted.stream_id, 2, len(chunks), count, size, ended=True, new=True)
    assert data(tmp_path) == before
    own = {"stream.json", "stream.end", "head.json", "chunk_00000.jsonl.sha256", *KEPT}
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


def test_notes_in_foreign_markers_and_ends_are_replaced(tmp_path: Path) -> None:
    marked(tmp_path, *FULL)
    for chunk, note in enumerate((b"done\n", b'{"rows": 2}', b"2")):
        (tmp_path / seal_name(chunk)).write_bytes(note)
    (tmp_path / "stream.end").write_bytes(b"over\n")
    adopt(tmp_path)
    assert list(StreamReader(tmp_path)) == rows(0, 6)


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


def test_failing_disk_leaves_what_can_be_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare(tmp_path, *FULL)
    before = data(tmp_path)

    def full(fd: int, content: bytes) -> None:
        if b'"chunk":1' in content:
            raise OSError(28, "No space left on device")
        os.write(fd, content)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_all", full)
        with pytest.raises(OSError, match="No space left"):
            adopt(tmp_path)
    assert set(names(tmp_path)) == {*(chunk_name(i) for i in range(3)), seal_name(0), *KEPT}
    first = (tmp_path / seal_name(0)).read_bytes()
    adopt(tmp_path)
    assert (tmp_path / seal_name(0)).read_bytes() == first
    assert list(StreamReader(tmp_path)) == rows(0, 6)
    assert data(tmp_path) == before


STEPS: Final = ("create", "write_all", "sync", "rename", "sync_directory", "remove")


def killed_at(step: int, directory: Path, end: bool) -> int:
    """Adopts in a child that gets SIGKILL in front of a durable step, or half way through if it is a write."""
    left = step

    def wrapped(name: str, original: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            if name == "write_all":
                fd, content = arguments
                original(fd, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    def work() -> None:
        for name in STEPS:
            original = getattr(durable, name)
            for module in (durable, adoption_publishing):
                if hasattr(module, name):
                    setattr(module, name, functools.partial(wrapped, name, original))
        adopt(directory, end=end)

    return forked(work)


def samples_seen(directory: Path) -> int | None:
    """How many samples a reader is told of, all of which it reads and finds right; None: refused as without markers."""
    try:
        reader = StreamReader(directory, 2, max_wait=0)
    except StreamUnsealed:
        return None
    seen = reader.seen
    read = [row for n in range(0, seen.samples, 2) for row in reader.read_published(n, min(n + 2, seen.samples), 2)]
    assert read == rows(0, seen.samples)
    return seen.samples


def stages(directory: Path, end: bool) -> Iterator[list[str]]:
    """Kills a run at the first step, the next one at the second, and so on each on what the one before has left."""
    for step in range(1000):
        code = killed_at(step, directory, end)
        yield names(directory)
        if code == 0:
            return
        assert code == -signal.SIGKILL
    raise AssertionError("never done")


@pytest.mark.parametrize("make", [bare, marked])
@pytest.mark.parametrize(("chunks", "end"), [(SHORT, True), (FULL, False)])
def test_killed_at_each_step_and_run_again(
    make: Callable[..., Path], chunks: tuple[bytes, ...], end: bool, tmp_path: Path
) -> None:
    total = sum(chunk.count(b"\n") for chunk in chunks)
    for step in range(1000):
        stream = make(tmp_path / str(step), *chunks)
        before = data(stream)
        code = killed_at(step, stream, end)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        left = names(stream)
        seen = samples_seen(stream)
        if make is marked:
            # A full last chunk counts at once, and a short one with the end.
            assert seen in (
                (5,) if "stream.end" in left else (4,) if end else (4, 6) if "stream.json" in left else (6,)
            )
        if "stream.json" not in left:
            # The next start of a producer must not clear away what has no seal yet.
            with pytest.raises(StreamInvalid, match=r"somebody else made them; .* `lazyshard adopt \S+ --no-end`"):
                ChunkWriter(stream, 2)
        adopted = adopt(stream, end=end)
        assert (adopted.samples, adopted.chunks, adopted.ended) == (total, 3, end)
        # Once the head is there, what else was left is for the next writer to clear.
        assert ".tmp" not in names(stream) or "head.json" in left
        assert (head(stream).samples, samples_seen(stream)) == (total, total)
        assert data(stream) == before
        if not end:
            produce(stream, 7)
            assert list(StreamReader(stream)) == rows(0, 7)
    assert step > 35, "the steps were not met"


@pytest.mark.parametrize("make", [bare, marked])
def test_run_again_after_run_again(make: Callable[..., Path], tmp_path: Path) -> None:
    stream = make(tmp_path / "stream", *SHORT)
    seen = -1
    for _ in stages(stream, True):
        now = samples_seen(stream)
        # What was visible stays so.
        assert (-1 if now is None else now) >= seen
        seen = -1 if now is None else now
    assert seen == 5


@pytest.mark.parametrize("end", [True, False])
def test_killed_before_the_head(end: bool, tmp_path: Path) -> None:
    stream = bare(tmp_path, *FULL)
    adopt(stream, end=end)
    (stream / "head.json").unlink()
    adopted = adopt(stream)
    assert (adopted.samples, adopted.ended, adopted.new) == (6, end, False)
    assert (head(stream).samples, head(stream).ended) == (6, end)
    (stream / "head.json").unlink()
    (stream / seal_name(1)).unlink()
    with pytest.raises(StreamInvalid, match="chunk 1 lacks its data or its seal"):
        adopt(stream)


def test_lost_head_of_a_partial_chunk_without_an_end_names_no_partial_chunk(tmp_path: Path) -> None:
    produce(tmp_path, 5)
    (tmp_path / "stream.end").unlink()
    (tmp_path / "head.json").unlink()
    assert adopt(tmp_path).samples == 4
    assert head(tmp_path).samples == 4
