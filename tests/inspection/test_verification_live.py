"""A verification beside a producer at work, after one that was killed, and by several processes."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter
from lazyshard.errors import StreamMismatch
from lazyshard.format.records import seal_name
from lazyshard.inspection import verification
from lazyshard.inspection.verification import check_in_order, verify
from lazyshard.inspection.verification_files import ChunkFiles
from lazyshard.stream.listing import retire
from tests.harness.processes.nursery import has_ended
from tests.stream.damage import Damage, cut, delete, each, edit, flip, found, move, put, shortened, stream
from tests.stream.streams import HERE, head, produce, raised, running, sequence, wait_until, write_pieces

C0, C1, C2, C3 = (f"chunk_0000{chunk}.jsonl" for chunk in range(4))
S0, S1, S2, S3 = (f"chunk_0000{chunk}.jsonl.completed" for chunk in range(4))
A, B = ".writers/a/", ".writers/b/"
CHUNKS = 40


@contextlib.contextmanager
def producer(directory: Path, keep: int = 0) -> Iterator[int]:
    """Writes without end; deletes all but the newest chunks if it is to keep only so many."""

    def work() -> None:
        writer = ChunkWriter(directory, 2)
        while True:
            writer.write({"id": writer.samples})
            if keep and writer.published_chunks > keep:
                retire(directory, writer.published_chunks - keep, writer.published_chunks)

    with running(work) as pid:
        wait_until((directory / "head.json").exists, "the producer's head")
        yield pid


@pytest.mark.parametrize("keep", [0, 2])
def test_producer_at_work_is_no_fault(keep: int, tmp_path: Path) -> None:
    with producer(tmp_path / "stream", keep) as pid:
        first = head(tmp_path / "stream").chunks
        looks = [verify(tmp_path / "stream")]
        while looks[-1].chunks <= first + 20:
            looks.append(verify(tmp_path / "stream"))
        assert not has_ended(pid, 0)
    assert {look.running for look in looks} == {True}
    assert [shortened(look) for look in looks] == [[]] * len(looks)
    assert looks[-1].samples == 2 * (looks[-1].chunks - looks[-1].retired) or keep
    assert (looks[-1].retired > 0) is (keep > 0)


@pytest.mark.parametrize("keep", [0, 2])
def test_killed_producer_leaves_leftovers_at_most(keep: int, tmp_path: Path) -> None:
    directory = tmp_path / "stream"
    for _ in range(4):
        with producer(directory, keep):
            published = head(directory).chunks + 3
            wait_until(lambda published=published: head(directory).chunks >= published, "3 chunks")  # type: ignore[misc]
        killed = verify(directory)
        assert not killed.running
        assert {finding.severity for finding in killed.findings} <= {"leftover"}
        # Where it cannot be known that its process has ended, what it leaves counts as being in its hands for a while.
        edit("head.json", process="another boot", updated_at=time.time())(directory)
        fresh, later = (verify(directory, clock=lambda late=late: time.time() + late) for late in (0.0, 16.0))  # type: ignore[misc]
        assert (fresh.running, fresh.findings, later.running) == (True, (), False)
        assert {finding.severity for finding in later.findings} <= {"leftover"}
    produce(directory, head(directory).samples + 3)
    assert not found(directory)


def test_what_lies_beyond_the_head_of_a_running_producer_is_in_its_hands(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "live", 2) as writer:
        for number in range(5):
            writer.write({"id": number})
        each(put(C2, b"x"), put(S3, b"x"))(tmp_path / "live")
        verified = verify(tmp_path / "live")
        assert (verified.running, verified.chunks, verified.findings) == (True, 2, ())
        delete(C2, S3)(tmp_path / "live")
    assert not found(tmp_path / "live")
    # A partial chunk is published only with the end.
    delete("stream.end")(stream(tmp_path / "ending"))
    verified = verify(at_work(tmp_path / "ending", chunks=2, samples=4, ended=False))
    assert (verified.running, verified.chunks, verified.findings) == (True, 2, ())


def at_work(directory: Path, **values: Any) -> Path:
    """Has the head of a stream say that this process is at work; it says nothing for the rest of the test."""
    edit("head.json", state="running", pid=os.getpid(), updated_at=time.time(), **values)(directory)
    return directory


def live(directory: Path) -> Path:
    return at_work(stream(directory, 6, end=False))


def test_files_that_appear_late_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network filesystem that remembers that they were not there."""
    monkeypatch.setattr(verification, "_LOOK_S", 0.001)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    live(tmp_path / "stream")
    for name in (S1, C2):
        (tmp_path / "stream" / name).rename(hidden / name)

    def show(phase: str, done: int, total: int) -> None:
        if done == total:
            for name in (S1, C2):
                (hidden / name).rename(tmp_path / "stream" / name)

    verified = verify(tmp_path / "stream", report=show)
    assert (verified.samples, verified.findings) == (6, ())
    delete(S1, C2)(tmp_path / "stream")
    assert found(tmp_path / "stream", grace_s=0.0) == [
        ("damage seal-missing", S1, "a seal", "no such file although the chunk counts as published"),
        ("damage data-missing", C2, "the rows of the chunk", "no such file although a seal exists"),
    ]


