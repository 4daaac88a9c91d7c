"""How fast rows get into a stream, against the tight loop of `orjson.loads` over the same lines, memory-mapped.

Run by `scripts/bench_producer`. Every row is validated and digested, and every chunk synced, its directory too. The
variants take turns, so that a noisy machine disturbs all of them alike; a ratio is taken within a round, and the median
over the rounds is reported with the lowest and the highest. On a busy machine, prepend `nice -n -20 chrt -f 50`.

What the disk does is part of it: `--dir` on the disk to be measured, or /dev/shm to leave it out.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import orjson
import xxhash
from bench_producer_latency import measure_latency
from bench_producer_peers import WRITERS, Peer
from bench_producer_process import Producer, Taken, timed
from bench_read import floor, make_stream

from lazyshard import ChunkWriter
from lazyshard_producer.sources.allocator import keep_freed_memory
from scripts.benchmarks.bench_report import folder

BLOCK_BYTES = 1 << 20
SOURCE = "chunk_00000.jsonl"
"""The source's name, by which `floor` finds it."""

Variant = Callable[[Path, Path], Taken]
"""Does the work on the rows of a source, into a directory that is not there yet."""


def make_source(place: Path, rows: int, text: str) -> Path:
    """Makes a file with the rows of `scripts/bench_read`."""
    stream = place / "stream"
    make_stream(stream, rows, text)
    source = place / text / SOURCE
    source.parent.mkdir()
    with source.open("wb") as file:
        for chunk in sorted(stream.glob("chunk_*.jsonl")):
            with chunk.open("rb") as part:
                shutil.copyfileobj(part, file)
    shutil.rmtree(stream)
    return source


def parse(source: Path, out: Path) -> Taken:
    """Parses every line and does nothing else."""
    return timed(lambda: floor(source.parent))


def blocks(source: Path) -> Iterator[list[bytes]]:
    """Yields the lines of a file, about 1 MiB of them at a time."""
    with source.open("rb", buffering=BLOCK_BYTES) as file:
        while lines := file.readlines(BLOCK_BYTES):
            yield lines


class Writing:
    """The variants that use `ChunkWriter` in this process."""

    def __init__(self, samples_per_chunk: int) -> None:
        self._samples_per_chunk = samples_per_chunk

    def by_lines(self, source: Path, out: Path, overlap: bool = False) -> Taken:
        """`write_lines`."""

        def work() -> None:
            with ChunkWriter(out, self._samples_per_chunk, overlap=overlap) as writer:
                for lines in blocks(source):
                    at = 0
                    while at < len(lines):
                        part = lines[at : at + writer.room]
                        at += len(part)
                        writer.write_lines(part)

        return timed(work)

    def overlapped(self, source: Path, out: Path) -> Taken:
        """`write_lines` of a writer that publishes in a thread."""
        return self.by_lines(source, out, overlap=True)

    def device(self, source: Path, out: Path) -> Taken:
        """The bytes alone, in as many files, each synced once: what the device makes of it."""

        def work() -> None:
            out.mkdir()
            with source.open("rb", buffering=BLOCK_BYTES) as file:
                for number in itertools.count():
                    data = b"".join(itertools.islice(file, self._samples_per_chunk))
                    if not data:
                        return
                    with (out / str(number)).open("wb") as target:
                        target.write(data)
                        target.flush()
                        os.fsync(target.fileno())

        return timed(work)

    def row_by_row(self, source: Path, out: Path) -> Taken:
        """`write`."""

        def work() -> None:
            with ChunkWriter(out, self._samples_per_chunk) as writer, source.open("rb", buffering=BLOCK_BYTES) as file:
                for line in file:
                    writer.write(line)

        return timed(work)


class Decompressing:
    """The variants that read a gzip file."""

    @staticmethod
    def library(source: Path, out: Path) -> Taken:
        """zlib alone, in this process."""

        def work() -> None:
            decompressor = zlib.decompressobj(wbits=31)
            with source.open("rb") as file:
                while data := file.read(256 << 10):
                    while data:
                        decompressor.decompress(data, BLOCK_BYTES)
                        data = decompressor.unconsumed_tail

        return timed(work)

    @staticmethod
    def program(source: Path, out: Path) -> Taken:
        """`gzip -dc`, a process of its own."""
        return timed(lambda: subprocess.run(["gzip", "-dc", source], stdout=subprocess.DEVNULL, check=True))


