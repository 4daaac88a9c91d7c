"""Several named writers of one stream: order, remainders, end, resume, back-pressure, and what is refused."""

import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from lazyshard import ChunkWriter, StreamReader, errors
from lazyshard.format.records import END, Encoding, End
from lazyshard.format.writers import WRITERS, Committed, EndRequest, Sequenced
from lazyshard.store import durable
from lazyshard.stream import members, read_retired, sequencer, share
from lazyshard.stream.lock import Wanted
from lazyshard.stream.sequencer import Sequencing
from lazyshard.stream.share import Share
from lazyshard.stream.writer import open_sequenced
from tests.stream.streams import forked, head, names, publish_rows, raised, seal, tokens

FILES = (Committed.NAME, EndRequest.NAME)  # beside the folders of writers


def add(writer: ChunkWriter, start: int, stop: int) -> None:
    name = writer.directory.name
    for number in range(start, stop):
        writer.write({"id": f"{name}{number}"}, tokens=number, source=number + 1)


def write(directory: Path, name: str, rows: int, per_chunk: int = 2, *, end: bool = True, **how: Any) -> None:
    writer = ChunkWriter(directory, per_chunk, writer=name, **how)
    add(writer, writer.source or 0, rows)
    writer.close(end)


def chunks(directory: Path) -> list[str]:
    """The ids of each sealed chunk."""
    count = len(list(directory.glob("chunk_*.completed")))
    paths = [directory / f"chunk_{number:05d}.jsonl" for number in range(count)]
    return [" ".join(json.loads(line)["id"] for line in path.read_bytes().splitlines()) for path in paths]


def ids(directory: Path) -> list[str]:
    return " ".join(chunks(directory)).split()


def of_writer(directory: Path, name: str) -> list[str]:
    return [one for one in ids(directory) if one.rstrip("0123456789") == name]


def check_writers(directory: Path, **rows: int) -> None:
    """Each writer has so many rows in the stream, once and in order."""
    for name, count in rows.items():
        assert of_writer(directory, name) == [f"{name}{number}" for number in range(count)]


def position(directory: Path, chunk: int) -> Any:
    found = Sequenced.read_source(seal(directory, chunk).source)
    assert found is not None
    return found.taken, [(one.writer, one.first, one.count, one.source) for one in found.rows]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No writer's process becomes the sequencer, and no writer waits for one."""
    monkeypatch.setattr(Share, "_run", lambda self: None)
    monkeypatch.setattr(Share, "finish", lambda self, published: None)
    monkeypatch.setattr(share, "MOST_PIECES", 1000)


def sequencing(directory: Path, *, arrays: bool = False, encoding: Encoding | None = None) -> Sequencing:
    return Sequencing(directory, lambda: open_sequenced(directory, time.time, arrays, encoding))


def sequence(directory: Path, turns: int = 1000, **how: Any) -> Sequencing:
    """Becomes the sequencer, takes what is there, in at most so many turns, and stops; an error is raised."""
    work = sequencing(directory, **how)
    try:
        for _ in range(turns):
            if work.ended or work.step():
                break
    finally:
        work.close()
    return work


def test_writers_of_one_process(tmp_path: Path) -> None:
    counts = {"a": 5, "b": 0, "c": 9}
    writers = {name: ChunkWriter(tmp_path, 2, writer=name, writers=3) for name in counts}
    for number in range(9):
        for name, writer in writers.items():
            add(writer, number, min(number + 1, counts[name]))
    for writer in writers.values():
        writer.close()
    check_writers(tmp_path, **counts)
    assert [one["id"] for one in StreamReader(tmp_path)] == ids(tmp_path)
    assert (len(ids(tmp_path)), head(tmp_path).ended, seal(tmp_path, 6).samples) == (14, True, 2)
    assert names(tmp_path) == sorted(
        [".producer.lock", WRITERS, "head.json", "stream.end", "stream.json", "stream.owner"]
        + [f"chunk_{number:05d}.jsonl{end}" for number in range(7) for end in ("", ".completed")]
    )


def test_turn_is_fair(tmp_path: Path, by_hand: None) -> None:
    for name, rows in {"a": 7, "b": 2, "c": 5}.items():
        write(tmp_path, name, rows, writers=0, end=False)
    sequence(tmp_path)
    assert chunks(tmp_path) == ["b0 b1", "c0 c1", "a0 a1", "c2 c3", "a2 a3", "a4 a5"]
    assert position(tmp_path, 3) == ({"a": (2, 2), "b": (2, 0), "c": (4, 3)}, [("c", 2, 2, 4)])


