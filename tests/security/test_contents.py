"""Numbers that make an allocation or a loop huge, sizes of files, bombs that expand to much; control characters."""

import gzip
import io
import os
import resource
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import orjson
import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import ChunkCorrupt, FileRefused, LazyShardError, ProducerFenced, StateMismatch
from lazyshard.format.records import Head, Manifest, Owner
from lazyshard.format.seal import Seal
from lazyshard.format.state import Cursor, CursorToken, RunState
from lazyshard.inspection.tracing import MAX_EPOCHS, MAX_PARTS, MAX_STEP_DRAWS, StreamFacts, Tracing
from lazyshard.inspection.tracing_states import SavedState
from lazyshard.part import Part
from lazyshard.store.files import MAX_PLAIN_BYTES, read_file
from lazyshard.stream.cursor import write_cursor
from lazyshard.stream.head import describe_producer, failure_words
from lazyshard.stream.listing import Published
from lazyshard.stream.lock import WriterLock
from tests.security.guards import ESCAPES, command, edit, producer, shown, write_stream
from tests.stream.streams import raised, refusal_of

MANY: Final = 10**12


@pytest.fixture
def little_memory() -> Iterator[None]:
    """What would take more than some GiB fails at once, and does not take the machine down."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", ["stream.json", "head.json", "stream.owner", "retired.json", "cursors/sft.json"])
@pytest.mark.usefixtures("little_memory")
def test_file_with_a_hole_is_refused_and_not_read_into_memory(name: str, tmp_path: Path) -> None:
    stream = write_stream(tmp_path / "stream", end=False)
    file = stream / name
    file.parent.mkdir(exist_ok=True)
    with open(file, "ab") as opened:
        opened.truncate(1 << 40)
    refusal_of(FileRefused, f"{MAX_PLAIN_BYTES} bytes.*{1 << 40} bytes", read_file, file)
    for arguments in (("status",), ("verify", "--jobs", "1")):
        assert command(arguments[0], stream, *arguments[1:]) in (0, 5, 7)


@pytest.mark.usefixtures("little_memory")
def test_row_of_a_terabyte_is_refused_and_not_read_into_memory(tmp_path: Path) -> None:
    stream = write_stream(tmp_path / "stream", rows=2, per_chunk=1)
    seal = Seal.decode((stream / "chunk_00000.jsonl.completed").read_bytes(), 0)
    large = Seal(0, np.array([0, 1 << 40], dtype=np.uint64), seal.digests)
    (stream / "chunk_00000.jsonl.completed").write_bytes(large.encode())
    os.truncate(stream / "chunk_00000.jsonl", 1 << 40)
    reader = StreamReader(stream, max_wait=0)
    for read in (lambda: reader.read(0), lambda: reader.line(0), lambda: list(reader)):
        refusal_of(ChunkCorrupt, "1099511627776", read)


def consumed(place: Path) -> Path:
    stream = write_stream(place / "stream")
    identity = Manifest.decode((stream / "stream.json").read_bytes()).stream_id
    state = RunState(identity, 2, 2, 0, 0, None, (Part(1, 1, 2),), 2)
    write_cursor(stream, Cursor("sft", identity, 2, 0, {}, 1.0, state))
    return stream


@pytest.mark.usefixtures("little_memory")
def test_chunks_that_are_not_there_are_not_walked_through(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stream = consumed(tmp_path)
    for name in ("head.json", "stream.end"):
        edit(stream / name, chunks=MANY, samples=2 * MANY)
    for arguments, codes in (
        (("status",), (0,)),
        (("inspect",), (0, 5)),
        (("inspect", "--all"), (0, 5)),
        (("inspect", str(MANY)), (5,)),
        (("verify", "--quick", "--jobs", "1"), (5,)),
        (("trace", "--sample", str(MANY)), (0,)),
        (("trace", "--text", "x"), (5, 7)),
        (("audit",), (5, 71)),
        (("forget", "sft", "--yes"), (0,)),
    ):
        assert command(arguments[0], stream, *arguments[1:]) in codes, (arguments, capfd.readouterr())
        assert "Traceback" not in capfd.readouterr().err
    refusal_of(LazyShardError, str(MANY), ChunkWriter, stream, 2)


def tracing(facts_samples: int = 6, **values: Any) -> Tracing:
    parts = values.pop("parts")
    consumed = sum(part.dp * part.draws for part in parts if part.trained)
    state = RunState("0" * 32, 2, values.pop("unit", 2), values.pop("window", 0), 0, None, parts, consumed)
    facts = StreamFacts("0" * 32, 2, facts_samples // 2, facts_samples, True)
    return Tracing(SavedState(state, Path("state.json")), facts, "stream")


@pytest.mark.parametrize(
    "parts",
    [
        (Part(2**31, 1, 2**30),),
        (Part(1, 2**61, 2**61),),
        (Part(1, 1, 2**61),),
        (Part(1, 1, 6 * (MAX_EPOCHS + 1)),),
        (Part(1, 1, 2, skip=((0, 2**62),)),),
        (Part(1, 1, 1),) * (MAX_PARTS + 1),
    ],
    ids=["ranks", "batch", "draws", "epochs", "skip", "parts"],
)
def test_state_that_no_run_can_have_is_refused_before_it_is_walked_through(parts: tuple[Part, ...]) -> None:
    raised(StateMismatch, tracing, parts=parts)
    step_of_many_draws = tracing(2**60, parts=(Part(2**31, 1, 0, draws_per_step=MAX_STEP_DRAWS),)).at_step(0)
    raised(StateMismatch, list, step_of_many_draws)  # More than memory holds


def told_source(stream: Path, path: Path | str, **values: Any) -> int:
    """Has the seals of a stream say that a source was read so far; returns the code of a trace of its first byte."""
    entry = {"path": str(path), "kind": "jsonl", "offset": 5, "line": 1} | values
    for chunk in (0, 1):
        edit(stream / f"chunk_{chunk:05d}.jsonl.completed", source={"sources": [entry]})
    return command("trace", stream, "--source", "a.jsonl:1")


@pytest.mark.parametrize(
    ("field", "number"),
    [("offset", -1), ("line", -1), ("offset", 2**63), ("line", 1.5), ("offset", "9" * 5000), ("line", None)],
)
def test_position_that_is_no_number(field: str, number: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told_source(consumed(tmp_path), "a.jsonl", **{field: number}) == 5
    assert capfd.readouterr().err.count("\n") == 1
    os.mkfifo(tmp_path / "a.jsonl")  # Nor is a source that a seal names a pipe to wait at
    assert told_source(tmp_path / "stream", tmp_path / "a.jsonl", offset=99, line=9) == 0
    assert "the file cannot be read" in capfd.readouterr().out


EXPANDED_BYTES: Final = 64 << 20
MAX_ROW_BYTES: Final = 100_000


def bomb(head: bytes = b"") -> bytes:
    """One member of gzip: some 64 KiB that are 64 MiB of zeros."""
    return gzip.compress(head + bytes(EXPANDED_BYTES), compresslevel=6)


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "nested.jsonl.gz"])
def test_run_over_a_bomb_ends_in_bounded_memory(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = bomb(b'{"id":0}\n{"text":"')
    (tmp_path / name).write_bytes(data if name.startswith("bomb") else gzip.compress(data))
    run = ("run", "--source", tmp_path / name, "--out", tmp_path / "out", "--samples-per-chunk", 1)
    (tmp_path / "little.jsonl.gz").write_bytes(gzip.compress(b'{"id":0}\n'))
    assert producer("run", "--source", tmp_path / "little.jsonl.gz", "--out", tmp_path / "o", *run[-2:]) == 0  # imports
    tracemalloc.start()
    try:
        assert producer(*run, "--max-row-bytes", MAX_ROW_BYTES) == 3
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < EXPANDED_BYTES // 3
    assert "Traceback" not in capfd.readouterr().err


COMMANDS: Final = (
    *(("status",), ("status", "--json"), ("inspect",), ("inspect", "--json"), ("inspect", "0", "--json")),
    *(("inspect", "0", "--rows", "3", "--full"), ("inspect", "--chunk", "0"), ("verify", "--jobs", "1")),
    *(("verify", "--json", "--jobs", "1"), ("trace", "--sample", "0", "--rows"), ("audit",), ("forget", "sft")),
    *(("audit", ESCAPES), ("trace", "--source", f"{ESCAPES}:0"), ("trace", "--consumer", ESCAPES)),
)


def hostile_stream(place: Path) -> Path:
    stream = write_stream(place / "stream", end=False, row={"id": ESCAPES, ESCAPES: [ESCAPES]})
    write_cursor(stream, Cursor("sft \u202e\u2028", None, 0, 0, {}, 1.0))
    edit(stream / "head.json", state="failed", note=ESCAPES, host=ESCAPES)
    edit(stream / "stream.owner", host=ESCAPES, token=ESCAPES)
    edit(stream / "chunk_00001.jsonl.completed", source={"sources": [{"path": ESCAPES, "kind": ESCAPES}], "x": ESCAPES})
    (stream / f"chunk_00007{ESCAPES}.jsonl").touch()
    (stream / "cursors" / f"{ESCAPES}.json").write_bytes(b"{}")
    (stream / "cursors" / "torn.json").write_bytes(ESCAPES.encode())
    (stream / "retired.json").symlink_to(f"/nowhere/{ESCAPES}")
    (stream / "quarantine.jsonl").write_bytes(
        orjson.dumps({"source": ESCAPES, "line": 1, "byte": 0, "reason": ESCAPES, "row": ESCAPES}) + b"\n"
    )
    return stream


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: repr(" ".join(arguments))[:40])
def test_no_cursor_moves(arguments: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command(arguments[0], hostile_stream(tmp_path), *arguments[1:])
    out, err = capfd.readouterr()
    assert out + err
    assert shown(out + err) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_refused_rows(
    terminal: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = hostile_stream(tmp_path)
    producer("quarantine", stream)
    assert shown("".join(capfd.readouterr())) == ""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(output, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", output)
    producer("quarantine", stream, "--rows")
    output.seek(0)
    printed = output.buffer.read()
    if terminal:
        assert printed.count(b"\n") == 1
        assert shown(printed.decode()) == ""
    else:
        assert printed == ESCAPES.rstrip("\r\n").encode() + b"\n"


def test_errors_of_the_library_hold_no_control_characters(tmp_path: Path) -> None:
    messages = [str(Owner(1, "t", ESCAPES, 1, 0.0)), failure_words(ESCAPES)]
    stream = hostile_stream(tmp_path)
    for state in ("failed", "waiting", "running", "idle"):
        edit(stream / "head.json", state=state)
        messages.append(str(raised(LazyShardError, StreamReader(stream, max_wait=0).read, 100)))
        head = Head(1, 1, False, state, 1.0, ESCAPES, 1, 0.0, ESCAPES)
        messages += [describe_producer(Published(1, 1, False, head), 5, 1.0, gone) for gone in (False, True)]
    messages.append(str(refusal_of(OSError, "out of the stream", read_file, stream / "retired.json")))
    held = WriterLock(tmp_path, 0.0)
    edit(tmp_path / "stream.owner", host=ESCAPES)
    messages += [str(raised(ProducerFenced, call)) for call in (held.check, lambda: WriterLock(tmp_path, 0.0))]
    held.release()
    for message in messages:
        assert shown(message) == "", message
    assert "\x1b" not in CursorToken(1, "0" * 16, 1, ESCAPES).text


def test_an_unexpected_error_is_told_as_text(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with mock.patch("lazyshard.cli.status.take_survey", side_effect=RuntimeError(ESCAPES)):
        assert command("status", tmp_path) == 70
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert shown(err) == ""
