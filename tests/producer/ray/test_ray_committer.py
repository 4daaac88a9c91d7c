"""What write tasks have written becomes chunks: in order, once, while others still run; and the pieces they leave."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from lazyshard.errors import ChunkCorrupt, StreamMismatch, WriterFailed
from lazyshard.format.batch import check_lines
from lazyshard.store.files import open_file
from lazyshard.stream import ChunkWriter
from lazyshard_producer import ray
from lazyshard_producer.ray import Committer, piece_path, read_piece, write_piece
from tests.harness.processes.producing import ids, published, seal
from tests.stream.streams import raised, refusal_of

DEADLINE_S = 60.0
LINES = [b'{"id":%d}\n' % number for number in range(5)]


def write(folder: Path, task: int, first: int, last: int) -> None:
    write_piece(folder, task, (b'{"id":%d}\n' % number for number in range(first, last)))


def write_all(folder: Path, sizes: Sequence[int]) -> None:
    """Pieces of these sizes, one after another."""
    for task, bounds in enumerate(pairwise(accumulate(sizes, initial=0))):
        write(folder, task, *bounds)


def begin(out: Path, samples_per_chunk: int = 4) -> tuple[Committer, Path]:
    folder = out / ".ray" / "write"
    writer = ChunkWriter(out, samples_per_chunk)
    try:
        folder.mkdir(parents=True)
        committer = Committer(writer, folder)
    except BaseException:
        writer.close(end=False)
        raise
    return committer, folder


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


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


def test_chunks_are_published_while_tasks_still_run_and_some_gave_nothing(tmp_path: Path) -> None:
    committer, folder = begin(tmp_path)
    write(folder, 2, 6, 9)
    write(folder, 0, 0, 5)
    wait(lambda: published(tmp_path) == 1)
    assert ids(tmp_path) == [0, 1, 2, 3]
    write(folder, 1, 5, 6)
    wait(lambda: published(tmp_path) == 2)
    write(folder, 4, 9, 11)
    committer.finish([4, 2, 0, 1])
    assert ids(tmp_path) == list(range(11))


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


def test_a_stream_of_another_program(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 4) as writer:
        for number in range(4):
            writer.write({"id": number})
        writer.close(end=False)
    raised(StreamMismatch, begin, tmp_path)


def test_a_piece_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "MISSING_S", 0.0)
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


def test_a_piece_that_was_lost_in_part_ends_it_and_takes_the_folder_away(tmp_path: Path) -> None:
    committer, folder = begin(tmp_path)
    write(folder, 1, 0, 5)
    (folder / "part").write_bytes(piece_path(folder, 1).read_bytes()[:-1])
    piece_path(folder, 1).unlink()
    (folder / "part").rename(piece_path(folder, 0))
    wait(lambda: not folder.exists())
    refusal_of(WriterFailed, "no longer publishes", write, folder, 2, 0, 1)
    raised(ChunkCorrupt, committer.finish, [0])


def test_a_filesystem_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committer, folder = begin(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lazyshard.stream.publishing.sync", refuse)
    write(folder, 0, 0, 9)
    refusal_of(WriterFailed, "No space left", committer.finish, [0])
    monkeypatch.undo()
    committer, folder = begin(tmp_path)
    write(folder, 0, 0, 9)
    committer.finish([0])
    assert ids(tmp_path) == list(range(9))


@pytest.mark.parametrize(("most_bytes", "parts"), [(1, [1] * 5), (18, [2, 2, 1]), (99, [5])])
def test_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int, parts: list[int]) -> None:
    monkeypatch.setattr(ray, "_PART_BYTES", most_bytes)
    write_piece(tmp_path, 7, LINES)
    assert [path.name for path in tmp_path.iterdir()] == ["00000007.piece"]
    left = LINES
    for part, rows in zip(read_piece(open_file(piece_path(tmp_path, 7))), parts, strict=True):
        expected = check_lines(left[:rows])
        assert (part.data, part.ends.tolist()) == (expected.data, expected.ends.tolist())
        assert part.digests.tolist() == expected.digests.tolist()
        left = left[rows:]
    write_piece(tmp_path, 0, [])
    assert list(read_piece(open_file(piece_path(tmp_path, 0)))) == []


def test_what_is_not_whole_is_not_seen(tmp_path: Path) -> None:
    def broken_off() -> Iterator[bytes]:
        yield from LINES
        assert not piece_path(tmp_path, 1).exists()
        assert list(tmp_path.iterdir()) != []
        raise ValueError("no more")

    refusal_of(ValueError, "no more", write_piece, tmp_path, 1, broken_off())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [0, 5, 50, 100, -1])
def test_a_piece_that_was_cut(tmp_path: Path, kept: int) -> None:
    write_piece(tmp_path, 1, LINES)
    path = piece_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ChunkCorrupt, match="00000001"):
        list(read_piece(open_file(path)))


def test_a_row_that_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "_PART_BYTES", 18)
    write_piece(tmp_path, 1, LINES)
    path = piece_path(tmp_path, 1)
    path.write_bytes(path.read_bytes().replace(b'{"id":3}', b'{"id":9}'))
    parts = read_piece(open_file(path))
    assert next(parts).data == b"".join(LINES[:2])
    with pytest.raises(ChunkCorrupt, match="row 3"):
        next(parts)