def test_chunks_deleted_by_the_producer_meanwhile_are_not_missing(tmp_path: Path) -> None:
    def delete_some(phase: str, done: int, total: int) -> None:
        if done == 0:
            assert retire(tmp_path, 2, 3) == 2

    verified = verify(live(tmp_path), report=delete_some)
    assert (verified.retired, verified.chunks, verified.samples, verified.findings) == (0, 3, 2, ())
    verified = verify(tmp_path)
    assert (verified.retired, verified.chunks, verified.samples, verified.findings) == (2, 3, 2, ())


def test_deleted_chunks_that_are_there_again_are_left_over(tmp_path: Path) -> None:
    stream(tmp_path, 6, end=False)
    for name in (C0, S0):
        move(name, f"{name}.kept")(tmp_path)
    retire(tmp_path, 2, 3)
    for name in (C0, S0):
        move(f"{name}.kept", name)(tmp_path)
    assert [finding[:2] for finding in found(tmp_path)] == [("leftover retired", C0), ("leftover retired", S0)]
    produce(tmp_path, 6, end=False)
    assert not found(tmp_path)


def test_mark_that_cannot_be_right(tmp_path: Path) -> None:
    stream(tmp_path, 6, end=False)
    put("retired.json", b'{"format":1,"stream_id":"%s","chunks_before":2,"updated_at":0}' % (b"0" * 32))(tmp_path)
    assert [finding[:2] for finding in found(tmp_path)] == [("leftover other-stream", "retired.json")]
    delete("retired.json")(tmp_path)
    retire(tmp_path, 2, 3)
    edit("retired.json", chunks_before=3)(tmp_path)
    wanted = [("damage retired", "retired.json"), ("leftover retired", C2), ("leftover retired", S2)]
    assert [finding[:2] for finding in found(tmp_path)] == wanted
    put("retired.json", b"{")(tmp_path)
    assert [finding[:2] for finding in found(tmp_path)] == [("damage invalid", "retired.json")]


def test_stream_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    def replace_it(phase: str, done: int, total: int) -> None:
        if done == 0:
            edit("stream.json", stream_id="0" * 32)(tmp_path)

    raised(StreamMismatch, lambda: verify(stream(tmp_path), report=replace_it))


def test_findings_are_as_of_one_process_and_progress_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_by_others(directory: Path, quick: bool, batches: list[list[ChunkFiles]], jobs: int) -> Any:
        return check_in_order(directory, quick, [[files] for batch in batches for files in batch], jobs, alone_s=0.0)

    stream(tmp_path, 2 * CHUNKS)
    each(*(flip(f"chunk_{chunk:05d}.jsonl", 5) for chunk in range(0, CHUNKS, 3)))(tmp_path)
    cut(f"chunk_{CHUNKS - 1:05d}.jsonl", 3)(tmp_path)
    alone = verify(tmp_path)
    assert len(alone.findings) == 14
    told = []
    monkeypatch.setattr(verification, "check_in_order", check_by_others)
    assert verify(tmp_path, jobs=3, report=lambda phase, done, total: told.append((done, total))) == alone
    assert told == [(done, CHUNKS) for done in range(CHUNKS + 1)]


def batches() -> list[list[ChunkFiles]]:
    names = ((chunk, f"chunk_{chunk:05d}.jsonl") for chunk in range(CHUNKS))
    return [[ChunkFiles(chunk, name, f"{name}.completed")] for chunk, name in names]


@pytest.mark.parametrize("fate", [None, signal.SIGKILL, signal.SIGSTOP])
def test_no_process_is_left_whatever_comes_to_them(fate: signal.Signals | None, tmp_path: Path) -> None:
    """Who listens stops to; one that is killed is told; one that gives no answer holds up nobody who wants no more."""
    results = check_in_order(stream(tmp_path, 2 * CHUNKS), False, batches() * 1000, 2, alone_s=0.0)
    assert [verdict.samples for verdict in next(results)] == [2]
    children = multiprocessing.active_children()
    assert len(children) == 2
    for child in children:
        assert child.pid is not None
        os.kill(child.pid, fate or 0)
    if fate == signal.SIGKILL:
        raised(ChildProcessError, list, results)
    else:
        results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


