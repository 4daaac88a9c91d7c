"""Eight named writers of one stream beside as many streams; the sequencer's cost; latency, take-over, bytes of a seal.

The sides of a comparison write the same rows by the same calls, each writer in a process of its own; wall time from
when all are ready until all have ended. `--dir` is best /dev/shm.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from lazyshard import ChunkWriter
from lazyshard.format.records import END, seal_name
from lazyshard.format.writers import WRITERS, Committed
from lazyshard.stream import share
from lazyshard.stream.members import read_committed
from lazyshard.stream.sequencer import Sequencing
from lazyshard.stream.share import Share
from lazyshard.stream.writer import open_sequenced
from scripts.benchmarks.bench_harness import Benchmark, Failed, Figures, Row, Setting, Side, bound, variables
from scripts.benchmarks.bench_wait import PAUSE_S, PER_CHUNK, WARM_UP
from scripts.benchmarks.bench_wait_ranks import Rank, closing_all

WRITERS_BESIDE: Final = 8
MANY: Final = 256
LINE: Final = b'{"text": "' + b"x" * 2000 + b'"}\n'
BATCH: Final = 500
_fork: Final = multiprocessing.get_context("fork")


def _write(directory: Path, rows: int, per_chunk: int, names: Mapping[str, Any], ready: Any) -> None:
    lines = [LINE] * min(BATCH, per_chunk)
    ready.wait()
    with ChunkWriter(directory, per_chunk, **names) as writer:
        for number in range(0, rows, len(lines)):
            writer.write_lines(lines, source=number)


def side_by_side(place: Path, rows: int, per_chunk: int, *, shared: bool) -> Figures:
    """Returns microseconds a row of eight writers, into one stream or a stream each."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        ready = _fork.Barrier(WRITERS_BESIDE + 1)
        given: list[tuple[Path, dict[str, Any]]] = [
            (Path(folder, "shared"), {"writer": f"w{number}", "writers": WRITERS_BESIDE})
            if shared
            else (Path(folder, f"w{number}"), {})
            for number in range(WRITERS_BESIDE)
        ]
        processes = [_fork.Process(target=_write, args=(path, rows, per_chunk, names, ready)) for path, names in given]
        for process in processes:
            process.start()
        ready.wait()
        began = time.perf_counter()
        for process in processes:
            process.join()
        took = time.perf_counter() - began
        if any(process.exitcode for process in processes):
            raise Failed("a writer has failed")
        return {"us": took / (rows * WRITERS_BESIDE) * 1e6}


def followed(place: Path, rows: int, per_chunk: int) -> Figures:
    """Returns microseconds a row of the command over files that are all there: it reads and writes each byte again."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        sources = [Path(folder, f"w{number}.jsonl") for number in range(WRITERS_BESIDE)]
        for path in sources:
            path.write_bytes(LINE * rows)
        words = [sys.executable, "-m", "lazyshard_producer", "run", "--no-progress", "--out", f"{folder}/out"]
        words += ["--samples-per-chunk", str(per_chunk), *(f"--source={path}" for path in sources)]
        began = time.perf_counter()
        done = subprocess.run(words, capture_output=True, env=variables(place, ours=True), text=True, check=False)
        if done.returncode:
            raise Failed(done.stderr)
        return {"us": (time.perf_counter() - began) / (rows * WRITERS_BESIDE) * 1e6}


@contextmanager
def _waiting_for_nobody() -> Any:
    with (
        mock.patch.object(Share, "_run", lambda self: None),
        mock.patch.object(Share, "finish", lambda self, published: None),
        mock.patch.object(share, "MOST_PIECES", 1 << 20),
    ):
        yield


def sequencing(place: Path, pieces: int, per_chunk: int, writers: int = 1) -> Figures:
    """Returns what sequencing pieces that wait costs, and the bytes of the newest seal's position and of the hint."""
    directory, chunks = place / f"sequenced_{time.monotonic_ns()}", writers * pieces
    with _waiting_for_nobody():
        for number in range(writers):
            with ChunkWriter(directory, per_chunk, writer=f"writer-{number:03d}", writers=writers) as writer:
                for _ in range(0, pieces * per_chunk, BATCH if per_chunk > BATCH else per_chunk):
                    writer.write_lines(
                        [LINE] * min(BATCH, per_chunk), source={"path": "/data/part-00000", "line": 10**6}
                    )
    work = Sequencing(directory, lambda: open_sequenced(directory, time.time, False, None))
    work.step()
    sequencer, before = work.sequencer, _chunks(directory)
    assert sequencer is not None
    began, left = time.process_time(), chunks - before
    while left:
        left -= sequencer.turn()
    took = (time.process_time() - began) / (chunks - before) * 1000
    work.close()
    seal = (directory / seal_name(writers * pieces - 1)).stat().st_size / 1000
    own = (directory / WRITERS / "writer-000" / seal_name(pieces - 1)).stat().st_size / 1000
    hint = (directory / WRITERS / Committed.NAME).stat().st_size / 1000
    shutil.rmtree(directory)
    return {"processor ms": took, "KB more in a seal": seal - own, "KB": hint}


