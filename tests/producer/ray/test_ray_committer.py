"""What write tasks have written becomes chunks: in order, once, while others still run; and the pieces they leave."""

import shutil
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import ChunkCorrupt, ProducerFenced, StreamMismatch, WriterFailed
from lazyshard.stream import ChunkWriter
from lazyshard_producer import ray_pieces
from lazyshard_producer.ray_pieces import Committer, durable_keys, piece_path, write_piece
from tests.harness.processes.producing import ids, published, seal
from tests.stream.streams import produce, raised, raising, refusal_of, wait_until

LOST = [(lambda data: b"", ChunkCorrupt), (lambda data: data[:-1], ChunkCorrupt), (None, FileNotFoundError)]
CHANGED = (3, lambda data: data.replace(b'{"id":1}', b'{"id":9}'), ChunkCorrupt)  # A row that would be copied
_number = count()
wait = partial(wait_until, what="the committer")


def write(folder: Path, task: int, first: int, last: int, *, keyed: bool = False) -> None:
    lines = (b'{"id":%d}\n' % number for number in range(first, last))
    write_piece(folder, task, lines, 4, list(range(first, last)) if keyed else None)


def write_all(folder: Path, sizes: Sequence[int]) -> None:
    for task, bounds in enumerate(pairwise(accumulate(sizes, initial=0))):
        write(folder, task, *bounds)


def begin(out: Path, *, ordered: bool = True, key: str | None = None) -> tuple[Committer, Path]:
    folder = out / ".ray" / f"write{next(_number)}"
    writer = ChunkWriter(out, 4)
    try:
        committer = Committer(writer, folder, ordered=ordered and key is None, key=key)
    except BaseException:
        writer.close(end=False)
        raise
    return committer, folder


def begin_anew(out: Path, rows: int) -> tuple[Committer, Path]:
    """One that continues after two chunks of an earlier one, which had so many rows."""
    committer, folder = begin(out)
    write(folder, 0, 0, rows)
    wait(lambda: published(out) == 2)
    committer.stop()
    committer.stop()
    assert (committer.failure, ids(out), (out / ".ray").exists()) == (None, list(range(8)), False)
    return begin(out)


def assert_not_ended(out: Path, rows: int) -> None:
    assert ids(out) == list(range(rows))
    assert not (out / "stream.end").exists()


@pytest.mark.parametrize("sizes", [[], [0], [3], [4, 4], [1, 2, 3, 4, 5], [17], [0, 5, 0, 0, 3]])
def test_pieces_of_any_size_become_chunks_of_one_size(tmp_path: Path, sizes: list[int]) -> None:
    committer, folder = begin(tmp_path)
    write_all(folder, sizes)
    committer.finish(range(len(sizes)))
    assert ids(tmp_path) == list(range(sum(sizes)))
    chunks = -(-sum(sizes) // 4)
    assert len(list(tmp_path.glob("chunk_*.jsonl"))) == chunks
    for chunk in range(chunks):
        assert seal(tmp_path, chunk)["source"] == {"kind": "ray", "rows": min(4 * chunk + 4, sum(sizes))}
    assert (tmp_path / "stream.end").exists()
    assert not (tmp_path / ".ray").exists()


@pytest.mark.parametrize("sizes", [[6, 7], [1] * 13, [13]])
def test_a_write_that_is_started_anew_passes_over_what_is_published(tmp_path: Path, sizes: list[int]) -> None:
    committer, folder = begin_anew(tmp_path, 9)
    before = (tmp_path / "chunk_00001.jsonl.completed").read_bytes()
    write_all(folder, sizes)
    committer.finish(range(len(sizes)))
    assert ids(tmp_path) == list(range(13))
    assert (tmp_path / "chunk_00001.jsonl.completed").read_bytes() == before


@pytest.mark.parametrize(
    ("given", "expected", "actual"),
    [
        ([(0, 6), (7, 9)], "as row 6 the one published as sample 6", "another"),
        ([(1, 9)], "as row 0 the one published as sample 0", "another"),
        ([(0, 5), (5, 7)], "the 8 rows that are published", "7 in all"),
    ],
)
def test_other_rows_are_refused(tmp_path: Path, given: list[tuple[int, int]], expected: str, actual: str) -> None:
    committer, folder = begin_anew(tmp_path, 8)
    for task, bounds in enumerate(given):
        write(folder, task, *bounds)
    error = raised(StreamMismatch, committer.finish, range(len(given)))
    assert (error.expected, error.actual) == (expected, actual)
    assert_not_ended(tmp_path, 8)


def test_a_piece_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_pieces, "MISSING_S", 0.0)
    committer, folder = begin(tmp_path)
    write(folder, 0, 0, 5)
    refusal_of(FileNotFoundError, "00000001", committer.finish, [0, 1])
    assert_not_ended(tmp_path, 4)


