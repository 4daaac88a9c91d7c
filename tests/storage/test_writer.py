from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import (
    FileRefused,
    LazyShardError,
    RowInvalid,
    StreamEnded,
    StreamInvalid,
    StreamMismatch,
    WriterFailed,
)
from lazyshard.storage import chunk_sequence
from tests.storage.streams import foreign, head, names, produce, rows, seal

PUBLISHED = [".producer.lock", "head.json", "stream.end", "stream.json", "stream.owner"]


def chunk_files(*numbers: int) -> list[str]:
    return [name for n in numbers for name in (f"chunk_{n:05d}.jsonl", f"chunk_{n:05d}.jsonl.completed")]


@pytest.mark.parametrize(
    ("samples", "sizes"), [(0, []), (1, [1]), (2, [2]), (3, [2, 1]), (4, [2, 2]), (7, [2, 2, 2, 1])]
)
def test_chunks_hold_exactly_s_rows_and_only_the_last_fewer(samples: int, sizes: list[int], tmp_path: Path) -> None:
    produce(tmp_path, samples)
    assert names(tmp_path) == sorted(PUBLISHED + chunk_files(*range(len(sizes))))
    assert [seal(tmp_path, n).samples for n in range(len(sizes))] == sizes
    assert json.loads((tmp_path / "stream.end").read_bytes()) == {"format": 1, "chunks": len(sizes), "samples": samples}
    assert list(StreamReader(tmp_path)) == rows(0, samples)


def test_dict_and_bytes_rows_are_kept_as_they_are(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 4) as writer:
        assert writer.write({"b": "ü", "a": [1, None]}) == {"b": "ü", "a": [1, None]}
        assert writer.write(b'{ "x" : 1.50 }\r\n') == {"x": 1.5}
        writer.write(b'{"y":18446744073709551615}')
    assert (tmp_path / "chunk_00000.jsonl").read_bytes() == (
        '{"b":"ü","a":[1,null]}\n{ "x" : 1.50 }\n{"y":18446744073709551615}\n'.encode()
    )


