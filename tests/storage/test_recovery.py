from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import ChunkCorrupt, ChunkMissing, SealInvalid, StreamEnded, StreamInvalid, VersionUnsupported
from lazyshard.format.names import HEAD_RESERVE
from lazyshard.storage import durable
from tests.storage.streams import head, names, produce, rows


def live(directory: Path) -> Path:
    """Three full chunks of two, not ended."""
    return produce(directory, 6, end=False)


def test_leftovers_of_a_crash_are_cleared(tmp_path: Path) -> None:
    live(tmp_path)
    (tmp_path / "chunk_00003.jsonl").write_bytes(b'{"id":6}\n{"i')
    for folder in (".tmp", ".tmp/1.0123456789abcdef", ".tmp/9.00000000deadbeef.gone"):
        (tmp_path / folder).mkdir()
        for name in ("chunk_00003.jsonl", "head.json", "chunk_00003.jsonl.completed", "stream.owner"):
            (tmp_path / folder / name).write_bytes(b"half")
    with ChunkWriter(tmp_path) as writer:
        assert writer.published_samples == 6
        (left,) = (tmp_path / ".tmp").iterdir()
        assert (left.name.partition(".")[0], names(left)) == ("10", [HEAD_RESERVE])
        assert "chunk_00003.jsonl" not in names(tmp_path)
    assert ".tmp" not in names(tmp_path)
    assert list(StreamReader(tmp_path)) == rows(0, 6)


def test_directory_is_synced_before_a_seal_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live(tmp_path)
    steps: list[str] = []
    sync, listed = durable.sync_directory, os.listdir

    def noted_sync(path: Path) -> None:
        steps.append(f"sync {path.name}")
        sync(path)

    def noted_list(path: Path) -> list[str]:
        steps.append(f"list {path.name}")
        return listed(path)

    monkeypatch.setattr("lazyshard.storage.recovery.sync_directory", noted_sync)
    monkeypatch.setattr(os, "listdir", noted_list)
    ChunkWriter(tmp_path).close(end=False)
    assert [step for step in steps if ".tmp" not in step][:2] == [f"sync {tmp_path.name}", f"list {tmp_path.name}"]


@pytest.mark.parametrize("with_head", [True, False])
def test_crash_between_the_last_partial_seal_and_the_end_rolls_forward(with_head: bool, tmp_path: Path) -> None:
    produce(tmp_path, 5)
    (tmp_path / "stream.end").unlink()
    if not with_head:
        (tmp_path / "head.json").unlink()
    with pytest.raises(StreamEnded, match="5 samples"):
        ChunkWriter(tmp_path)
    assert json.loads((tmp_path / "stream.end").read_bytes()) == {"format": 1, "chunks": 3, "samples": 5}
    assert (head(tmp_path).ended, head(tmp_path).samples) == (True, 5)
    assert ".tmp" not in names(tmp_path)
    assert list(StreamReader(tmp_path)) == rows(0, 5)


def test_crash_between_the_end_and_the_head_finishes_the_head(tmp_path: Path) -> None:
    live(tmp_path)
    (tmp_path / "stream.end").write_bytes(b'{"format":1,"chunks":3,"samples":6}')
    with pytest.raises(StreamEnded):
        ChunkWriter(tmp_path)
    assert (head(tmp_path).ended, head(tmp_path).state) == (True, "finished")


def test_end_that_fails_after_the_partial_chunk_names_it_to_no_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ChunkWriter(tmp_path, 2)
    for row in rows(0, 3):
        writer.write(row)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lazyshard.storage.chunk_sequence.publish_end", full)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert (head(tmp_path).chunks, head(tmp_path).samples, head(tmp_path).state) == (1, 2, "failed")
    assert StreamReader(tmp_path).seen.samples == 2
    monkeypatch.undo()
    with pytest.raises(StreamEnded):
        ChunkWriter(tmp_path)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


def cut_seal(stream: Path) -> None:
    data = (stream / "chunk_00002.jsonl.completed").read_bytes()
    (stream / "chunk_00002.jsonl.completed").write_bytes(data[: len(data) // 2])


def other_seal(stream: Path) -> None:
    (stream / "chunk_00002.jsonl.completed").write_bytes((stream / "chunk_00001.jsonl.completed").read_bytes())


def future_seal(stream: Path) -> None:
    values = json.loads((stream / "chunk_00002.jsonl.completed").read_bytes())
    (stream / "chunk_00002.jsonl.completed").write_text(json.dumps(values | {"format": 3}))


def longer_seal(stream: Path) -> None:
    produce(stream.with_name("other"), 9, 3)
    for name in ("chunk_00002.jsonl", "chunk_00002.jsonl.completed"):
        (stream / name).write_bytes((stream.with_name("other") / name).read_bytes())


def wrong_end(stream: Path) -> None:
    (stream / "stream.end").write_bytes(b'{"format":1,"chunks":2,"samples":4}')


def remove(name: str) -> Callable[[Path], None]:
    return lambda stream: (stream / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    return lambda stream: os.truncate(stream / name, 5)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove("chunk_00001.jsonl.completed"), StreamInvalid, "chunk_00001.jsonl.completed is missing although"),
        (remove("chunk_00000.jsonl"), ChunkMissing, "chunk_00000.jsonl: sealed, but its data file is missing"),
        (remove("chunk_00002.jsonl"), ChunkMissing, "chunk_00002.jsonl: sealed, but its data file is missing"),
        (cut("chunk_00002.jsonl"), ChunkCorrupt, "chunk_00002.jsonl: expected 18 bytes as sealed, found 5"),
        (cut_seal, SealInvalid, "chunk_00002.jsonl.completed: expected a JSON object"),
        (other_seal, SealInvalid, "expected 2, as in the file's name, found 1"),
        (future_seal, VersionUnsupported, "written in stream format 3"),
        (longer_seal, StreamInvalid, "chunk 2 holds 3 samples, the stream has 2 a chunk"),
        (wrong_end, StreamInvalid, "says 2 chunks with 4 samples, the seals say 3 with 6"),
        (cut("stream.json"), ValueError, "stream.json: expected a JSON object"),
    ],
)
def test_damaged_stream_is_refused_and_nothing_removed(
    damage: Callable[[Path], None], error: type[Exception], message: str, tmp_path: Path
) -> None:
    stream = live(tmp_path / "stream")
    (stream / "chunk_00003.jsonl").write_bytes(b"unsealed")
    damage(stream)
    before = set(names(stream))
    for _ in range(2):
        with pytest.raises(error, match=message):
            ChunkWriter(stream)
    assert set(names(stream)) - {".tmp"} == before