def test_stopped_while_it_waits_for_a_piece(tmp_path: Path) -> None:
    committer, folder = begin(tmp_path)
    write(folder, 0, 0, 5)

    def stop_after_the_first_chunk() -> None:
        wait(lambda: published(tmp_path) == 1)
        committer.stop()

    thread = threading.Thread(target=stop_after_the_first_chunk)
    thread.start()
    raised(WriterFailed, committer.finish, [0, 1])
    thread.join()
    assert committer.failure is None
    assert_not_ended(tmp_path, 4)


@pytest.mark.parametrize(("rows", "spoil", "error"), [*((rows, *lost) for rows in (4, 3) for lost in LOST), CHANGED])
def test_damaged_piece_stops_the_write(tmp_path: Path, spoil: Any, error: type[Exception], rows: int) -> None:
    committer, folder = begin(tmp_path)
    write(folder, 1, 0, rows)
    data = piece_path(folder, 1) / "chunk_00000.jsonl"
    kept = data.read_bytes()
    data.unlink()
    if spoil is not None:
        data.write_bytes(spoil(kept))
    piece_path(folder, 1).rename(piece_path(folder, 0))
    if rows == 4:
        wait(lambda: not folder.exists())
        refusal_of(WriterFailed, "no longer publishes", write, folder, 2, 0, 1)
    raised(error, committer.finish, [0])
    assert_not_ended(tmp_path, 0)


def test_a_filesystem_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committer, folder = begin(tmp_path)
    full = raising(OSError(28, "No space left on device"))
    monkeypatch.setattr("lazyshard.stream.publishing.sync_directory", full)
    write(folder, 0, 0, 9)
    refusal_of(WriterFailed, "No space left", committer.finish, [0])
    monkeypatch.undo()
    committer, folder = begin(tmp_path)
    write(folder, 0, 0, 9)
    committer.finish([0])
    assert ids(tmp_path) == list(range(9))


