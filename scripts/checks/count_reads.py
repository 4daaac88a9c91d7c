"""Counts what each rank opens and reads of a stream, by the unit in which samples are dealt. Measures no times.

Run by `scripts/count_reads`. Each rank reads one epoch in batches, as a DataLoader without workers does, in a data set
of its own. Counted are the calls with which rows are read, and the bytes that these ask for; what a data set reads of
small files (`stream.json`, `head.json`) is left out, what it reads of seals is told apart.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import orjson

from lazyshard import ChunkWriter, LazyShardedDataset, Order
from lazyshard.format.records import SEAL_SUFFIX


@dataclass
class Counts:
    """Counts of reads.

    Attributes:
        files: data files that were read from, by name.
        reads: calls that read rows.
        row_bytes: bytes read by them.
        seal_bytes: bytes read of seals.
    """

    files: set[str] = field(default_factory=set)
    reads: int = 0
    row_bytes: int = 0
    seal_bytes: int = 0


@dataclass(frozen=True)
class Rank:
    """What one rank read.

    Attributes:
        counts: the reads.
        own_bytes: bytes of the rows that it was to read.
        unit: samples that it was dealt in a row.
        needed: rows that must be published before its first sample, the end of the stream not being known.
    """

    counts: Counts
    own_bytes: int
    unit: int
    needed: int


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Counts the chunk reads of this process in the block. Needs /proc to find the file of a descriptor."""
    counts, real = Counts(), os.pread

    def pread(fd: int, size: int, at: int) -> bytes:
        data = real(fd, size, at)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name.endswith(SEAL_SUFFIX):
            counts.seal_bytes += len(data)
        elif name.startswith("chunk_"):
            counts.files.add(name)
            counts.reads += 1
            counts.row_bytes += len(data)
        return data

    with mock.patch.object(os, "pread", pread):
        yield counts


def make_stream(directory: Path, rows: int, row_bytes: int, chunks: int, foreign: bool = False) -> Path:
    """Makes an ended stream of numbered rows of about `row_bytes` bytes; with `foreign` it has empty markers."""
    with ChunkWriter(directory, -(-rows // chunks)) as writer:
        for number in range(rows):
            writer.write(orjson.dumps({"id": number, "text": "x" * max(0, row_bytes - 24 - len(str(number)))}))
    if foreign:
        for path in directory.iterdir():
            if path.name.endswith(SEAL_SUFFIX) or path.name == "stream.end":
                path.write_bytes(b"")
            elif path.is_file() and path.suffix == ".json":
                path.unlink()
    return directory


def read_epoch(directory: Path, rank: int, ranks: int, batch: int, unit: Any, window: int, size: int | None) -> Rank:
    """Reads what a rank trains in an epoch, and returns what that took; `size` rows in a chunk if nothing says it."""
    with counted() as counts:
        dataset = LazyShardedDataset(
            directory,
            dp_rank=rank,
            dp_size=ranks,
            batch_size=batch,
            order=Order(unit=unit, shuffle_window=window),
            samples_per_chunk=size,
        )
        own, indices = 0, dataset.rank_indices
        for first in range(0, len(indices), batch):
            rows = dataset.__getitems__(list(indices[first : first + batch]))
            own += sum(len(orjson.dumps(row)) + 1 for row in rows)
    return Rank(counts, own, dataset.unit, dataset._space().course.needed(0))


def table(directory: Path, args: argparse.Namespace, size: int | None) -> list[str]:
    """Returns the lines of a table with the maximum of all ranks in each field."""
    lines = [
        f"{'unit':<8}{'samples':>9}{'files opened':>14}{'reads':>9}{'MB of rows':>12}{'of its own':>12}"
        f"{'MB of seals':>13}{'first step waits for':>22}"
    ]
    for name in args.units:
        unit = int(name) if name.isdigit() else name
        found = [
            read_epoch(directory, rank, args.ranks, args.batch, unit, args.window, size) for rank in range(args.ranks)
        ]
        counts = [one.counts for one in found]
        lines.append(
            f"{name:<8}{found[0].unit:>9,}{max(len(one.files) for one in counts):>14,}"
            f"{max(one.reads for one in counts):>9,}{max(one.row_bytes for one in counts) / 1e6:>12.2f}"
            f"{max(one.counts.row_bytes / one.own_bytes for one in found):>11.2f}x"
            f"{max(one.seal_bytes for one in counts) / 1e6:>13.2f}{found[0].needed:>17,} rows"
        )
    return lines


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="What each rank opens and reads of a stream, by unit; counted.")
    parser.add_argument("--rows", type=int, default=40_000, help="rows of the stream (40000)")
    parser.add_argument("--row-bytes", type=int, default=2_000, help="approximate bytes per row (2000)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 8, 12], help="files of the stream (1 8 12)")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks (8)")
    parser.add_argument("--batch", type=int, default=4, help="samples per micro batch of a rank (4)")
    parser.add_argument("--window", type=int, default=0, help="shuffle window, in chunks (0)")
    units = ["chunk", "batch", "sample", "1000", "auto"]
    parser.add_argument("--units", nargs="+", default=units, help=f"units ({' '.join(units)})")
    parser.add_argument("--foreign", action="store_true", help="a directory without seals, as of another program")
    parser.add_argument("--dir", type=Path, help="where to make the streams (a temporary directory)")
    args = parser.parse_args()
    for option in ("rows", "row_bytes", "ranks", "batch"):
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} is 1 or more, got {getattr(args, option)}")
    if min(args.chunks) < 1 or max(args.chunks) > args.rows:
        parser.error(f"--chunks are from 1 to --rows, got {' '.join(map(str, args.chunks))}")
    if args.rows < args.ranks * args.batch:
        parser.error(f"--rows is at least --ranks * --batch = {args.ranks * args.batch}, got {args.rows}")
    for name in args.units:
        if name not in ("chunk", "batch", "sample", "auto") and not (name.isdigit() and int(name)):
            parser.error(f"--units are chunk, batch, sample, auto or numbers from 1, got {name!r}")
    return args


def main() -> int:
    """Counts for each number of chunks."""
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for chunks in args.chunks:
            directory = make_stream(Path(folder, str(chunks)), args.rows, args.row_bytes, chunks, args.foreign)
            size = sum(path.stat().st_size for path in directory.glob("chunk_*.jsonl"))
            files = len(list(directory.glob("chunk_*.jsonl")))
            shuffled = f", shuffled in windows of {args.window} chunks" if args.window else ""
            print(
                f"{args.rows:,} rows in {files} {'file' if files == 1 else 'files'}, {size / 1e6:.1f} MB; "
                f"{args.ranks} ranks, batches of {args.batch}{shuffled}; the most of any rank:"
            )
            per_chunk = -(-args.rows // chunks) if args.foreign else None
            print("\n".join(table(directory, args, per_chunk)), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
