"""Rows to published chunks, one by one and many at a time."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader, errors
from lazyshard.format.batch import check_lines
from lazyshard.format.names import HEAD_RESERVE
from tests.stream.damage import Damage, copy, cut, delete, edit, put
from tests.stream.streams import add, foreign, go_on, head, names, produce, python, raising, rows, seal

PUBLISHED = [".producer.lock", "head.json", "stream.end", "stream.json", "stream.owner"]


def chunk_files(*numbers: int) -> list[str]:
    return [name for n in numbers for name in (f"chunk_{n:05d}.jsonl", f"chunk_{n:05d}.jsonl.completed")]


@pytest.mark.parametrize(("samples", "sizes"), [(0, []), (1, [1]), (2, [2]), (3, [2, 1]), (7, [2, 2, 2, 1])])
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
        *(({"id": 9}, -1, ValueError), ({"id": 9}, 2**32, ValueError)),
        *(({"id": 9}, 1.5, TypeError), ({"id": 9}, "4", TypeError)),
    ],
)
def test_refused_row_is_not_added_and_the_writer_goes_on(bad: Any, tmp_path: Path) -> None:
    row, tokens, error = bad if isinstance(bad, tuple) else (bad, 4, errors.RowInvalid)
    with ChunkWriter(tmp_path, 2) as writer:
        writer.write({"id": 0}, tokens=3)
        with pytest.raises(error):
            writer.write(row, tokens=tokens, source={"line": 9})
        assert writer.samples == 1
        writer.write({"id": 1}, tokens=5)
    assert list(StreamReader(tmp_path)) == rows(0, 2)
    found = seal(tmp_path, 0).tokens
    assert found is not None and found.tolist() == [3, 5]
    assert seal(tmp_path, 0).source is None


def test_tokens_are_kept_only_where_every_row_of_the_chunk_has_one(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        for tokens in (7, 2**32 - 1, 5, None, 0):
            writer.write({}, tokens=tokens)
        assert writer.write_lines([]) == writer.write_lines([b'{"a":":"}\n']) == ()
        # Those that name a key twice.
        assert writer.write_lines([b'{"a":1,"a":2}\n', b'{"b":{"c":1,"c":2}}\n']) == (0, 1)
        writer.write({}, tokens=6)
    found = [seal(tmp_path, n).tokens for n in range(5)]
    assert [None if one is None else one.tolist() for one in found] == [[7, 2**32 - 1], None, None, None, [6]]


def test_resume_goes_on_after_the_last_published_chunk_byte_for_byte(tmp_path: Path) -> None:
    def write(writer: ChunkWriter, start: int, stop: int) -> None:
        for number in range(start, stop):
            # Without one, the position is that of the row before.
            writer.write({"id": number}, source=None if number % 3 == 1 else {"line": number + 1})

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with ChunkWriter(whole, 3) as writer:
        write(writer, 0, 8)
    first = ChunkWriter(parts, 3)
    write(first, 0, 5)
    assert (first.samples, first.published_samples, first.source) == (5, 3, {"line": 3})
    first.close(end=False)
    with ChunkWriter(parts) as second:
        assert (second.published_chunks, second.published_samples, second.source) == (1, 3, {"line": 3})
        assert second.stream_id == first.stream_id
        write(second, second.source["line"], 8)
    assert names(parts) == names(whole)
    for number, line in enumerate((3, 6, 7)):
        data = f"chunk_{number:05d}.jsonl"
        assert (parts / data).read_bytes() == (whole / data).read_bytes()
        one, other = seal(parts, number), seal(whole, number)
        assert one.source == other.source == {"line": line}
        assert one.digests.tolist() == other.digests.tolist()


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt])
def test_source_that_is_not_json_or_an_interrupt_in_a_write_fails_the_writer(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer.write({"id": 0})
    with monkeypatch.context() as patch, pytest.raises(error):
        if error is KeyboardInterrupt:
            patch.setattr("lazyshard.stream.publishing.sync", raising(KeyboardInterrupt()))
        writer.write({"id": 1}, source={1, 2} if error is TypeError else None)
    for call in (lambda: writer.write({"id": 2}), writer.heartbeat, writer.close):
        with pytest.raises(errors.WriterFailed, match=error.__name__) as caught:
            call()
        assert caught.value.published_samples == 0
    assert head(tmp_path).state == "failed"
    go_on(tmp_path, 3)


def test_context_manager_ends_the_stream_on_success(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        writer.write({})
    assert (head(tmp_path).ended, head(tmp_path).state) == (True, "finished")
    writer.close()
    for call in (lambda: writer.write({}), lambda: writer.write_lines([b"{}"]), writer.heartbeat):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("error", "state", "note"),
    [
        (errors.StreamEnded("over\n there"), "failed", "over there"),
        (RuntimeError("no \udcff"), "failed", "RuntimeError: no \\udcff"),
        (ValueError("x" * 2000), "failed", f"ValueError: {'x' * 988}"),
        (KeyboardInterrupt("now"), "idle", ""),
    ],
)
def test_exception_leaves_the_stream_resumable_and_is_told(
    error: BaseException, state: str, note: str, tmp_path: Path
) -> None:
    with pytest.raises(type(error)), ChunkWriter(tmp_path, 2) as writer:
        add(writer, 0, 3)
        raise error
    found = head(tmp_path)
    assert (found.ended, found.state, found.samples, found.note) == (False, state, 2, note)
    assert names(tmp_path) == sorted({*PUBLISHED, *chunk_files(0)} - {"stream.end"})
    go_on(tmp_path, 3)


def test_ended_stream_and_directory_of_others_take_nothing_more(tmp_path: Path) -> None:
    produce(tmp_path / "ended", 3)
    foreign(tmp_path / "foreign", b"{}\n")
    before = {path: path.read_bytes() for path in tmp_path.glob("*/chunk_*")}
    with pytest.raises(errors.StreamEnded) as caught:
        ChunkWriter(tmp_path / "ended", 2)
    assert (caught.value.samples, caught.value.directory) == (3, str(tmp_path / "ended"))
    with pytest.raises(errors.StreamInvalid):
        ChunkWriter(tmp_path / "foreign", 2)
    assert {path: path.read_bytes() for path in tmp_path.glob("*/chunk_*")} == before
    assert ".tmp" not in names(tmp_path / "ended")
    assert names(tmp_path / "foreign") == chunk_files(0)


def test_other_samples_per_chunk_is_refused_without_taking_the_stream_over(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer._lock._lock.release()  # as seen from another machine, where no file lock holds
    with pytest.raises(errors.StreamMismatch) as caught:
        ChunkWriter(tmp_path, 3)
    assert (caught.value.expected, caught.value.actual) == ("3", "2")
    writer.heartbeat()
    writer.close()


def test_impossible_samples_per_chunk_is_refused_and_nothing_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[list[Any]] = [[0], [-1], [10**9], [1.5], [True], ["2"], []]
    for given in wrong:
        with pytest.raises(ValueError, match="samples_per_chunk"):
            ChunkWriter(tmp_path / "stream", *given)
    assert names(tmp_path) == []
    # Directories above a new stream are made durable.
    synced: list[Path] = []
    monkeypatch.setattr("lazyshard.stream.recovery.sync_directory", synced.append)
    ChunkWriter(tmp_path / "a" / "b", 2).close(end=False)
    assert synced[:2] == [tmp_path / "a", tmp_path]


def test_head_says_what_is_published_and_by_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1000, 2000))
    writer = ChunkWriter(tmp_path, 2, clock=lambda: float(next(times)))
    add(writer, 0, 5)
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
    lies: Any = ("finished", "asleep")
    for state in lies:
        with pytest.raises(ValueError, match="state"):
            writer.heartbeat(state)
        with pytest.raises(ValueError, match="state"):
            writer.close(end=False, state=state)
    assert head(tmp_path).state == "waiting"
    writer.close(end=False)
    assert (head(tmp_path).state, head(tmp_path).open, head(tmp_path).row_at) == ("idle", 0, 0.0)
    # A write beats by itself.
    monkeypatch.setattr("lazyshard.stream.writer.HEARTBEAT_S", -1.0)
    writer = ChunkWriter(tmp_path, clock=lambda: float(next(times)))
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
    with ChunkWriter(tmp_path / "many", 3, clock=lambda: 5.0, overlap=True) as writer:
        write_all(writer, lines(0, 8), at_once)
        writer.settle()
        assert (writer.samples, writer.room, writer.published_chunks, writer.full_chunks) == (8, 1, 2, 2)
    assert names(tmp_path / "one") == names(tmp_path / "many")
    for name in names(tmp_path / "one"):
        if name.startswith("chunk_"):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()
    assert list(StreamReader(tmp_path / "many")) == rows(0, 8)


@pytest.mark.parametrize("piece", [1, 20, 1 << 20])
def test_small_and_large_pieces_keep_their_order(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.stream.publishing.PIECE_BYTES", piece)
    monkeypatch.setattr("lazyshard.stream.publishing.BUFFER_BYTES", 30)
    with ChunkWriter(tmp_path, 50) as writer:
        for start, stop in ((0, 1), (1, 2), (2, 9), (9, 10), (10, 30)):
            writer.write_lines(lines(start, stop))
            writer.write({"id": 1000 + stop})
    found = [row["id"] for row in StreamReader(tmp_path)]
    assert found == [0, 1001, 1, 1002, *range(2, 9), 1009, 9, 1010, *range(10, 30), 1030]


def test_writing_back_begins_early_and_takes_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr("lazyshard.stream.publishing.PIECE_BYTES", 1)
    monkeypatch.setattr("lazyshard.stream.publishing.BUFFER_BYTES", 25)
    monkeypatch.setattr(
        "lazyshard.stream.publishing.start_writing_back", lambda fd, offset, size: begun.append((offset, size))
    )
    with ChunkWriter(tmp_path, 9) as writer:
        for number in range(8):
            writer.write_lines(lines(number, number + 1))
        assert begun == [(0, 27), (27, 27)]


@pytest.mark.parametrize("checked", [False, True])
def test_refused_line_is_told_by_its_index_and_the_rows_before_it_are_written(checked: bool, tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 4) as writer:
        writer.write({"id": 0}, source="before")
        given: Any = [b'{"id":1}\n', b'{"id":2}\r\n', b'{"id":nul}\n']
        with pytest.raises(errors.RowInvalid) as caught:
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
        with pytest.raises(ValueError, match=r"\b3\b.*\b2\b"):
            writer.write_lines(check_lines(given) if checked else given)
        assert (writer.samples, writer.room) == (0, 2)
        writer.write_lines(lines(0, 2))
        assert writer.room == 2
    assert list(StreamReader(tmp_path)) == rows(0, 2)


@pytest.mark.parametrize(
    ("samples", "end", "told"), [(3, None, ["3 rows"]), (0, None, []), (5, None, []), (1, True, []), (1, False, [])]
)
def test_writer_dropped_with_rows_says_how_many_are_not_published(
    samples: int, end: bool | None, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = ChunkWriter(tmp_path, 5)
    for number in range(samples):
        writer.write({"id": number})
    if end is not None:
        writer.close(end)
    del writer
    gc.collect()
    assert [what in message for what, message in zip(told, caplog.messages, strict=True)] == [True] * len(told)
    if told:
        produce(tmp_path, 1, 5)  # the lock is free


def test_fork_that_ends_says_nothing_of_its_parents_rows(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom lazyshard import ChunkWriter\n"
        "writer = ChunkWriter(sys.argv[1], 2)\nwriter.write({'id': 0})\n"
        "if os.fork() == 0: sys.exit()\nos.wait()\nwriter.close()\n"
    )
    done = python(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_leftovers_of_a_crash_are_cleared(tmp_path: Path) -> None:
    produce(tmp_path, 6, end=False)
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


@pytest.mark.parametrize("lost", [("stream.end",), ("stream.end", "head.json"), ()])
def test_crash_while_the_stream_is_ended_rolls_forward(lost: tuple[str, ...], tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    live = (tmp_path / "head.json").read_bytes()
    produce(tmp_path, 5)
    # Behind the last seal, also where the head is lost, and behind the end.
    (tmp_path / "head.json").write_bytes(live)
    for name in lost:
        (tmp_path / name).unlink()
    with pytest.raises(errors.StreamEnded) as caught:
        ChunkWriter(tmp_path)
    assert caught.value.samples == 5
    assert json.loads((tmp_path / "stream.end").read_bytes()) == {"format": 1, "chunks": 3, "samples": 5}
    assert (head(tmp_path).ended, head(tmp_path).samples, head(tmp_path).state) == (True, 5, "finished")
    assert ".tmp" not in names(tmp_path)
    assert list(StreamReader(tmp_path)) == rows(0, 5)


def test_end_that_fails_names_the_partial_chunk_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ChunkWriter(tmp_path, 2)
    add(writer, 0, 3)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("lazyshard.stream.publishing.publish_end", raising(OSError(28, "No space left on device")))
        writer.close()
    assert (head(tmp_path).chunks, head(tmp_path).samples, head(tmp_path).state) == (1, 2, "failed")
    assert StreamReader(tmp_path).seen.samples == 2
    with pytest.raises(errors.StreamEnded):
        ChunkWriter(tmp_path)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


def longer(stream: Path) -> None:
    produce(stream.with_name("other"), 9, 3)
    for name in (LAST, f"{LAST}.completed"):
        (stream / name).write_bytes((stream.with_name("other") / name).read_bytes())


LAST = "chunk_00002.jsonl"


@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (delete("chunk_00001.jsonl.completed"), errors.StreamInvalid, "chunk_00001.jsonl.completed"),
        (delete("chunk_00000.jsonl"), errors.ChunkMissing, "chunk_00000.jsonl"),
        (delete(LAST), errors.ChunkMissing, LAST),
        (cut(LAST, 5), errors.ChunkCorrupt, LAST),
        (cut(f"{LAST}.completed", 40), errors.SealInvalid, f"{LAST}.completed"),
        (copy("chunk_00001.jsonl.completed", f"{LAST}.completed"), errors.SealInvalid, f"{LAST}.completed"),
        (edit(f"{LAST}.completed", format=3), errors.VersionUnsupported, "format 3"),
        (longer, errors.StreamInvalid, "3 samples"),
        (put("stream.end", b'{"format":1,"chunks":2,"samples":4}'), errors.StreamInvalid, "stream.end"),
        (cut("stream.json", 5), ValueError, "stream.json"),
    ],
)
def test_damaged_stream_is_refused_as_it_is(damage: Damage, error: type[Exception], named: str, tmp_path: Path) -> None:
    stream = produce(tmp_path / "stream", 6, end=False)
    (stream / "chunk_00003.jsonl").write_bytes(b"unsealed")
    damage(stream)
    before = set(names(stream))
    for _ in range(2):
        with pytest.raises(error, match=named):
            ChunkWriter(stream)
    assert set(names(stream)) - {".tmp"} == before