WAITING = """
import multiprocessing, sys, time
from pathlib import Path
from tests.inspection.test_verification_live import batches
from lazyshard.inspection.verification import check_in_order
results = check_in_order(Path(sys.argv[1]), False, batches() * 1000, 2, alone_s=0.0)
next(results)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
time.sleep(60)
"""


def test_no_process_outlives_one_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, str(stream(tmp_path, 2 * CHUNKS))]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(HERE)}, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        started = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(started) == 2
        assert all(blocks(pid, signal.SIGINT) for pid in started), "this process alone answers a Ctrl-C"
        parent.kill()
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            assert has_ended(pid, 60.0)


def blocks(pid: int, number: int) -> bool:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def shared(tmp_path: Path) -> Path:
    """Chunks 0 and 1 are the rows [0, 4) of b and of a; a has two more pieces, b has one, neither has ended."""
    stream = tmp_path / "stream"
    for name in "ab":
        write_pieces(stream, name, 4, 2, end=False)
    sequence(stream)
    write_pieces(stream, "a", 12, first=4, end=False)
    write_pieces(stream, "b", 8, first=4, end=False)
    return stream


def findings(stream: Path, **settings: Any) -> list[tuple[str, str, str]]:
    return [(one.severity, one.kind, one.file) for one in verify(stream, **settings).findings]


def moved(chunk: int, **values: object) -> Damage:
    def change(stream: Path) -> None:
        source = json.loads((stream / seal_name(chunk)).read_bytes())["source"]
        edit(seal_name(chunk), source=source | values)(stream)

    return change


def test_pieces_that_wait(tmp_path: Path) -> None:
    stream = shared(tmp_path)
    verified = verify(stream)
    assert (verified.findings, verified.chunks, verified.samples, verified.pieces) == ((), 2, 8, 3)
    write_pieces(stream, "a", 15, first=12)
    write_pieces(stream, "b", 9, first=8)
    assert verify(stream).pieces == 5
    sequence(stream)
    verified = verify(stream)
    assert (verified.findings, verified.chunks, verified.samples, verified.pieces) == ((), 6, 24, 0)
    assert verified.ended


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (flip(f"{A}chunk_00001.jsonl", 3), ("damage", "digest", f"{A}chunk_00001.jsonl")),
        (cut(f"{B}chunk_00001.jsonl", 5), ("damage", "size", f"{B}chunk_00001.jsonl")),
        (delete(f"{A}chunk_00001.jsonl.completed"), ("damage", "seal-missing", f"{A}chunk_00001.jsonl.completed")),
        (edit(f"{B}stream.json", stream_id="0" * 32), ("damage", "other-stream", f"{B}stream.json")),
        (edit(f"{B}stream.json", format=3), ("damage", "version", f"{B}stream.json")),
        (lambda stream: shutil.rmtree(stream / A), None),
        (lambda stream: (stream / ".writers/c").mkdir(), None),
    ],
)  # fmt: skip
def test_damaged_pieces(damage: Damage, expected: tuple[str, str, str] | None, tmp_path: Path) -> None:
    damage(stream := shared(tmp_path))
    assert [one for one in findings(stream) if one[0] == "damage"][:1] == ([] if expected is None else [expected])
    assert "chunk_00001.jsonl" not in str(expected) or verify(stream).findings[0].chunk is None


@pytest.mark.parametrize(
    ("damage", "chunk"),
    [
        (moved(1, rows=[["a", 0, 3, None]]), 1),  # The chunk has more rows
        (moved(1, rows=[["a", 4, 4, None]], writers={"b": [4, 0], "a": [8, 1]}), 1),  # Rows [0, 4) were lost
        (moved(1, rows=[["b", 0, 4, None]], writers={"b": [4, 1]}), 1),  # Rows of b are there twice
        (moved(1, writers={"a": [4, 1], "b": [4, 1]}), 1),  # b has no row in chunk 1
        (moved(1, writers={"a": [4, 1]}), 1),  # b was forgotten
        (moved(0, rows=[["b", 4, 4, None]], writers={"b": [8, 0]}), 0),
    ],
)
def test_positions_that_do_not_follow_each_other(damage: Damage, chunk: int, tmp_path: Path) -> None:
    damage(stream := shared(tmp_path))
    (first, *_) = [one for one in verify(stream, quick=True).findings if one.kind == "position"]
    assert (first.severity, first.file, first.chunk) == ("damage", seal_name(chunk), chunk)


def test_nothing_is_known_after_a_damaged_seal(tmp_path: Path) -> None:
    each(cut(seal_name(0), 0), moved(1, writers={"a": [400, 0], "b": [4, 1]}))(stream := shared(tmp_path))
    assert findings(stream, quick=True) == [
        ("damage", "position", ".writers/a"),  # It has fewer rows than are in the stream
        ("damage", "invalid", seal_name(0)),
    ]
