"""Throughput of publishing rows, compared with `orjson.loads` over the same lines and with other writers; memory.

Every row is validated and digested, and every chunk and its directory are synced. Measured as CPU time of all threads
and processes, which other work on the machine affects less than wall time; wall time in comparisons with other writers.
Those neither sync nor digest each row: they show the usual way into each format, not the same work. `--dir` is best
/dev/shm.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from lazyshard import ChunkWriter
from lazyshard_producer.run import keep_freed_memory
from scripts.benchmarks.bench_data import SAMPLES_PER_CHUNK, chunk_files, make_stream
from scripts.benchmarks.bench_harness import Benchmark, Failed, Figures, Row, Setting, Side, bound, child
from scripts.benchmarks.bench_harness import variables as child_variables
from scripts.benchmarks.bench_process import timed
from scripts.benchmarks.bench_read import PARSING, parse

BLOCK_BYTES: Final = 1 << 20
MOST_MB: Final = 66.0
"""64 MB and one chunk."""

PEAK: Final = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, used = os.wait4(pid, 0)
print("\\n", used.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Started by a small process, as the system counts the parent's memory too."""

Work = Callable[[Path, Path], object]
"""Writes the rows of a source into a directory that is not there yet."""


def one_file(stream: Path, source: Path, rows: int | None = None) -> Path:
    """Returns a file with the first rows of a stream, unless it is there: in a folder where `parse` finds it."""
    if not source.exists():
        source.parent.mkdir(parents=True, exist_ok=True)
        with source.open("wb") as target:
            lines = itertools.chain.from_iterable(path.open("rb") for path in chunk_files(stream))
            target.writelines(itertools.islice(lines, rows))
    return source


def by_lines(source: Path, out: Path, overlap: bool = False) -> None:
    """`ChunkWriter.write_lines`; with `overlap` chunks are published in a thread."""
    with (
        ChunkWriter(out, SAMPLES_PER_CHUNK, overlap=overlap) as writer,
        source.open("rb", buffering=BLOCK_BYTES) as file,
    ):
        while lines := file.readlines(BLOCK_BYTES):
            at = 0
            while at < len(lines):
                part = lines[at : at + writer.room]
                at += len(part)
                writer.write_lines(part)


def row_by_row(source: Path, out: Path) -> None:
    """`ChunkWriter.write`."""
    with ChunkWriter(out, SAMPLES_PER_CHUNK) as writer, source.open("rb", buffering=BLOCK_BYTES) as file:
        for line in file:
            writer.write(line)


def the_bytes(source: Path, out: Path) -> None:
    """The bytes alone, in as many files, each synced once: what the device makes of it."""
    out.mkdir()
    with source.open("rb", buffering=BLOCK_BYTES) as file:
        for number in itertools.count():
            if not (data := b"".join(itertools.islice(file, SAMPLES_PER_CHUNK))):
                return
            with (out / str(number)).open("wb") as target:
                target.write(data)
                target.flush()
                os.fsync(target.fileno())


def decompress(source: Path, out: Path) -> None:
    """zlib alone."""
    decompressor = zlib.decompressobj(wbits=31)
    with source.open("rb") as file:
        while data := file.read(256 << 10):
            while data:
                decompressor.decompress(data, BLOCK_BYTES)
                data = decompressor.unconsumed_tail


def compress(source: Path, packed: Path) -> Path:
    """Returns a copy of a source, compressed by gzip, unless it is there."""
    if not packed.exists():
        packed.parent.mkdir(parents=True)
        with source.open("rb") as file, gzip.open(packed, "wb", compresslevel=6) as target:
            shutil.copyfileobj(file, target, BLOCK_BYTES)
    return packed


def command(source: Path, out: Path) -> list[str]:
    """Returns the command line of a run."""
    program = [sys.executable, "-m", "lazyshard_producer", "run", "--no-progress"]
    return [*program, "--source", str(source), "--out", str(out), "--samples-per-chunk", str(SAMPLES_PER_CHUNK)]


def run(source: Path, out: Path) -> Figures:
    """Returns the cost of `lazyshard-producer run`, minus its cost for a source of one row."""
    one = out.with_name("one.jsonl")
    one.write_bytes(b'{"id":0}\n')
    both = ((source, out), (one, out.with_name("one")))
    whole, start = (timed(functools.partial(_complete, command(of, to), out.parent)) for of, to in both)
    return {unit: whole[unit] - start[unit] for unit in whole}


