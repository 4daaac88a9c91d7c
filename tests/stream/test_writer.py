"""Rows to published chunks, one by one and many at a time."""

from __future__ import annotations

import errno
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import (
    ChunkCorrupt,
    ChunkMissing,
    RowInvalid,
    SealInvalid,
    StreamEnded,
    StreamInvalid,
    StreamMismatch,
    VersionUnsupported,
    WriterFailed,
)
from lazyshard.format.batch import check_lines
from lazyshard.format.names import HEAD_RESERVE
from lazyshard.store import durable
from tests.stream.streams import foreign, forked, head, names, produce, python, rows, seal

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
    end = {"format": 1, "chunks": len(sizes), "samples": samples}
    assert json.loads((tmp_path / "stream.end").read_bytes()) == end
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
        with pytest.raises(WriterFailed) as caught:
            call()
        assert caught.value.published_samples == 0
    produce(tmp_path, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


def test_interrupt_in_the_middle_of_a_write_fails_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer.write({"id": 0})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lazyshard.stream.open_chunk.sync", interrupt)
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
    for call in (lambda: writer.write({}), lambda: writer.write_lines([b"{}"]), writer.heartbeat):
        with pytest.raises(ValueError, match="is closed"):
            call()


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


def test_ended_stream_takes_nothing_more_and_says_how_much_it_holds(tmp_path: Path) -> None:
    produce(tmp_path, 3)
    before = {name: (tmp_path / name).read_bytes() for name in chunk_files(0, 1)}
    with pytest.raises(StreamEnded) as caught:
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


def test_directories_above_a_new_stream_are_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("lazyshard.stream.writer_opening.sync_directory", synced.append)
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
    monkeypatch.setattr("lazyshard.stream.writer.HEARTBEAT_S", -1.0)
    times = iter(range(1000, 2000))
    writer = ChunkWriter(tmp_path, 10, clock=lambda: float(next(times)))
    before = head(tmp_path).updated_at
    writer.write({})
    assert head(tmp_path).updated_at > before
    writer.close(end=False)


def lines(start: int, stop: int) -> list[bytes]:
    return [b'{"id":%d}\n' % number for number in range(start, stop)]


def write_all(writer: ChunkWriter, given: list[bytes], at_once: int) -> None:
    """Writes lines so many at a time, as far as there is room, with the number of lines so far as the position."""
    at = 0
    while at < len(given):
        part = given[at : at + min(at_once, writer.room)]
        at += len(part)
        writer.write_lines(part, source=at)


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_lines_come_out_as_if_written_one_by_one(at_once: int, tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "one", 3, clock=lambda: 5.0) as writer:
        for number, line in enumerate(lines(0, 8)):
            writer.write(line, source=number + 1)
    with ChunkWriter(tmp_path / "many", 3, clock=lambda: 5.0) as writer:
        write_all(writer, lines(0, 8), at_once)
        assert (writer.samples, writer.room, writer.published_chunks, writer.full_chunks) == (8, 1, 2, 2)
    assert names(tmp_path / "one") == names(tmp_path / "many")
    for name in names(tmp_path / "one"):
        if name.startswith("chunk_"):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()
    assert list(StreamReader(tmp_path / "many")) == rows(0, 8)


@pytest.mark.parametrize("piece", [1, 20, 1 << 20])
def test_small_and_large_pieces_keep_their_order(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.stream.open_chunk.PIECE_BYTES", piece)
    monkeypatch.setattr("lazyshard.stream.open_chunk.BUFFER_BYTES", 30)
    with ChunkWriter(tmp_path, 50) as writer:
        for start, stop in ((0, 1), (1, 2), (2, 9), (9, 10), (10, 30)):
            writer.write_lines(lines(start, stop))
            writer.write({"id": 1000 + stop})
    found = [row["id"] for row in StreamReader(tmp_path)]
    assert found == [0, 1001, 1, 1002, *range(2, 9), 1009, 9, 1010, *range(10, 30), 1030]


def test_writing_back_begins_before_the_chunk_is_full_and_takes_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr("lazyshard.stream.open_chunk.PIECE_BYTES", 1)
    monkeypatch.setattr("lazyshard.stream.open_chunk.BUFFER_BYTES", 25)
    monkeypatch.setattr(
        "lazyshard.stream.open_chunk.start_writing_back", lambda fd, offset, size: begun.append((offset, size))
    )
    with ChunkWriter(tmp_path, 9) as writer:
        for number in range(8):
            writer.write_lines(lines(number, number + 1))
        assert begun == [(0, 27), (27, 27)]


def test_rows_that_name_a_key_twice_are_told(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 9) as writer:
        assert writer.write_lines([]) == ()
        assert writer.write_lines([b"{}\n", b'{"a":1,"a":2}\n', b'{"b":{"c":1,"c":2}}\n', b'{"a":":"}\n']) == (1, 2)


@pytest.mark.parametrize("checked", [False, True])
def test_refused_line_is_told_by_its_index_and_the_rows_before_it_are_written(checked: bool, tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 4) as writer:
        writer.write({"id": 0}, source="before")
        given: Any = [b'{"id":1}\n', b'{"id":2}\r\n', b'{"id":nul}\n']
        with pytest.raises(RowInvalid, match="not a row: ") as caught:
            writer.write_lines(check_lines(given) if checked else given, source="after")
        assert (caught.value.index, caught.value.byte) == (2, 6)
        assert (writer.samples, writer.room, writer.published_chunks) == (3, 1, 0)
        writer.write_lines(lines(3, 4))
    assert list(StreamReader(tmp_path)) == rows(0, 4)
    assert seal(tmp_path, 0).source == "before"


@pytest.mark.parametrize("last", [b'{"id":2}\n', b"{"])
@pytest.mark.parametrize("checked", [False, True])
def test_more_lines_than_there_is_room_for_are_refused_whole(checked: bool, last: bytes, tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        given: Any = [*lines(0, 2), last]
        with pytest.raises(ValueError, match="3 lines are more than the 2 that the open chunk has room for"):
            writer.write_lines(check_lines(given) if checked else given)
        assert (writer.samples, writer.room) == (0, 2)
        writer.write_lines(lines(0, 2))
        assert writer.room == 2
    assert list(StreamReader(tmp_path)) == rows(0, 2)


def test_chunk_with_lines_has_no_lengths_even_if_other_rows_have(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        writer.write({"id": 0}, tokens=7)
        writer.write_lines(lines(1, 2))
    assert seal(tmp_path, 0).tokens is None


def test_disk_that_fails_fails_the_writer_and_a_new_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer.write_lines(lines(0, 2))

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lazyshard.stream.open_chunk.write_all", fail)
        for _ in range(2):
            with pytest.raises(WriterFailed, match="No space left"):
                writer.write_lines(lines(2, 4))
    writer.close(end=False)
    produce(tmp_path, 5)
    assert list(StreamReader(tmp_path)) == rows(0, 5)


def test_writer_dropped_with_rows_says_how_many_are_not_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = ChunkWriter(tmp_path, 5)
    for number in range(3):
        writer.write({"id": number})
    del writer
    gc.collect()
    (message,) = caplog.messages
    assert "3 rows of its open chunk are not published" in message
    produce(tmp_path, 1, 5)  # the lock is free


@pytest.mark.parametrize(("samples", "end"), [(0, None), (2, None), (1, True), (1, False)])
def test_writer_without_rows_or_closed_says_nothing(
    samples: int, end: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = ChunkWriter(tmp_path, 2)
    for number in range(samples):
        writer.write({"id": number})
    if end is not None:
        writer.close(end)
    del writer
    gc.collect()
    assert caplog.records == []


def test_fork_that_ends_says_nothing_of_its_parents_rows(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom lazyshard import ChunkWriter\n"
        "writer = ChunkWriter(sys.argv[1], 2)\nwriter.write({'id': 0})\n"
        "if os.fork() == 0: sys.exit()\nos.wait()\nwriter.close()\n"
    )
    done = python(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_fork_that_drops_its_copy_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writers = [ChunkWriter(tmp_path, 5)]
    writers[0].write({"id": 0})

    def child() -> None:
        writers.clear()
        gc.collect()

    assert forked(child) == 0
    assert "not published" not in capfd.readouterr().err
    writers[0].close()


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

    monkeypatch.setattr("lazyshard.stream.recovery.sync_directory", noted_sync)
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

    monkeypatch.setattr("lazyshard.stream.publishing.publish_end", full)
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
