"""Small streams, children and waits that the tests of storage share."""

import contextlib
import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar
from unittest import mock

import numpy as np
import pytest
import xxhash

from lazyshard import ChunkWriter, StreamReader
from lazyshard.format.records import Head, Manifest, chunk_name, seal_name
from lazyshard.format.seal import Seal
from lazyshard.format.state import Cursor, ReadingHint
from lazyshard.store.files import read_seal
from lazyshard.stream import read_cursor, write_cursor, write_reading
from lazyshard.stream.sequencer import Sequencer
from lazyshard.stream.share import Share
from lazyshard.stream.stream import open_now, read_lengths
from lazyshard.stream.waiting import Watchdog
from lazyshard.stream.writer import open_sequenced
from tests.harness.processes.environment import run_command

E = TypeVar("E", bound=BaseException)
P = ParamSpec("P")

DEADLINE_S: Final = 30.0  # How long a test waits for what must come at once; only a failing one ever waits so long

HERE: Final = Path(__file__).parents[2]

_looked_through: Final[set[str]] = set()

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount and to become another user")


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"id": i} for i in range(start, stop)]


def produce(directory: Path, samples: int, per_chunk: int = 2, *, end: bool = True) -> Path:
    writer = ChunkWriter(directory, per_chunk)
    add(writer, writer.published_samples, samples)
    writer.close(end)
    return directory


def publish_rows(
    directory: Path,
    per_chunk: int,
    rows: Iterable[dict[str, Any] | bytes],
    tokens: Iterable[int | None] = itertools.repeat(None),
    *,
    end: bool = True,
    **options: Any,
) -> Path:
    """A writer with these options publishes rows, each with its number of tokens."""
    writer = ChunkWriter(directory, per_chunk, **options)
    for row, length in zip(rows, tokens, strict=False):
        writer.write(row, tokens=length)
    writer.close(end)
    return directory


def add(writer: ChunkWriter, start: int, stop: int) -> None:
    for row in rows(start, stop):
        writer.write(row)


def go_on(directory: Path, samples: int) -> None:
    """A new writer continues up to `samples`, and all of them are read."""
    assert list(StreamReader(produce(directory, samples))) == rows(0, samples)


def foreign(directory: Path, *chunks: bytes, end: bool = False) -> Path:
    directory.mkdir(exist_ok=True)
    for number, data in enumerate(chunks):
        (directory / f"chunk_{number:05d}.jsonl").write_bytes(data)
        (directory / f"chunk_{number:05d}.jsonl.completed").touch()
    if end:
        (directory / "stream.end").touch()
    return directory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def head(directory: Path) -> Head:
    return Head.decode((directory / "head.json").read_bytes())


def seal(directory: Path, chunk: int) -> Seal:
    return Seal.decode((directory / seal_name(chunk)).read_bytes(), chunk)


def tokens(directory: Path, chunks: int) -> list[list[int] | None]:
    """The lengths in each of so many seals."""
    found = [seal(directory, chunk).tokens for chunk in range(chunks)]
    return [None if one is None else one.tolist() for one in found]


def collect_garbage() -> None:
    gc.collect()
    if len(sys.modules) > len(_looked_through):
        # The next time nothing is looked through again of what is there now, all that tests have imported.
        _looked_through.update(sys.modules)
        gc.freeze()


def open_descriptors() -> int:
    collect_garbage()
    return len(os.listdir("/proc/self/fd"))


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        time.sleep(0.002)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def raised(error: type[E] | tuple[type[E], ...], call: Callable[P, object], *given: P.args, **named: P.kwargs) -> E:
    """Calls, and returns the error that this is to raise."""
    return refusal_of(error, "", call, *given, **named)


def refusal_of(
    error: type[E] | tuple[type[E], ...], match: str, call: Callable[P, object], *given: P.args, **named: P.kwargs
) -> E:
    """As `raised`, where the message is to match."""
    with pytest.raises(error, match=match or None) as caught:
        call(*given, **named)
    return caught.value


def fail_when(
    monkeypatch: pytest.MonkeyPatch, name: str, condition: Callable[..., object], error: OSError | None = None
) -> None:
    call = getattr(os, name)

    def run(*arguments: Any, **named: Any) -> Any:
        if condition(*arguments):
            raise error or OSError(5, "Input/output error")
        return call(*arguments, **named)

    monkeypatch.setattr(os, name, run)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists from now on what decides over what is durable: syncs, renames, removals; names with a token as such."""
    calls: list[str] = []

    def note(what: str, path: str | Path) -> None:
        name = os.path.basename(path)
        calls.append(f"{what} {'temporary' if re.search('[0-9a-f]{16}', name) else name}")

    def noted(what: str, call: Callable[..., Any], at: int = 0) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            note(what, os.readlink(f"/proc/self/fd/{arguments[0]}") if what == "sync" else arguments[at])
            return call(*arguments, **named)

        return run

    monkeypatch.setattr(os, "fsync", noted("sync", os.fsync))
    monkeypatch.setattr(os, "replace", noted("rename", os.replace, 1))
    monkeypatch.setattr(os, "unlink", noted("unlink", os.unlink))
    return calls


def fork(work: Callable[..., object], *arguments: object, expected: type[BaseException] | tuple[()] = ()) -> int:
    """Starts a fork; its exit code is 0 when `work` returned, 3 when it raised what is expected, else 1."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(*arguments)
            code = 0
        except expected:
            code = 3
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    return pid


