import threading
import time
from pathlib import Path

import pytest

from lazyshard.errors import ChunkCorrupt, LazyShardError, StreamMismatch, WriterFailed
from lazyshard.stream import ChunkWriter
from lazyshard_producer.ray import pieces
from lazyshard_producer.ray.pieces import Committer, PieceWriter, piece_path
from tests.harness.processes.producing import ids, published, seal

DEADLINE_S = 60.0


def write(folder: Path, task: int, first: int, last: int) -> None:
    piece = PieceWriter(folder, task)
    piece.add([b'{"id":%d}\n' % number for number in range(first, last)])
    piece.commit()


def begin(out: Path, samples_per_chunk: int = 4) -> tuple[Committer, Path]:
    folder = out / ".ray" / "write"
    writer = ChunkWriter(out, samples_per_chunk)
    try:
        folder.mkdir(parents=True)
        committer = Committer(writer, folder)
    except BaseException:
        writer.close(end=False)
        raise
    committer.start()
    return committer, folder


def wait_for_chunks(out: Path, chunks: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while published(out) < chunks:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("sizes", [[], [0], [3], [4, 4], [1, 2, 3, 4, 5], [17], [0, 5, 0, 0, 3]])
def test_pieces_of_any_size_become_chunks_of_one_size(tmp_path: Path, sizes: list[int]) -> None:
    committer, folder = begin(tmp_path)
    for task, size in enumerate(sizes):
        write(folder, task, sum(sizes[:task]), sum(sizes[:task]) + size)
    committer.finish(range(len(sizes)))
    assert ids(tmp_path) == list(range(sum(sizes)))
    chunks = -(-sum(sizes) // 4)
    assert len(list(tmp_path.glob("chunk_*.jsonl"))) == chunks
    assert [seal(tmp_path, chunk)["source"] for chunk in range(chunks)] == [
        {"kind": "ray", "rows": min(4 * chunk + 4, sum(sizes))} for chunk in range(chunks)
    ]
    assert (tmp_path / "stream.end").exists()
    assert not (tmp_path / ".ray").exists()


def test_chunks_are_published_while_tasks_still_run(tmp_path: Path) -> None:
    committer, folder = begin(tmp_path)
    write(folder, 2, 6, 9)
    write(folder, 0, 0, 5)
    wait_for_chunks(tmp_path, 1)
    assert ids(tmp_path) == [0, 1, 2, 3]
    write(folder, 1, 5, 6)
    wait_for_chunks(tmp_path, 2)
    committer.finish([2, 0, 1])
    assert ids(tmp_path) == list(range(9))


def test_a_task_that_runs_again_after_its_piece_was_taken(tmp_path: Path) -> None:
    committer, folder = begin(tmp_path)
    write(folder, 0, 0, 4)
    wait_for_chunks(tmp_path, 1)
    write(folder, 0, 0, 4)
    write(folder, 1, 4, 6)
    committer.finish([0, 1])
    assert ids(tmp_path) == list(range(6))


def test_tasks_that_gave_nothing_leave_a_gap_only_until_the_end(tmp_path: Path) -> None:
    committer, folder = begin(tmp_path)
    write(folder, 0, 0, 3)
    write(folder, 3, 3, 7)
    committer.finish([3, 0])
    assert ids(tmp_path) == list(range(7))


@pytest.mark.parametrize("sizes", [[6, 7], [1] * 13, [13]])
def test_a_write_that_is_started_anew_passes_over_what_is_published(tmp_path: Path, sizes: list[int]) -> None:
    committer, folder = begin(tmp_path)
    write(folder, 0, 0, 9)
    wait_for_chunks(tmp_path, 2)
    committer.stop()
    committer.stop()
    assert (committer.failure, ids(tmp_path), (tmp_path / ".ray").exists()) == (None, list(range(8)), False)
    before = (tmp_path / "chunk_00001.jsonl.completed").read_bytes()

    committer, folder = begin(tmp_path)
    for task, size in enumerate(sizes):
        write(folder, task, sum(sizes[:task]), sum(sizes[:task]) + size)
    committer.finish(range(len(sizes)))
    assert ids(tmp_path) == list(range(13))
    assert (tmp_path / "chunk_00001.jsonl.completed").read_bytes() == before


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        ([(0, 6), (7, 9)], "expected as row 6 the one published as sample 6, found another"),
        ([(1, 9)], "expected as row 0 the one published as sample 0, found another"),
        ([(0, 5), (5, 7)], "expected the 8 rows that are published, found 7 in all"),
    ],
)
def test_other_rows_than_those_published_are_refused(tmp_path: Path, pieces: list[tuple[int, int]], match: str) -> None:
    committer, folder = begin(tmp_path)
    write(folder, 0, 0, 8)
    wait_for_chunks(tmp_path, 2)
    committer.stop()
    committer, folder = begin(tmp_path)
    for task, (first, last) in enumerate(pieces):
        write(folder, task, first, last)
    with pytest.raises(StreamMismatch, match=f"{match}.*preserve_order"):
        committer.finish(range(len(pieces)))
    assert ids(tmp_path) == list(range(8))
    assert not (tmp_path / "stream.end").exists()


