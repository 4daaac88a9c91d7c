"""Mistakes and damage with several writers of a stream: an error that names the writer, and nothing is lost."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from lazyshard.errors import LazyShardError, ProducerFenced, StreamEnded, StreamInvalid, StreamMismatch, WriterFailed
from lazyshard.stream import ChunkWriter
from lazyshard.stream.sequencer import Gate
from lazyshard.stream.writer import open_sequenced
from lazyshard_producer.cli import main
from tests.harness.processes.commands import Commands
from tests.harness.processes.environment import DEADLINE_S
from tests.harness.processes.producing import assert_one_line, ids, rows, run_arguments
from tests.producer.commands import Running
from tests.producer.test_writers import SIZE, arguments, head
from tests.stream.streams import raised, refusal_of


class Closable(Gate):
    """A limit that a test opens and closes."""

    def __init__(self, *, closed: bool) -> None:
        self.closed = closed

    def __call__(self, writer: ChunkWriter) -> Gate:
        return self

    def before_chunk(self, published_chunks: int, published_samples: int) -> str | None:
        return "closed by the test" if self.closed else None

    def fits(self, published_chunks: int, more: int) -> bool:
        return not self.closed

    def after_publish(self, published_chunks: int) -> None:
        pass


def leave_two_pieces(out: Path) -> Path:
    """Writer `a` stops with two chunks that have no number in the stream; returns its folder."""
    with pytest.raises(KeyboardInterrupt), ChunkWriter(out, SIZE, writer="a", gate=Closable(closed=True)) as writer:
        for number in range(2 * SIZE):
            writer.write({"id": number})
        assert (writer.held() or "").startswith("chunks of writer 'a' wait for ")
        raise KeyboardInterrupt
    return out / ".writers" / "a"


def end(out: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `end` prints on standard output."""
    capsys.readouterr()
    assert main(["end", str(out), "--no-progress", "--force"]) == 0
    return capsys.readouterr().out.splitlines()


def has_room(writer: ChunkWriter) -> bool:
    try:
        return writer.held() is None
    except WriterFailed:
        return False


def write_b(out: Path) -> None:
    with ChunkWriter(out, SIZE, writer="b") as writer:
        for number in range(100, 100 + 2 * SIZE):
            writer.write({"id": number})


@pytest.mark.parametrize("name", ["", ".a", "a/b", "../a", "a b", "é", "a" * 65])
def test_a_name_that_is_none(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*arguments(out, "a", 0, 3)[:-1], name]) == 2
    assert_one_line(capsys.readouterr().err, f"--writer: expected NAME, got {name[:10]!r}"[:-2])
    assert not out.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--writers", "3"), "--writers: requires --writer"),
        (("--writer", "a", "--writers", "-1"), "--writers: expected N|NAME,..."),
        (("--writer", "a", "--writers", "a,b/c"), "--writers: expected N|NAME,..."),
        (("--writer", "a", "--out", "gs://bucket/x"), "--writer: several writers need a store with conditional puts"),
    ],
)
def test_options_that_cannot_be(
    given: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(rows(0, 3))
    out = [] if "--out" in given else ["--out", str(tmp_path / "out")]
    assert main(["run", "--source", str(tmp_path / "a.jsonl"), "--samples-per-chunk", "3", *out, *given]) == 2
    assert_one_line(capsys.readouterr().err, words)


def test_a_damaged_piece_is_refused_to_its_writer_and_blocks_no_other(tmp_path: Path) -> None:
    out, gate = tmp_path / "out", Closable(closed=True)
    writer = ChunkWriter(out, SIZE, writer="a", gate=gate)
    for number in range(2 * SIZE):
        writer.write({"id": number})
    data = out / ".writers" / "a" / "chunk_00000.jsonl"
    whole = data.read_bytes()
    os.truncate(data, len(whole) - 3)
    gate.closed = False
    deadline = time.monotonic() + DEADLINE_S
    with pytest.raises(
        WriterFailed, match=r"/\.writers/a: .* does not take its chunks: .*chunk_00000.jsonl"
    ) as refused:
        while writer.held() is not None and time.monotonic() < deadline:
            time.sleep(0.002)
    assert refused.value.directory == str(out / ".writers" / "a")
    write_b(out)
    assert ids(out) == list(range(100, 100 + 2 * SIZE))
    # Once the file is restored the writer's rows follow.
    data.write_bytes(whole)
    while not has_room(writer) and time.monotonic() < deadline:
        time.sleep(0.002)
    writer.close()
    assert ids(out)[2 * SIZE :] == list(range(2 * SIZE))


@pytest.mark.parametrize("suffix", ["", ".completed"])
def test_cut_piece_is_left_out_by_the_end(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    piece = leave_two_pieces(out) / f"chunk_00001.jsonl{suffix}"
    os.truncate(piece, piece.stat().st_size // 2)
    refused = raised(LazyShardError, ChunkWriter, out, SIZE, writer="a")
    assert str(piece) in str(refused)
    write_b(out)
    first, last = end(out, capsys)
    assert first.startswith(f"  a: {SIZE} rows; left out {SIZE} published rows: {piece}: ")
    assert last == f"  b: {2 * SIZE} rows"
    assert sorted(ids(out)) == [*range(SIZE), *range(100, 100 + 2 * SIZE)]


def test_a_piece_without_a_seal_is_not_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    folder = leave_two_pieces(out)
    shutil.copy(folder / "chunk_00001.jsonl", folder / "chunk_00002.jsonl")
    more = "it has not ended, and rows that it had not published are left out"
    assert end(out, capsys) == [f"  a: {2 * SIZE} rows; {more}"]
    assert ids(out) == list(range(2 * SIZE))
    raised(StreamEnded, ChunkWriter, out, SIZE, writer="a")


def test_the_folder_of_another_stream_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    folder = leave_two_pieces(other)
    write_b(out)
    shutil.copytree(folder, out / ".writers" / "a")
    refused = refusal_of((StreamInvalid, StreamMismatch), r"/\.writers/a: ", ChunkWriter, out, SIZE, writer="a")
    assert refused.directory == str(out / ".writers" / "a")
    end(out, capsys)
    assert ids(out) == list(range(100, 100 + 2 * SIZE))


def test_a_second_sequencer_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ChunkWriter(out, 1, writer="a") as writer:
        writer.write({"id": 0})
        deadline = time.monotonic() + DEADLINE_S
        while not head(out).get("chunks") and time.monotonic() < deadline:
            time.sleep(0.002)
        refused = raised(ProducerFenced, open_sequenced, out, time.time, False, None)
        assert refused.directory == str(out)
        writer.write({"id": 1})
    assert ids(out) == [0, 1]


@pytest.mark.full
def test_a_second_process_of_a_name_is_refused(nursery: Commands, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = arguments(out, "a", 0, 12, "--writers", 1, "--max-ahead", 1)
    with Running(nursery, *given) as first:
        first.wait_until(lambda: head(out, "a").get("chunks") == 3)
        status, said = nursery.run(*given)
        assert status == 6
        assert_one_line(said, f"{out}/.writers/a: ", f"process {first.pid} on ")
        assert first.end(signal.SIGTERM)[0] == 0
    assert nursery.run(*run_arguments(out, [tmp_path / "a.jsonl"], SIZE, "--writer", "a"))[0] == 0
    assert ids(out) == list(range(12))
