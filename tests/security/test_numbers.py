"""Numbers that make an allocation or a loop huge, sizes of files, which cost nothing, and bombs that expand to much."""

import gzip
import os
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import ChunkCorrupt, FileRefused, LazyShardError, StateMismatch
from lazyshard.format.records import Manifest
from lazyshard.format.seal import Seal
from lazyshard.format.state import Cursor, RunState
from lazyshard.inspection.tracing import MAX_EPOCHS, MAX_PARTS, MAX_STEP_DRAWS, StreamFacts, Tracing
from lazyshard.inspection.tracing_states import SavedState
from lazyshard.part import Part
from lazyshard.store.files import MAX_PLAIN_BYTES, read_file
from lazyshard.stream.cursor import write_cursor
from tests.security.guards import command, edit, producer, write_stream
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
    with pytest.raises(StateMismatch):  # Nor is a step of more draws than memory holds
        list(tracing(2**60, parts=(Part(2**31, 1, 0, draws_per_step=MAX_STEP_DRAWS),)).at_step(0))


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