def _chunks(directory: Path) -> int:
    found = read_committed(directory)
    return 0 if found is None else found.chunks


def latency(place: Path, chunks: int, names: Mapping[str, Any]) -> float:
    """Returns the median of milliseconds from a chunk's last row to the first sample of a rank that waits."""
    directory = place / f"latency_{time.monotonic_ns()}"
    settings = {"directory": str(directory), "rank": 0, "ranks": 1, "per_chunk": PER_CHUNK, "woken": True}
    found: list[float] = []
    row = {"text": "x" * 2000}
    with ChunkWriter(directory, PER_CHUNK, **names) as writer:
        rank = Rank("latency", settings | {"stripes": WARM_UP + chunks}, place)
        with closing_all([rank]):
            rank.line()
            for chunk in range(WARM_UP + chunks):
                for number in range(PER_CHUNK - 1):
                    writer.write(row | {"id": chunk * PER_CHUNK + number})
                time.sleep(PAUSE_S[True])
                given = time.monotonic()
                writer.write(row | {"id": (chunk + 1) * PER_CHUNK - 1})
                answer = rank.line()
                if answer["id"] != chunk * PER_CHUNK:
                    raise Failed(f"expected sample {chunk * PER_CHUNK}, got {answer}")
                if chunk >= WARM_UP:
                    found.append((answer["at"] - given) * 1000)
    return statistics.median(found)


def later(place: Path, chunks: int) -> Figures:
    """Returns by how much a named writer's sample comes later than an unnamed one's."""
    named = latency(place, chunks, {"writer": "a", "writers": 1})
    return {"ms more": max(0.001, named - latency(place, chunks, {}))}


def take_over(place: Path) -> Figures:
    """Returns seconds from kill -9 of the sequencer's process until another writer's next piece has its number."""
    directory = place / f"taken_over_{time.monotonic_ns()}"

    def sequencer() -> None:
        with ChunkWriter(directory, 2, writer="a", writers=2) as writer:
            for _ in range(4):
                writer.write({})
            time.sleep(600)

    process = _fork.Process(target=sequencer)
    process.start()
    while not _chunks(directory):
        time.sleep(0.01)
    writer = ChunkWriter(directory, 2, writer="b")
    time.sleep(1.0)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    began, before = time.perf_counter(), _chunks(directory)
    for _ in range(2):
        writer.write({})
    while _chunks(directory) == before:
        time.sleep(0.001)
    took = time.perf_counter() - began
    writer.close(end=False)
    assert not (directory / END).exists()
    return {"s": took}


def prepare(setting: Setting) -> Mapping[str, Side]:
    """Returns the sides."""
    place, rows = setting.place, setting.size(50_000, 2_000)
    sizes = {1_000: 1_000, 10_000: setting.size(10_000, 1_000)}

    def beside(per_chunk: int, shared: bool) -> Callable[[], Figures]:
        return lambda: side_by_side(place, rows, sizes[per_chunk], shared=shared)

    return {
        "8 writers, one stream, chunks of 1,000": beside(1_000, True),
        "8 streams, chunks of 1,000": beside(1_000, False),
        "8 writers, one stream, chunks of 10,000": beside(10_000, True),
        "8 streams, chunks of 10,000": beside(10_000, False),
        "lazyshard-producer run over 8 files": lambda: followed(place, rows, 1_000),
        "sequencing a chunk of 1,000": lambda: sequencing(place, setting.size(100, 5), 1_000),
        "sequencing a chunk of 10,000": lambda: sequencing(place, setting.size(20, 2), sizes[10_000]),
        "a named writer": lambda: later(place, setting.size(20, 3)),
        "after kill -9 of the sequencer": lambda: take_over(place),
        "256 writers": lambda: sequencing(place, 2, 10, setting.size(MANY, 4)),
    }


_ONE: Final = "8 writers, one stream, chunks of"

MANY_WRITERS: Final = Benchmark(
    "writers",
    "named writers of one stream, rows of 2 KB: throughput, the sequencer's cost, latency, take-over, sizes",
    (
        Row("chunks-1000", f"{_ONE} 1,000", "8 streams, chunks of 1,000", "us", 0.9),
        Row("chunks-10000", f"{_ONE} 10,000", "8 streams, chunks of 10,000", "us", 0.9),
        Row("command", f"{_ONE} 1,000", "lazyshard-producer run over 8 files", "us"),
        bound("sequencer-1000", "sequencing a chunk of 1,000", 1.0, "processor ms"),
        bound("sequencer-10000", "sequencing a chunk of 10,000", 1.0, "processor ms"),
        bound("latency", "a named writer", 20.0, "ms more"),
        bound("take-over", "after kill -9 of the sequencer", 5.0, "s"),
        bound("seal-256", "256 writers", 20.0, "KB more in a seal"),
        bound("hint-256", "256 writers", 20.0, "KB"),
    ),
    prepare,
)