def forked(work: Callable[[], object]) -> int:
    """Runs `work` in a fork and returns its exit code: 0 when it returned, 1 when it raised, -N killed by signal N."""
    return os.waitstatus_to_exitcode(reap(fork(work)))


def ended_process() -> int:
    """The number of a process that has been."""
    pid = fork(lambda: None)
    reap(pid)
    return pid


@contextlib.contextmanager
def running(work: Callable[..., object], *arguments: object) -> Iterator[int]:
    """Runs `work` in a fork that is killed in the end, if it was not before; yields its number once it has begun."""
    ready, begun = os.pipe()

    def begin() -> None:
        os.write(begun, b".")
        work(*arguments)

    pid = fork(begin)
    os.read(ready, 1)
    os.close(ready)
    os.close(begun)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def reap(pid: int) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the child hung for {DEADLINE_S:.0f} s")
        time.sleep(0.001)


def python(source: str, *arguments: object, before: Iterable[str] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter, `before` being a command that starts it."""
    return run_command(*before, sys.executable, "-c", source, *arguments, env={**os.environ, "PYTHONPATH": str(HERE)})


def sealed(directory: Path, lengths: list[int], per_chunk: int = 2, *, end: bool = True) -> Path:
    return publish_rows(directory, per_chunk, rows(0, len(lengths)), lengths, end=end)


def put_lengths(directory: Path, *lengths: list[int], first: int = 0) -> Path:
    """Puts lengths into seals that are there, as no producer would."""
    for chunk, values in enumerate(lengths, first):
        seal = replace(read_seal(directory, chunk), tokens=np.array(values, np.uint32))
        (directory / seal_name(chunk)).write_bytes(seal.encode())
    return directory


def lengths_of(directory: Path) -> list[int]:
    stream = open_now(directory)
    return [int(length) for length in read_lengths(stream, stream.published().samples)]


def seal_rows(directory: Path, chunk: int, *rows: bytes, tokens: list[int] | None = None) -> None:
    """Writes a chunk of these rows, whatever they are, and its seal."""
    (directory / chunk_name(chunk)).write_bytes(b"".join(rows))
    offsets = [0, *itertools.accumulate(map(len, rows))]
    seal = Seal(
        chunk=chunk,
        offsets=np.array(offsets, np.uint64),
        digests=np.array([xxhash.xxh3_64_intdigest(row) for row in rows], np.uint64),
        tokens=None if tokens is None else np.array(tokens, np.uint32),
        sealed_at=1700000000.0,
    )
    (directory / seal_name(chunk)).write_bytes(seal.encode())


SIZE = 4


def write_pieces(
    stream: Path, name: str, rows: int, writers: int | None = None, *, first: int = 0, end: bool = True, text: str = ""
) -> None:
    """A writer publishes rows [first, rows) as pieces of 4; each row is a line of NAME.jsonl beside the stream."""
    source = stream.parent / f"{name}.jsonl"
    lines = [f'{{"id": "{text or f"{name}-{number}"}"}}\n'.encode() for number in range(rows)]
    source.write_bytes(b"".join(lines))
    with mock.patch.multiple(Share, begin=mock.DEFAULT, finish=mock.DEFAULT, make_room=mock.DEFAULT):
        writer = ChunkWriter(stream, SIZE, writer=name, writers=writers)
        for number in range(first, rows):
            entry = {"path": str(source), "kind": "jsonl", "offset": sum(map(len, lines[: number + 1]))}
            position = {"sources": [{**entry, "line": number + 1}], "rows": number + 1, "refused": 0, "skip": 0}
            writer.write(lines[number], source=position)
        writer.close(end)


def sequence(directory: Path) -> None:
    """A sequencer gives all pieces that are there their numbers."""
    writer = open_sequenced(directory, time.time, False, None)
    sequencer = Sequencer(writer, None, 0)
    while not sequencer.ended and sequencer.turn():
        pass
    sequencer.close()


def owners(directory: Path) -> list[list[str]]:
    """The ids of the rows of each chunk."""
    chunks = sorted(directory.glob("chunk_*.jsonl"))
    return [[json.loads(line)["id"] for line in chunk.read_bytes().splitlines()] for chunk in chunks]


class World:
    """A watchdog of 60 s; `options` are its own."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.told: list[str] = []
        self.watchdog = Watchdog(self.told.append, **options)
        self.watchdog._clock = lambda: self.now

    def look_at(self, now: float) -> list[str]:
        self.now = now
        self.watchdog.look()
        told, self.told[:] = list(self.told), []
        return told


_OWN = "own"


def stream_id_of(directory: Path) -> str | None:
    """What its manifest says, None without one."""
    file = directory / "stream.json"
    return Manifest.decode(file.read_bytes()).stream_id if file.exists() else None


def cursor(directory: Path, consumer: str, *, consumed: int, chunks_before: int, stream_id: str | None = _OWN) -> None:
    stream_id = stream_id_of(directory) if stream_id == _OWN else stream_id
    write_cursor(directory, Cursor(consumer, stream_id, consumed, chunks_before, {"dp_size": 1}, 1700000000.0))


def cursor_of(directory: Path, consumer: str = "run") -> Cursor:
    """The cursor of a consumer, which is to have one."""
    found = read_cursor(directory, consumer)
    assert found is not None
    return found


def reading(directory: Path, consumer: str, *, needs_chunks: int, stream_id: str | None = _OWN) -> None:
    stream_id = stream_id_of(directory) if stream_id == _OWN else stream_id
    write_reading(directory, ReadingHint(consumer, stream_id, 1, 0, needs_chunks, 1700000000.0))