def _complete(words: list[str], home: Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, env=child_variables(home, ours=True), check=False)
    if done.returncode:
        raise Failed(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def peak(words: list[str], home: Path) -> float:
    """Runs a program and returns its peak of resident memory in MB."""
    return int(_complete([sys.executable, "-ISc", PEAK, *words], home).split()[-1]) * 1024 / 1e6


def memory(source: Path, out: Path) -> Figures:
    """Returns the peak memory of a run above that of a bare interpreter."""
    bare = peak([sys.executable, "-c", "pass"], out.parent)
    return {"MB": peak(command(source, out), out.parent) - bare}


def prepare(setting: Setting) -> Mapping[str, Side]:
    """Returns the sides."""
    place, rows = setting.place, setting.size(100_000, 2_000)
    fewer = rows // 4

    def source(text: str, count: int = rows) -> Path:
        # As the one chunk of a folder, by which `parse` finds it.
        path = place / f"{text}_{count}" / "chunk_00000.jsonl"
        return one_file(make_stream(place / text, rows, text), path, count)

    def side(make: Callable[[], Path], work: Callable[[Path, Path], Figures]) -> Side:
        def turn() -> Figures:
            # As the command does it.
            keep_freed_memory()
            path = make()
            with tempfile.TemporaryDirectory(dir=place) as out:
                return work(path, Path(out) / "out")

        return turn

    def writing(work: Work, text: str = "prose", count: int = rows) -> Side:
        return side(lambda: source(text, count), lambda path, out: timed(lambda: work(path, out), count))

    def running(make: Callable[[], Path], count: int) -> Side:
        return side(make, lambda path, out: {unit: us / count for unit, us in run(path, out).items()})

    def packed() -> Path:
        return compress(source("prose", fewer), place / "gzip" / "rows.jsonl.gz")

    def peer(package: str, **options: Any) -> Side:
        def work(path: Path, out: Path) -> Figures:
            shard = 0 if package == "datasets" else SAMPLES_PER_CHUNK * 2048
            settings = {"package": package, "files": [str(path)], "out": str(out), "shard_bytes": shard, **options}
            found = child("bench_formats.write", settings, place, setting.python(package))
            return {unit: us / fewer for unit, us in found.items()}

        return side(lambda: source("prose", fewer), work)

    overlapped = functools.partial(by_lines, overlap=True)
    return {
        PARSING: writing(lambda path, _: parse(path.parent)),
        "the same bytes, one fsync a chunk": writing(the_bytes),
        "write_lines": writing(by_lines),
        "write_lines, overlap": writing(overlapped),
        "write, row by row": writing(row_by_row),
        "lazyshard-producer run": running(lambda: source("prose"), rows),
        "orjson.loads alone, plain text": writing(lambda path, _: parse(path.parent), "plain"),
        "lazyshard-producer run, plain text": running(lambda: source("plain"), rows),
        "zlib alone": side(packed, lambda path, out: timed(lambda: decompress(path, out), fewer)),
        "lazyshard-producer run, gzip": running(packed, fewer),
        "peak of a run": side(lambda: source("prose"), memory),
        "write_lines, a quarter of the rows": writing(overlapped, count=fewer),
        "MDSWriter": peer("mosaicml-streaming", hashes=["xxh64"]),
        "litdata optimize": peer("litdata"),
        "datasets to Arrow": peer("datasets"),
    }


_UNIT: Final = "processor us"
_QUARTER: Final = "write_lines, a quarter of the rows"

PRODUCER: Final = Benchmark(
    "producer",
    "a row of 2 KB into a stream, against parsing alone; beside other writers; memory",
    (
        Row("bytes", "the same bytes, one fsync a chunk", PARSING, _UNIT),
        Row("overlap", "write_lines, overlap", PARSING, _UNIT, 0.45),
        Row("lines", "write_lines", PARSING, _UNIT, 0.5),
        Row("rows", "write, row by row", PARSING, _UNIT, 0.35),
        Row("command", "lazyshard-producer run", PARSING, _UNIT, 0.45),
        Row("plain", "lazyshard-producer run, plain text", "orjson.loads alone, plain text", _UNIT, 0.3),
        Row("gzip", "lazyshard-producer run, gzip", "zlib alone", _UNIT, 0.45),
        bound("memory", "peak of a run", MOST_MB, "MB"),
        Row("mosaicml-streaming", _QUARTER, "MDSWriter", "us", 1.0),
        Row("litdata", _QUARTER, "litdata optimize", "us", 1.0),
        Row("datasets", _QUARTER, "datasets to Arrow", "us", 1.0),
    ),
    prepare,
)