@pytest.mark.parametrize(
    "bad",
    [
        *(b"", b"\n", b"[]", b"{", b'{"a":1}\n{"a":2}', b'{"a":NaN}', b'{"a":"\xff"}', b'{"a":99999999999999999999}'),
        *({"a": float("nan")}, {"a": 2**70}, {1: 2}, {"a": {1}}, [1], "text", None, bytearray(b"{}")),
    ],
)
def test_refused_row_is_not_added_and_the_writer_goes_on(bad: Any, tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        writer.write({"id": 0}, tokens=3)
        with pytest.raises(RowInvalid):
            writer.write(bad, tokens=4, source={"line": 9})
        assert writer.samples == 1
        writer.write({"id": 1}, tokens=5)
    assert list(StreamReader(tmp_path)) == rows(0, 2)
    tokens = seal(tmp_path, 0).tokens
    assert tokens is not None and tokens.tolist() == [3, 5]
    assert seal(tmp_path, 0).source is None


@pytest.mark.parametrize(
    ("tokens", "error"), [(-1, ValueError), (2**32, ValueError), (1.5, TypeError), ("4", TypeError)]
)
def test_refused_tokens_leave_no_half_added_row(tokens: Any, error: type[Exception], tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        with pytest.raises(error):
            writer.write({"id": 99}, tokens=tokens)
        writer.write({"id": 0}, tokens=1)
        writer.write({"id": 1}, tokens=2)
    assert list(StreamReader(tmp_path)) == rows(0, 2)


def test_tokens_are_kept_only_where_every_row_of_the_chunk_has_one(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        for tokens in (7, 2**32 - 1, 5, None, 0):
            writer.write({}, tokens=tokens)
    found = [seal(tmp_path, n).tokens for n in range(3)]
    assert [None if tokens is None else tokens.tolist() for tokens in found] == [[7, 2**32 - 1], None, [0]]


def test_resume_goes_on_after_the_last_published_chunk_byte_for_byte(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "whole", 3) as writer:
        for row in rows(0, 8):
            writer.write(row, source={"line": row["id"] + 1})
    first = ChunkWriter(tmp_path / "parts", 3)
    for row in rows(0, 5):
        first.write(row, source={"line": row["id"] + 1})
    assert (first.samples, first.published_samples, first.source) == (5, 3, {"line": 3})
    first.close(end=False)
    with ChunkWriter(tmp_path / "parts") as second:
        assert (second.published_chunks, second.published_samples, second.source) == (1, 3, {"line": 3})
        assert second.stream_id == first.stream_id
        for row in rows(second.source["line"], 8):
            second.write(row, source={"line": row["id"] + 1})
    assert names(tmp_path / "parts") == names(tmp_path / "whole")
    for number in range(3):
        name = f"chunk_{number:05d}.jsonl"
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        parts, whole = seal(tmp_path / "parts", number), seal(tmp_path / "whole", number)
        assert parts.source == whole.source and parts.digests.tolist() == whole.digests.tolist()


def test_source_none_keeps_the_one_before_and_close_can_set_the_last(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 1)
    writer.write({}, source=1)
    writer.write({})
    writer.close()
    assert [seal(tmp_path, n).source for n in range(2)] == [1, 1]


def test_source_that_is_not_json_fails_the_writer_and_publishes_nothing_wrong(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer.write({"id": 0})
    with pytest.raises(TypeError):
        writer.write({"id": 1}, source={1, 2})
    for call in (lambda: writer.write({"id": 2}), writer.heartbeat, writer.close):
        with pytest.raises(WriterFailed, match=r"ended by .*open the stream again") as caught:
            call()
        assert caught.value.published_samples == 0
    produce(tmp_path, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


def test_interrupt_in_the_middle_of_a_write_fails_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer.write({"id": 0})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lazyshard.storage.piece_file.sync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer.write({"id": 1})
    monkeypatch.undo()
    with pytest.raises(WriterFailed, match="KeyboardInterrupt"):
        writer.close()
    assert head(tmp_path).state == "failed"
    produce(tmp_path, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


def test_context_manager_ends_the_stream_on_success(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        writer.write({})
    assert (head(tmp_path).ended, head(tmp_path).state) == (True, "finished")
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write({})
    with pytest.raises(ValueError, match="is closed"):
        writer.heartbeat()


@pytest.mark.parametrize(("error", "state"), [(RuntimeError, "failed"), (KeyboardInterrupt, "idle")])
def test_context_manager_leaves_the_stream_resumable_on_an_exception(
    error: type[BaseException], state: str, tmp_path: Path
) -> None:
    with pytest.raises(error), ChunkWriter(tmp_path, 2) as writer:
        for row in rows(0, 3):
            writer.write(row)
        raise error
    assert (head(tmp_path).ended, head(tmp_path).state, head(tmp_path).samples) == (False, state, 2)
    assert names(tmp_path) == sorted({*PUBLISHED, *chunk_files(0)} - {"stream.end"})
    produce(tmp_path, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (StreamEnded("over\n there"), "over there"),
        (RuntimeError("no \udcff"), "RuntimeError: no \\udcff"),
        (ValueError("x" * 2000), f"ValueError: {'x' * 988}"),
        (KeyboardInterrupt("now"), ""),
    ],
)
def test_readers_are_told_by_what_error_a_producer_has_failed(error: BaseException, note: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)), ChunkWriter(tmp_path, 2):
        raise error
    assert head(tmp_path).note == note


def test_readers_are_told_why_the_end_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = ChunkWriter(tmp_path, 2)
    monkeypatch.setattr(chunk_sequence, "publish_end", refuse)
    with pytest.raises(WriterFailed):
        writer.close()
    assert head(tmp_path).state == "failed"
    assert head(tmp_path).note.startswith(f"{tmp_path}: No space left on device. 0 samples are published")


def test_ended_stream_takes_nothing_more_and_says_how_much_it_holds(tmp_path: Path) -> None:
    produce(tmp_path, 3)
    before = {name: (tmp_path / name).read_bytes() for name in chunk_files(0, 1)}
    with pytest.raises(StreamEnded, match="ended with 3 samples") as caught:
        ChunkWriter(tmp_path, 2)
    assert (caught.value.samples, caught.value.directory) == (3, str(tmp_path))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert ".tmp" not in names(tmp_path)


def test_other_samples_per_chunk_is_refused_without_taking_the_stream_over(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer._lock._lock.release()  # as seen from another machine, where no file lock holds
    with pytest.raises(StreamMismatch) as caught:
        ChunkWriter(tmp_path, 3)
    assert (caught.value.expected, caught.value.actual) == ("3", "2")
    writer.heartbeat()
    writer.close()


@pytest.mark.parametrize("wrong", [0, -1, 10**9, 1.5, True, "2"])
def test_impossible_samples_per_chunk_is_refused_and_nothing_made(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="samples_per_chunk"):
        ChunkWriter(tmp_path / "stream", wrong)
    with pytest.raises(ValueError, match="samples_per_chunk is needed"):
        ChunkWriter(tmp_path / "stream")
    assert names(tmp_path) == []


def test_directory_with_chunks_of_others_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    foreign(tmp_path, b"{}\n")
    with pytest.raises(StreamInvalid, match=r"no stream\.json"):
        ChunkWriter(tmp_path, 2)
    assert names(tmp_path) == chunk_files(0)


def test_file_where_the_directory_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stream").write_bytes(b"")
    with pytest.raises(OSError):
        ChunkWriter(tmp_path / "stream", 2)


def test_link_in_place_of_the_temporary_directory_is_refused_and_its_files_spared(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_bytes(b"keep")
    produce(tmp_path / "stream", 1, end=False)
    (tmp_path / "stream" / ".tmp").symlink_to(tmp_path / "home")
    with pytest.raises(FileRefused, match="found a link"):
        ChunkWriter(tmp_path / "stream", 2)
    assert (tmp_path / "home" / "precious").read_bytes() == b"keep"


def test_directories_above_a_new_stream_are_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("lazyshard.storage.creation.sync_directory", synced.append)
    ChunkWriter(tmp_path / "a" / "b", 2).close(end=False)
    assert synced[:2] == [tmp_path / "a", tmp_path]


def test_head_says_what_is_published_and_by_whom(tmp_path: Path) -> None:
    times = iter(range(1000, 2000))
    writer = ChunkWriter(tmp_path, 2, clock=lambda: float(next(times)))
    for row in rows(0, 5):
        writer.write(row)
    found = head(tmp_path)
    assert (found.chunks, found.samples, found.ended, found.state) == (2, 4, False, "running")
    assert (found.pid, found.host) == (os.getpid(), os.uname().nodename)
    assert found.rate >= 0 and 1000 <= found.updated_at < 2000
    writer.heartbeat("waiting")
    waiting = head(tmp_path)
    assert (waiting.state, waiting.open, waiting.row_at) == ("waiting", 1, waiting.updated_at)
    assert waiting.updated_at > found.updated_at
    writer.heartbeat()
    assert (head(tmp_path).open, head(tmp_path).row_at) == (1, waiting.row_at)
    writer.close(end=False)
    assert (head(tmp_path).state, head(tmp_path).open, head(tmp_path).row_at) == ("idle", 0, 0.0)


@pytest.mark.parametrize("state", ["finished", "asleep"])
def test_state_that_would_lie_is_refused(state: Any, tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2)
    with pytest.raises(ValueError, match="state is one of running, waiting, idle, failed"):
        writer.heartbeat(state)
    with pytest.raises(ValueError, match="state is one of"):
        writer.close(end=False, state=state)
    assert head(tmp_path).state == "running"
    writer.close(end=False)


def test_write_beats_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.storage.writer.HEARTBEAT_S", -1.0)
    times = iter(range(1000, 2000))
    writer = ChunkWriter(tmp_path, 10, clock=lambda: float(next(times)))
    before = head(tmp_path).updated_at
    writer.write({})
    assert head(tmp_path).updated_at > before
    writer.close(end=False)


def test_row_written_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.storage.open_chunk.BUFFER_BYTES", 1)
    produce(tmp_path, 5)
    assert list(StreamReader(tmp_path)) == rows(0, 5)


def test_errors_of_a_writer_survive_as_lazyshard_errors(tmp_path: Path) -> None:
    produce(tmp_path, 1)
    with pytest.raises(LazyShardError):
        ChunkWriter(tmp_path, 2)