def test_a_piece_that_is_not_complete_is_not_seen(tmp_path: Path) -> None:
    def broken_off() -> Iterator[bytes]:
        yield from (b'{"id":%d}\n' % number for number in range(5))
        assert not piece_path(tmp_path, 1).exists()
        assert list(tmp_path.iterdir()) != []
        raise ValueError("no more")

    refusal_of(ValueError, "no more", write_piece, tmp_path, 1, broken_off(), 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ordered", [True, False])
def test_the_first_of_two_attempts_of_a_task_counts_even_after_it_was_published(tmp_path: Path, ordered: bool) -> None:
    committer, folder = begin(tmp_path, ordered=ordered)
    write(folder, 1, 90, 94)
    write(folder, 1, 80, 99)
    write(folder, 0, 0, 4)
    wait(lambda: published(tmp_path) == 2)
    wait(lambda: not piece_path(folder, 0).exists())
    write(folder, 0, 50, 60)
    committer.finish([0, 1])
    assert ids(tmp_path) == [0, 1, 2, 3, 90, 91, 92, 93]


@pytest.mark.parametrize(
    ("ordered", "expected", "linked"),
    [(True, list(range(13)), {0: 0, 1: 1}), (False, [*range(8), 9, 10, 11, 12, 8], {0: 0, 1: 1, 2: 2})],
)
def test_whole_chunks_are_linked(tmp_path: Path, ordered: bool, expected: list[int], linked: dict[int, int]) -> None:
    committer, folder = begin(tmp_path, ordered=ordered)
    # Under another name first, so that both tasks are seen at once and in this order.
    pieces = tmp_path / "pieces" / folder.name
    pieces.mkdir(parents=True)
    write(pieces, 0, 0, 9)
    write(pieces, 1, 9, 13)
    found = [piece_path(pieces, task) / f"chunk_0000{chunk}.jsonl" for task, chunk in ((0, 0), (0, 1), (1, 0))]
    written = [path.stat().st_ino for path in found]
    for task in (0, 1):
        piece_path(pieces, task).rename(piece_path(folder, task))
        wait(lambda: published(tmp_path) >= 2)
    committer.finish([0, 1])
    assert ids(tmp_path) == expected
    chunks = [(tmp_path / f"chunk_0000{chunk}.jsonl").stat().st_ino for chunk in range(4)]
    assert {at: written.index(one) for at, one in enumerate(chunks) if one in written} == linked


def restarted_with_a_key(out: Path) -> tuple[Committer, Path]:
    """After a write of two tasks, of which 9 and 2 rows are durable and 8 published, and one that was not complete."""
    committer, folder = begin(out, key="id")
    write(folder, 0, 0, 9, keyed=True)
    wait(lambda: published(out) == 2)
    write(folder, 1, 9, 11, keyed=True)
    (folder / ".unfinished").mkdir()
    committer.stop()
    committer, again = begin(out, key="id")
    assert (sorted(durable_keys(again)), folder.exists()) == (list(range(11)), False)
    refusal_of(WriterFailed, "no longer publishes", write, folder, 2, 11, 15, keyed=True)
    return committer, again


def test_with_a_key_a_restart_continues_with_the_pieces_that_are_durable(tmp_path: Path) -> None:
    committer, folder = restarted_with_a_key(tmp_path)
    write(folder, 0, 11, 12, keyed=True)
    wait(lambda: published(tmp_path) == 3)
    # The pieces of the first write, of which no row waits any more, are only known by their keys.
    committer.stop()
    committer, folder = begin(tmp_path, key="id")
    assert sorted(durable_keys(folder)) == list(range(12))
    write(folder, 0, 12, 13, keyed=True)
    committer.finish([0])
    assert ids(tmp_path) == list(range(13))
    assert not (tmp_path / ".ray").exists()


def test_with_a_key_the_seal_says_which_rows_of_the_pieces_are_published(tmp_path: Path) -> None:
    committer, folder = begin(tmp_path, key="id")
    write(folder, 0, 0, 6, keyed=True)
    wait(lambda: published(tmp_path) == 1)
    first = piece_path(folder, 0).name
    assert seal(tmp_path, 0)["source"] == {"kind": "ray", "rows": 4, "key": "id", "taken": {first: 4}}
    shutil.copytree(piece_path(folder, 0), tmp_path / "copy")
    write(folder, 1, 6, 9, keyed=True)
    wait(lambda: published(tmp_path) == 2)
    wait(lambda: not piece_path(folder, 0).exists())
    second = piece_path(folder, 1).name
    assert seal(tmp_path, 1)["source"]["taken"] == {first: 6, second: 2}
    committer.stop()
    # As if the driver had been killed before it removed the piece of which all rows are published.
    (tmp_path / ".ray" / "keys" / first).unlink()
    (tmp_path / "copy").rename(piece_path(folder, 0))
    committer, folder = begin(tmp_path, key="id")
    assert sorted(durable_keys(folder)) == list(range(9))
    committer.finish([])
    assert ids(tmp_path) == list(range(9))


def test_another_program_another_key_and_a_piece_that_is_gone_are_refused(tmp_path: Path) -> None:
    raised(StreamMismatch, begin, produce(tmp_path / "another", 4, 4, end=False))
    restarted_with_a_key(tmp_path)[0].stop()
    assert raised(StreamMismatch, begin, tmp_path).actual == "key='id'"
    assert raised(StreamMismatch, begin, tmp_path, key="name").actual == "key='id'"
    (folder,) = (one for one in (tmp_path / ".ray").iterdir() if one.name != "keys")
    for piece in folder.iterdir():
        if piece.is_dir():
            piece.rename(tmp_path / piece.name)
    assert raised(StreamMismatch, begin, tmp_path, key="id").actual == "nothing"


def test_a_driver_that_is_fenced_says_so_and_leaves_the_pieces_to_the_other(tmp_path: Path) -> None:
    committer, folder = begin(tmp_path, key="id")
    write(folder, 0, 0, 3, keyed=True)
    # What a driver on another machine does.
    (tmp_path / ".tmp").rename(tmp_path / "taken")
    folder.rename(folder.with_name("other"))
    raised(ProducerFenced, committer.finish, [0])
    assert (folder.with_name("other") / piece_path(folder, 0).name / "piece.json").exists()


def test_two_data_sets_are_written_to_one_stream(tmp_path: Path) -> None:
    committers = {}
    for at, name in enumerate(("math", "code")):
        stream = tmp_path / "stream"
        writer = ChunkWriter(stream, 4, writer=name, writers=2)
        folder = stream / ".writers" / name / ".ray" / "write"
        committers[name] = Committer(writer, folder, key="id")
        write(folder, 0, 100 * at, 100 * at + 6, keyed=True)
    threads = [threading.Thread(target=one.finish, args=([0],)) for one in committers.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids(stream)) == [*range(6), *range(100, 106)]
    assert (stream / "stream.end").exists()
    assert len(list(stream.glob("chunk_*.jsonl"))) == 3
