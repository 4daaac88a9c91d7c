"""Rows to published chunks, one by one and many at a time."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader, errors
from lazyshard.format.batch import check_lines
from lazyshard.format.records import HEAD_RESERVE
from tests.stream import streams
from tests.stream.damage import Damage, copy, cut, delete, edit, put
from tests.stream.streams import add, foreign, go_on, head, names, produce, raised, refusal_of, rows, seal

PUBLISHED = [".producer.lock", "head.json", "stream.end", "stream.json", "stream.owner"]


def chunk_files(*numbers: int) -> list[str]:
    return [name for n in numbers for name in (f"chunk_{n:05d}.jsonl", f"chunk_{n:05d}.jsonl.completed")]


def test_chunks_hold_exactly_s_rows_and_only_the_last_fewer(tmp_path: Path) -> None:
    chunks: list[list[int]] = [[], [1], [2], [2, 1], [2, 2, 2, 1]]
    for sizes in chunks:
        stream, samples = produce(tmp_path / str(sizes), sum(sizes)), sum(sizes)
        assert names(stream) == sorted(PUBLISHED + chunk_files(*range(len(sizes))))
        assert [seal(stream, n).samples for n in range(len(sizes))] == sizes
        end = {"format": 1, "chunks": len(sizes), "samples": samples}
        assert json.loads((stream / "stream.end").read_bytes()) == end
        assert list(StreamReader(stream)) == rows(0, samples)


def test_dict_and_bytes_rows_are_kept_as_they_are(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 4) as writer:
        assert writer.write({"b": "ü", "a": [1, None]}) == {"b": "ü", "a": [1, None]}
        assert writer.write(b'{ "x" : 1.50 }\r\n') == {"x": 1.5}
        writer.write(b'{"y":18446744073709551615}')
    assert (tmp_path / "chunk_00000.jsonl").read_bytes() == (
        '{"b":"ü","a":[1,null]}\n{ "x" : 1.50 }\n{"y":18446744073709551615}\n'.encode()
    )


def test_refused_row_is_not_added_and_the_writer_goes_on(tmp_path: Path) -> None:
    values: list[Any] = [{"a": float("nan")}, {"a": 2**70}, {1: 2}, {"a": {1}}, [1], "text", None, bytearray(b"{}")]
    lines = [b"", b"\n", b"[]", b"{", b'{"a":1}\n{"a":2}', b'{"a":NaN}', b'{"a":"\xff"}', b'{"a":99999999999999999999}']
    wrong: dict[Any, type[Exception]] = {-1: ValueError, 2**32: ValueError, 1.5: TypeError, "4": TypeError}
    with ChunkWriter(tmp_path, 2) as writer:
        writer.write({"id": 0}, tokens=3)
        for row in [*values, *lines]:
            raised(errors.RowInvalid, writer.write, row, tokens=4, source={"line": 9})
        for tokens, error in wrong.items():
            raised(error, writer.write, {"id": 9}, tokens=tokens, source={"line": 9})
        assert writer.samples == 1
        writer.write({"id": 1}, tokens=5)
    assert list(StreamReader(tmp_path)) == rows(0, 2)
    assert streams.tokens(tmp_path, 1) == [[3, 5]]
    assert seal(tmp_path, 0).source is None


def test_tokens_are_kept_only_where_every_row_of_the_chunk_has_one(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        for tokens in (7, 2**32 - 1, 5, None, 0):
            writer.write({}, tokens=tokens)
        assert writer.write_lines([]) == writer.write_lines([b'{"a":":"}\n']) == ()
        # Those that name a key twice.
        assert writer.write_lines([b'{"a":1,"a":2}\n', b'{"b":{"c":1,"c":2}}\n']) == (0, 1)
        writer.write({}, tokens=6)
    assert streams.tokens(tmp_path, 5) == [[7, 2**32 - 1], None, None, None, [6]]


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
def test_what_fails_the_writer(error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer.write({"id": 0})
    with monkeypatch.context() as patch, pytest.raises(error):
        if error is KeyboardInterrupt:
            patch.setattr("lazyshard.stream.publishing.sync", streams.raising(KeyboardInterrupt()))
        writer.write({"id": 1}, source={1, 2} if error is TypeError else None)
    for call in (lambda: writer.write({"id": 2}), writer.heartbeat, writer.close):
        assert refusal_of(errors.WriterFailed, error.__name__, call).published_samples == 0
    assert head(tmp_path).state == "failed"
    go_on(tmp_path, 3)


@pytest.mark.parametrize(
    ("error", "state", "note"),
    [
        (errors.StreamEnded("over\n there"), "failed", "over there"),
        (RuntimeError("no \udcff"), "failed", "RuntimeError: no \\udcff"),
        (ValueError("x" * 2000), "failed", f"ValueError: {'x' * 988}"),
        (KeyboardInterrupt("now"), "idle", ""),
    ],
)
def test_exception_is_told_and_gone_on_after(error: BaseException, state: str, note: str, tmp_path: Path) -> None:
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
    caught = raised(errors.StreamEnded, ChunkWriter, tmp_path / "ended", 2)
    assert (caught.samples, caught.directory) == (3, str(tmp_path / "ended"))
    raised(errors.StreamInvalid, ChunkWriter, tmp_path / "foreign", 2)
    assert {path: path.read_bytes() for path in tmp_path.glob("*/chunk_*")} == before
    assert ".tmp" not in names(tmp_path / "ended")
    assert names(tmp_path / "foreign") == chunk_files(0)


def test_other_samples_per_chunk_is_refused_without_taking_the_stream_over(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer._lock._lock.release()  # as seen from another machine, where no file lock holds
    caught = raised(errors.StreamMismatch, ChunkWriter, tmp_path, 3)
    assert (caught.expected, caught.actual) == ("3", "2")
    writer.heartbeat()
    writer.close()


def test_impossible_samples_per_chunk_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[list[Any]] = [[0], [-1], [10**9], [1.5], [True], ["2"], []]
    for given in wrong:
        refusal_of(ValueError, "samples_per_chunk", ChunkWriter, tmp_path / "stream", *given)
    assert names(tmp_path) == []
    # Directories above a new stream are made durable.
    synced: list[Path] = []
    monkeypatch.setattr("lazyshard.stream.lock.sync_directory", synced.append)
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
        refusal_of(ValueError, "state", writer.heartbeat, state)
        refusal_of(ValueError, "state", writer.close, end=False, state=state)
    assert head(tmp_path).state == "waiting"
    writer.close(end=False)
    assert (head(tmp_path).state, head(tmp_path).open, head(tmp_path).row_at) == ("idle", 0, 0.0)
    # A write beats by itself.
    monkeypatch.setattr("lazyshard.stream.writer.HEARTBEAT_S", -1.0)
    writer = ChunkWriter(tmp_path, clock=lambda: float(next(times)))
    before = head(tmp_path).updated_at
    writer.write({})
    assert head(tmp_path).updated_at > before
    for _ in range(2):
        writer.close(end=False)
    for call in (lambda: writer.write({}), lambda: writer.write_lines([b"{}"]), writer.heartbeat):
        refusal_of(ValueError, "closed", call)


def lines(start: int, stop: int) -> list[bytes]:
    return [b'{"id":%d}\n' % number for number in range(start, stop)]


def test_lines_come_out_as_if_written_one_by_one(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "one", 3, clock=lambda: 5.0) as writer:
        for number, line in enumerate(lines(0, 8)):
            writer.write(line, source=number + 1)
    for at_once in (1, 2, 3, 100):
        many, at = tmp_path / str(at_once), 0
        with ChunkWriter(many, 3, clock=lambda: 5.0, overlap=True) as writer:
            while at < 8:
                part = lines(at, min(8, at + at_once, at + writer.room))
                at += len(part)
                writer.write_lines(part, source=at)
            writer.settle()
            assert (writer.samples, writer.room, writer.published_chunks, writer.full_chunks) == (8, 1, 2, 2)
        assert names(tmp_path / "one") == names(many)
        for name in chunk_files(0, 1, 2):
            assert (tmp_path / "one" / name).read_bytes() == (many / name).read_bytes()
        assert list(StreamReader(many)) == rows(0, 8)


def test_small_and_large_pieces_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.stream.publishing.BUFFER_BYTES", 30)
    for piece in (1, 20, 1 << 20):
        monkeypatch.setattr("lazyshard.stream.publishing.PIECE_BYTES", piece)
        with ChunkWriter(tmp_path / str(piece), 50) as writer:
            for start, stop in ((0, 1), (1, 2), (2, 9), (9, 10), (10, 30)):
                writer.write_lines(lines(start, stop))
                writer.write({"id": 1000 + stop})
        found = [row["id"] for row in StreamReader(tmp_path / str(piece))]
        assert found == [0, 1001, 1, 1002, *range(2, 9), 1009, 9, 1010, *range(10, 30), 1030]


@pytest.mark.parametrize("check", [check_lines, list])
def test_refused_line_and_more_than_there_is_room_for(check: Callable[[list[bytes]], Any], tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 4) as writer:
        writer.write({"id": 0}, source="before")
        for last in (b'{"id":4}\n', b"{"):
            refusal_of(ValueError, r"\b4\b.*\b3\b", writer.write_lines, check([*lines(1, 4), last]))
            assert (writer.samples, writer.room) == (1, 3)
        bad = check([b'{"id":1}\n', b'{"id":2}\r\n', b'{"id":nul}\n'])
        caught = raised(errors.RowInvalid, writer.write_lines, bad, source="after")
        assert (caught.index, caught.byte) == (2, 6)
        assert (writer.samples, writer.room, writer.published_chunks) == (3, 1, 0)
        writer.write_lines(lines(3, 4))
        assert writer.room == 4
    assert list(StreamReader(tmp_path)) == rows(0, 4)
    assert seal(tmp_path, 0).source == "before"


def test_writer_dropped_with_rows_says_how_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for samples, end, told in [(3, None, 1), (0, None, 0), (5, None, 0), (1, True, 0), (1, False, 0)]:
        caplog.clear()
        stream = tmp_path / f"{samples} {end}"
        writer = ChunkWriter(stream, 5)
        add(writer, 0, samples)
        if end is not None:
            writer.close(end)
        del writer
        streams.collect_garbage()
        assert ["3 rows" in message for message in caplog.messages] == [True] * told
        if told:
            produce(stream, 1, 5)  # the lock is free


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


def test_failed_end_names_no_partial_chunk_until_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ChunkWriter(tmp_path, 2)
    add(writer, 0, 3)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("lazyshard.stream.publishing.publish_end", streams.raising(OSError(28, "No space left")))
        writer.close()
    assert (head(tmp_path).chunks, head(tmp_path).samples, head(tmp_path).state) == (1, 2, "failed")
    assert StreamReader(tmp_path).seen.samples == 2
    for lost in ([], ["stream.end"], ["head.json", "stream.end"]):
        delete(*lost)(tmp_path)
        assert raised(errors.StreamEnded, ChunkWriter, tmp_path).samples == 3
        assert json.loads((tmp_path / "stream.end").read_bytes()) == {"format": 1, "chunks": 2, "samples": 3}
        assert (head(tmp_path).ended, head(tmp_path).samples, head(tmp_path).state) == (True, 3, "finished")
        assert ".tmp" not in names(tmp_path)
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
        (cut(f"{LAST}.completed", 40), errors.ChunkCorrupt, f"{LAST}.completed"),
        (copy("chunk_00001.jsonl.completed", f"{LAST}.completed"), errors.ChunkCorrupt, f"{LAST}.completed"),
        (edit(f"{LAST}.completed", format=4), errors.VersionUnsupported, "format 4"),
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
        refusal_of(error, named, ChunkWriter, stream)
    assert set(names(stream)) - {".tmp"} == before