def measure(variants: dict[str, Variant], source: Path, rounds: int) -> dict[str, list[Taken]]:
    """Returns what each variant took, once for each round; a first round to warm the caches is not counted."""
    found: dict[str, list[Taken]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, variant in variants.items():
            with tempfile.TemporaryDirectory(dir=source.parents[1]) as out:
                taken = variant(source, Path(out) / "out")
            if number:
                found[name].append(taken)
    return found


def report(found: dict[str, list[Taken]], rows: int, size: int) -> list[dict[str, object]]:
    """Prints a table, with ratios to the first variant, and returns its rows."""
    base = next(iter(found.values()))
    print(f"{'':40}{'by the clock:':>28}{'':31}processor time:")
    print(f"{'':40}{'rows/s':>9}{'MB/s':>7}{'us a row':>10}{'ratio (lowest, highest)':>27}{'us a row':>13}  ratio")
    results: list[dict[str, object]] = []
    for name, values in found.items():
        line: dict[str, object] = {"variant": name}
        texts = []
        for kind, seconds, bases in zip(Taken._fields, zip(*values), zip(*base), strict=True):  # noqa: B905
            ratios = [one / other for one, other in zip(bases, seconds, strict=True)]
            median, ratio = statistics.median(seconds) / rows, statistics.median(ratios)
            texts.append((median * 1e6, f"{ratio:.2f} ({min(ratios):.2f}, {max(ratios):.2f})"))
            line |= {f"{kind}_us_a_row": median * 1e6, f"{kind}_ratio": ratio, f"{kind}_ratios": ratios}
        (clock, of_clock), (processor, of_processor) = texts
        speed = f"{1e6 / clock:>9,.0f}{size / rows / clock:>7,.0f}{clock:>10.2f}{of_clock:>27}"
        print(f"{name:40}{speed}{processor:>13.2f}  {of_processor}")
        results.append(line)
    return results


def compress(source: Path) -> Path:
    """Returns a copy of a source, compressed by gzip with its usual level."""
    packed = source.parents[1] / "gzip" / f"{SOURCE}.gz"
    packed.parent.mkdir()
    with source.open("rb") as file, gzip.open(packed, "wb", compresslevel=6) as target:
        shutil.copyfileobj(file, target, BLOCK_BYTES)
    return packed


def take_rows(source: Path, rows: int) -> Path:
    """Returns a file with the first rows of a source."""
    fewer = source.parents[1] / "fewer" / SOURCE
    fewer.parent.mkdir()
    with source.open("rb") as file, fewer.open("wb") as target:
        target.writelines(line for _, line in zip(range(rows), file, strict=False))
    return fewer


def main() -> int:
    """Runs everything and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples-per-chunk", type=int, default=1000)
    parser.add_argument("--dir", type=folder, default=None, help="where to put everything (default: a temporary one)")
    parser.add_argument("--peers", type=Path, default=None, help="directory with the environments of other writers")
    parser.add_argument("--json", type=Path, default=None, help="append the results as one JSON line to this file")
    args = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    versions = f"orjson {orjson.__version__}, numpy {numpy.__version__}, xxhash {xxhash.VERSION}"
    print(f"{machine}, {versions}; load {os.getloadavg()[0]:.1f} at the start")
    keep_freed_memory()
    writing, producer = Writing(args.samples_per_chunk), Producer(args.samples_per_chunk)
    results: dict[str, object] = {"machine": machine, "samples_per_chunk": args.samples_per_chunk}
    with tempfile.TemporaryDirectory(dir=args.dir) as place:
        for text in ("prose", "plain"):
            source = make_source(Path(place), args.rows, text)
            size = source.stat().st_size
            print(f"\n{args.rows:,} rows of {text} text, {size / args.rows:,.0f} bytes in the mean")
            variants: dict[str, Variant] = {
                "orjson.loads alone": parse,
                "the bytes, one fsync a chunk, alone": writing.device,
                "ChunkWriter(overlap=True).write_lines": writing.overlapped,
                "ChunkWriter.write_lines": writing.by_lines,
                "ChunkWriter.write": writing.row_by_row,
                "lazyshard-producer run, after its start": producer.run,
                "lazyshard-producer run, with its start": producer.run_whole,
            }
            results[text] = report(measure(variants, source, args.rounds), args.rows, size)
            if text == "prose":
                fewer = take_rows(source, max(1, args.rows // 4))
                rows, size = max(1, args.rows // 4), fewer.stat().st_size
                packed = compress(fewer)
                print(f"\n{rows:,} of these rows compressed by gzip; MB/s are of text")
                variants = {
                    "zlib alone": Decompressing.library,
                    "gzip -dc": Decompressing.program,
                    "lazyshard-producer run, after its start": producer.run,
                }
                results["gzip"] = report(measure(variants, packed, args.rounds), rows, size)
                if args.peers:
                    print(f"\n{rows:,} of these rows, each writer in a process and an environment of its own")
                    variants = {"orjson.loads alone": parse, "ChunkWriter(overlap=True)": writing.overlapped}
                    peers = [Peer(package, args.peers, args.samples_per_chunk) for package in WRITERS]
                    variants |= {peer.name: peer.run for peer in peers}
                    results["peers"] = report(measure(variants, fewer, args.rounds), rows, size)
                results["memory_mb"] = producer.report_memory(source, Path(place))
        results["latency_ms"] = measure_latency(Path(place), args.samples_per_chunk)
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