def test_a_stream_of_another_program(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 4) as writer:
        for number in range(4):
            writer.write({"id": number})
        writer.close(end=False)
    with pytest.raises(StreamMismatch, match="expected a stream that Ray has begun, found one of another program"):
        begin(tmp_path)


def test_a_piece_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MISSING_S", 0.0)
    committer, folder = begin(tmp_path)
    write(folder, 0, 0, 5)
    with pytest.raises(FileNotFoundError, match=r"00000001\.piece"):
        committer.finish([0, 1])
    assert ids(tmp_path) == [0, 1, 2, 3]
    assert not (tmp_path / "stream.end").exists()


def test_stopped_while_it_waits_for_a_piece(tmp_path: Path) -> None:
    committer, folder = begin(tmp_path)
    write(folder, 0, 0, 5)

    def stop_after_the_first_chunk() -> None:
        wait_for_chunks(tmp_path, 1)
        committer.stop()

    thread = threading.Thread(target=stop_after_the_first_chunk)
    thread.start()
    with pytest.raises(WriterFailed, match="stopped before the last row"):
        committer.finish([0, 1])
    thread.join()
    assert (committer.failure, ids(tmp_path), (tmp_path / "stream.end").exists()) == (None, [0, 1, 2, 3], False)


def test_a_piece_that_was_lost_in_part_ends_it_and_takes_the_folder_away(tmp_path: Path) -> None:
    committer, folder = begin(tmp_path)
    path = piece_path(folder, 0)
    write(folder, 1, 0, 5)
    damaged = piece_path(folder, 1).read_bytes()[:-1]
    piece_path(folder, 1).unlink()
    (folder / "part").write_bytes(damaged)
    (folder / "part").rename(path)
    deadline = time.monotonic() + DEADLINE_S
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    with pytest.raises(FileNotFoundError):
        PieceWriter(folder, 2)
    with pytest.raises(ChunkCorrupt, match="expected a whole piece"):
        committer.finish([0])


def test_a_filesystem_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committer, folder = begin(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lazyshard.stream.open_chunk.sync", refuse)
    write(folder, 0, 0, 9)
    with pytest.raises(WriterFailed, match="No space left"):
        committer.finish([0])
    monkeypatch.undo()
    committer, folder = begin(tmp_path)
    write(folder, 0, 0, 9)
    committer.finish([0])
    assert ids(tmp_path) == list(range(9))


def test_the_stream_is_locked_for_as_long_as_it_is_published(tmp_path: Path) -> None:
    committer, folder = begin(tmp_path)
    with pytest.raises(LazyShardError, match="already producing"):
        begin(tmp_path)
    committer.stop()
    assert not folder.exists()
