"""How soon a reader has the first sample of a chunk, counted from the moment when its last row is given to the writer.

Writer and reader are two processes; both read CLOCK_MONOTONIC, which is one clock for the whole machine. Rows come
slowly, as when they are being generated, so the reader is waiting when the chunk comes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from lazyshard import ChunkWriter

CHUNKS = 60
WARM_UP = 5
PAUSE_S = 0.05

READER = """
import sys, time
from lazyshard import LazyShardedDataset
dataset = LazyShardedDataset(sys.argv[1], dp_rank=0, dp_size=1, max_total_samples=int(sys.argv[3]) * int(sys.argv[2]))
for chunk in range(int(sys.argv[3])):
    dataset[chunk * int(sys.argv[2])]
    print(time.monotonic(), flush=True)
"""


def measure_latency(place: Path, samples_per_chunk: int) -> dict[str, list[float]]:
    """Prints and returns milliseconds, one for each chunk."""
    print(
        f"\nfrom the last row of a chunk of {samples_per_chunk} rows of 2 KB to a waiting reader's first sample of it"
    )
    found: dict[str, list[float]] = {}
    for name, overlap in (("ChunkWriter", False), ("ChunkWriter(overlap=True)", True)):
        values = _measure(place / name, samples_per_chunk, overlap)
        ordered = sorted(values)
        print(
            f"{name:28}{statistics.median(values):8.1f} ms (lowest {ordered[0]:.1f}, 95 of 100 "
            f"{ordered[len(ordered) * 95 // 100]:.1f}, highest {ordered[-1]:.1f})"
        )
        found[name] = values
    return found


def _measure(directory: Path, samples_per_chunk: int, overlap: bool) -> list[float]:
    row = {"text": "x" * 2000}
    with ChunkWriter(directory, samples_per_chunk, overlap=overlap) as writer:
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(directory), str(samples_per_chunk), str(CHUNKS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        with reader:
            assert reader.stdout is not None
            waits = []
            for _ in range(CHUNKS):
                for _ in range(samples_per_chunk - 1):
                    writer.write(row)
                # So that the reader has come to wait, and what was written is not all in flight.
                time.sleep(PAUSE_S)
                given = time.monotonic()
                writer.write(row)
                waits.append((float(reader.stdout.readline()) - given) * 1000)
    return waits[WARM_UP:]