def test_writer_that_was_killed_before_its_head_told_the_end_has_ended(tmp_path: Path, by_hand: None) -> None:
    write(tmp_path, "a", 1, writers=2)
    writer = ChunkWriter(tmp_path, 2, writer="b")
    add(writer, 0, 3)
    path = tmp_path / WRITERS / "b" / "head.json"
    before = path.read_bytes()
    writer.close()
    path.write_bytes(before)
    assert sequence(tmp_path).ended
    assert chunks(tmp_path) == ["b0 b1", "a0 b2"]


def test_sequencer_killed_before_its_head_ended(tmp_path: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequencer, "LEASE_S", 0.0)
    write(tmp_path, "a", 3, writers=1)
    sequence(tmp_path, turns=1)
    path = tmp_path / "head.json"
    before = path.read_bytes()
    for again in (lambda: sequence(tmp_path), lambda: raised(errors.StreamEnded, ChunkWriter, tmp_path, writer="a")):
        sequence(tmp_path)
        path.write_bytes(before)
        again()
        assert head(tmp_path).ended


def test_nobody_takes_over_while_a_stream_ends(tmp_path: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks do not meet they would take the end from each other."""
    write(tmp_path, "a", 3, writers=1)
    merge, told = sequencer.Sequencer._merge, list[bool]()

    def merging(self: sequencer.Sequencer, rests: list[members.SequencedWriter]) -> None:
        found = members.read_committed(tmp_path)
        told.append(found is not None and found.stopped)
        merge(self, rests)

    monkeypatch.setattr(sequencer.Sequencer, "_merge", merging)
    assert sequence(tmp_path).ended
    assert told == [False]


def test_pieces_are_published_together_by_time(tmp_path: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile nothing shows that the sequencer is alive, and another process takes over after the lease."""
    for number in range(10):
        write(tmp_path, f"w{number}", 6, writers=0)
    work = sequencing(tmp_path)
    assert work.step() == 0.0
    assert (head(tmp_path).chunks, chunks(tmp_path)[7:]) == (8, ["w80 w81"])
    monkeypatch.setattr(sequencer, "BEAT_S", 0.0)
    found = []
    while work.step() == 0.0:
        found.append(head(tmp_path).chunks)
    work.close()
    assert found == [16, 20, *range(22, 31)]


def test_remainders_fill_chunks_together_and_the_last_ones_end_the_stream(tmp_path: Path, by_hand: None) -> None:
    for name, rows in {"a": 3, "b": 7, "c": 3, "d": 0}.items():
        write(tmp_path, name, rows, 4, writers=5)
    assert not sequence(tmp_path).ended
    assert chunks(tmp_path) == ["b0 b1 b2 b3", "a0 a1 a2 b4", "b5 b6 c0 c1"]
    write(tmp_path, "e", 1, 4)
    assert sequence(tmp_path).ended
    assert chunks(tmp_path)[3:] == ["c2 e0"]
    assert position(tmp_path, 1) == ({"a": (3, 1), "b": (5, 1)}, [("a", 0, 3, 3), ("b", 4, 1, 7)])
    taken = {"a": (3, 1), "b": (7, 2), "c": (3, 3), "e": (1, 3)}
    assert position(tmp_path, 3) == (taken, [("c", 2, 1, 3), ("e", 0, 1, 1)])
    assert tokens(tmp_path, 4) == [[0, 1, 2, 3], [0, 1, 2, 4], [5, 6, 0, 1], [2, 0]]


@pytest.mark.parametrize("declared", [2, ["a", "b"]])
def test_stream_ends_when_all_declared_writers_have_ended(declared: Any, tmp_path: Path, by_hand: None) -> None:
    write(tmp_path, "a", 3, writers=declared)
    assert not sequence(tmp_path).ended
    error = raised(errors.StreamEnded, ChunkWriter, tmp_path, writer="a")
    assert (error.directory, error.samples) == (str(tmp_path / WRITERS / "a"), 3)
    write(tmp_path, "b", 4, end=False)
    assert not sequence(tmp_path).ended
    write(tmp_path, "b", 4)
    assert sequence(tmp_path).ended
    assert chunks(tmp_path) == ["a0 a1", "b0 b1", "b2 b3", "a2"]


def test_end_request_waits_for_an_unseen_end(tmp_path: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a", 2, writers=0)
    work = sequencing(tmp_path)
    assert work.step() == 0.0
    monkeypatch.setattr(sequencer, "LAST_POLL_S", 1e9)
    write(tmp_path, "b", 3)
    target = tmp_path / WRITERS / EndRequest.NAME
    durable.publish_bytes(EndRequest(time.time()).encode(), target, target.with_name(".end"))
    while not work.ended:
        work.step()
    assert chunks(tmp_path) == ["a0 a1", "b0 b1", "b2"]


@pytest.mark.parametrize("linked", [True, False])
def test_linked_or_copied(linked: bool, tmp_path: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not linked:
        monkeypatch.setattr(durable, "link", lambda source, target: False)
    encoding: Encoding = {"tokenizer": "t", "max_length": 8}
    for name in "ab":
        rows = ({"id": f"{name}{number}", "x": np.arange(number)} for number in range(3))
        publish_rows(tmp_path, 2, rows, [10, 11, 12], writer=name, writers=2, arrays=True, encoding=encoding)
    other: dict[str, Any] = {"arrays": True, "encoding": {"tokenizer": "u"}}
    assert raised(errors.StreamMismatch, ChunkWriter, tmp_path, writer="a", **other).directory == str(tmp_path)
    assert sequence(tmp_path, arrays=True, encoding=encoding).ended
    assert chunks(tmp_path) == ["b0 b1", "a0 a1", "a2 b2"]
    for end in ("jsonl", "arrays"):
        own = os.stat(tmp_path / WRITERS / "b" / f"chunk_00000.{end}")
        assert os.path.samestat(own, os.stat(tmp_path / f"chunk_00000.{end}")) is linked
    found = [(one["id"], one["x"].tolist()) for one in StreamReader(tmp_path)]
    assert found[:2] + found[4:] == [("b0", []), ("b1", [0]), ("a2", [0, 1]), ("b2", [0, 1])]
    assert seal(tmp_path, 0).digests.tolist() == seal(tmp_path / WRITERS / "b", 0).digests.tolist()
    assert tokens(tmp_path, 3) == [[10, 11], [10, 11], [12, 12]]


def test_numbered_pieces_are_deleted_in_the_writers_folder_alone(tmp_path: Path) -> None:
    # So many that pieces are deleted twice: the first time 15 of 16, if all that are published have numbers.
    write(tmp_path, "a", 81, writers=1)
    check_writers(tmp_path, a=81)
    folder = tmp_path / WRITERS / "a"
    kept = read_retired(folder)
    assert kept >= 16
    assert sorted(folder.glob("chunk_*.jsonl")) == [folder / f"chunk_{n:05d}.jsonl" for n in range(kept, 41)]


def test_fork_writes_nothing_and_leaves_lock_and_sequencer_to_its_parent(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2, writer="a", writers=1)
    add(writer, 0, 3)

    def child() -> None:
        raised(RuntimeError, writer.write, {"id": "a3"})
        raised(RuntimeError, writer.close)
        writer.close(end=False)

    assert forked(child) == 0
    assert raised(errors.ProducerFenced, ChunkWriter, tmp_path, writer="a").directory == str(tmp_path / WRITERS / "a")
    add(writer, 3, 5)
    writer.close()
    assert (ids(tmp_path), head(tmp_path).ended) == (["a0", "a1", "a2", "a3", "a4"], True)


@pytest.fixture
def two(tmp_path: Path, by_hand: None) -> Path:
    write(tmp_path, "a", 3, writers=2)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "expected", "actual"),
    [
        ({"writer": "a", "writers": 3}, "2", "3"),
        ({"writer": "a", "writers": ["a", "b"]}, "2", "('a', 'b')"),
        ({"writer": "a", "samples_per_chunk": 3}, "3", "2"),
        ({"writer": "a", "arrays": True}, "arrays=True", "arrays=False"),
        ({}, "one producer without a name", "several writers, each with a name"),
    ],
)
def test_what_never_changes_is_refused(given: dict[str, Any], expected: str, actual: str, two: Path) -> None:
    error = raised(errors.StreamMismatch, ChunkWriter, two, **given)
    assert (error.directory, str(error.expected), str(error.actual)) == (str(two), expected, actual)


def test_writer_that_a_stream_has_no_place_for_is_refused(two: Path, tmp_path: Path) -> None:
    write(two, "b", 1, end=False)
    error = raised(errors.StreamMismatch, ChunkWriter, two, writer="c")
    assert (error.expected, error.actual, (two / WRITERS / "c").exists()) == ("2", "'c'", False)
    named = two / "named"
    write(named, "a", 1, writers=["a", "b"], end=False)
    error = raised(errors.StreamMismatch, ChunkWriter, named, writer="c")
    assert (error.expected, error.actual) == ("('a', 'b')", "'c'")
    write(named, "b", 1, end=False)
    unnamed = two / "unnamed"
    ChunkWriter(unnamed, 2).close(end=False)
    before = names(unnamed)
    error = raised(errors.StreamMismatch, ChunkWriter, unnamed, writer="a")
    kinds = ("several writers, each with a name", "one producer without a name")
    assert (error.expected, error.actual, names(unnamed)) == (*kinds, before)


@pytest.mark.parametrize(
    "given",
    [
        *({"writer": name} for name in ("", ".a", "a/b", "../a", "..", "a b", "ä", "a" * 65, 3, *FILES)),
        *({"writer": "a", "writers": writers} for writers in (-1, 10_001, True, [], "ab", ["a", "/"])),
        {"writers": 2},
        {"writer": "a", "samples_per_chunk": None},
    ],
)
def test_what_is_no_name_and_no_number_of_writers(given: Any, tmp_path: Path) -> None:
    raised(ValueError, ChunkWriter, tmp_path / "stream", **{"samples_per_chunk": 2, **given})
    assert not (tmp_path / "stream").exists()


def test_folder_that_has_fewer_rows_than_the_stream_is_refused(two: Path) -> None:
    write(two, "b", 4, end=False)
    sequence(two)
    (two / WRITERS / "b").rename(two / "moved")
    error = raised(errors.StreamInvalid, ChunkWriter, two, writer="b")
    assert error.directory == str(two / WRITERS / "b")


def test_newest_seal_that_no_sequencer_has_written_is_refused(two: Path) -> None:
    sequence(two)
    path = two / "chunk_00000.jsonl.completed"
    path.write_bytes(json.dumps(json.loads(path.read_bytes()) | {"source": {"writers": {"a": [1]}}}).encode())
    raised(errors.StreamInvalid, ChunkWriter, two, writer="b")
    raised(errors.StreamInvalid, sequence, two)


# The end of the file's name, how many bytes are cut, and what is put in their place.
SEAL_CUT, ROWS_CUT, ROWS_CHANGED = (".completed", 5, b""), ("", 1, b""), ("", 3, b'5"}')


@pytest.mark.parametrize(
    ("damage", "chunk"), [(SEAL_CUT, 0), (ROWS_CUT, 0), (SEAL_CUT, 2), (ROWS_CUT, 2), (ROWS_CHANGED, 2)]
)
def test_damaged_piece_stops_its_writer_alone_and_is_taken_when_it_is_restored(
    damage: Any, chunk: int, tmp_path: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "RETRY_S", 0.0)
    monkeypatch.setattr(sequencer, "RETRY_S", 0.0)
    for name in "ab":
        write(tmp_path, name, 5, writers=2)
    folder = tmp_path / WRITERS / "a"
    before = {path.name: path.read_bytes() for path in folder.glob("chunk_*")}
    suffix, cut, put = damage
    damaged = folder / f"chunk_{chunk:05d}.jsonl{suffix}"
    damaged.write_bytes(damaged.read_bytes()[:-cut] + put)
    assert not sequence(tmp_path).ended
    assert of_writer(tmp_path, "b")[:4] == ["b0", "b1", "b2", "b3"]
    check_writers(tmp_path, a=2 * chunk)
    told = Committed.decode((tmp_path / WRITERS / Committed.NAME).read_bytes())
    assert list(told.refused) == ["a"]
    assert str(damaged).removesuffix(".completed") in told.refused["a"]
    damaged.write_bytes(before[damaged.name])
    assert sequence(tmp_path).ended
    check_writers(tmp_path, a=5, b=5)


def test_a_writer_is_the_last_only_once_its_end_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Share, "_run", lambda self: None)
    end, seen = tmp_path / WRITERS / "a" / END, list[bool]()

    def pause(seconds: float, reason: str) -> None:
        seen.append(end.exists())
        if end.exists():
            monkeypatch.setattr(share, "has_ended", lambda directory: True)
        end.parent.mkdir(exist_ok=True)
        end.write_bytes(End(1, 1).encode())

    one = Share(tmp_path, "a", 1, Wanted(2), time.time, open_stream=mock.Mock(), pause=pause)
    one.uploads = mock.Mock(directory=tmp_path)
    one.complete(1)
    assert seen == [False, True]


def test_held_writer_survives_a_refusal_before_its_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Share, "_run", lambda self: None)

    def tell(beat: int, taken: dict[str, list[int]], refused: dict[str, str]) -> None:
        told = Committed(0, taken, refused, False, beat, "host", 1, time.time())
        target = tmp_path / WRITERS / Committed.NAME
        durable.publish_bytes(told.encode(), target, target.with_name(".told"))

    writer = ChunkWriter(tmp_path, 2, writer="a", writers=1)
    add(writer, 0, 2 * share.MOST_PIECES)
    tell(1, {}, {"a": "damaged"})
    assert isinstance(writer.held(), str)
    monkeypatch.setattr(share, "REFUSED_S", 0.0)
    assert raised(errors.WriterFailed, writer.held).directory == str(tmp_path / WRITERS / "a")
    tell(2, {"a": [2, 0]}, {})
    assert writer.held() is None
    # From here on it waits anew.
    add(writer, 2 * share.MOST_PIECES, 2 * share.MOST_PIECES + 2)
    monkeypatch.undo()
    tell(3, {"a": [2, 0]}, {"a": "damaged"})
    assert isinstance(writer.held(), str)
    writer.close(end=False)
