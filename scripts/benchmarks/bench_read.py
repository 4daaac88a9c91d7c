"""How fast `LazyShardedDataset` reads, against the tight loop of `orjson.loads` over the same lines, memory-mapped.

Run by `scripts/bench_read`. The variants take turns in one process, so that a noisy machine disturbs all of them
alike; a ratio is taken within a round, and the median over the rounds is reported with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import orjson
import torch

from lazyshard import ChunkWriter, LazyShardedDataset
from scripts.benchmarks.bench_report import folder

SAMPLES_PER_CHUNK = 1000
BATCH = 8


def make_text(rng: random.Random, words: list[str], length: int) -> str:
    """Returns about so many words as people write them: sentences, paragraphs, quotes, some letters beyond ASCII."""
    text = []
    while length > 0:
        sentence = rng.choices(words, k=min(length, rng.randint(4, 24)))
        length -= len(sentence)
        if rng.random() < 0.2:
            sentence[-1] = f'"{sentence[-1]}"'
        text.append(" ".join(sentence).capitalize() + rng.choice((". ", ". ", ".\n", "?\n\n")))
    return "".join(text)


def make_plain(rng: random.Random, words: list[str], length: int) -> str:
    """Returns so many words and nothing else: text that needs no escapes parses in a third of the time."""
    return " ".join(rng.choices(words, k=length))


def make_stream(directory: Path, rows: int, text: str) -> None:
    """Writes chat rows of made-up text: lognormal lengths, about 2 KB in the mean, always the same ones."""
    make = make_plain if text == "plain" else make_text
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(5000)]
    if text != "plain":
        words += ["naïve", "señor", "Größe", "œuvre", "мир", "世界", "データ"] * 10
    with ChunkWriter(directory, SAMPLES_PER_CHUNK) as writer:
        for number in range(rows):
            length = int(rng.lognormvariate(5.5, 0.6))
            messages = [
                {"role": "user", "content": make(rng, words, length // 5)},
                {"role": "assistant", "content": make(rng, words, length - length // 5)},
            ]
            writer.write({"id": number, "messages": messages})


def floor(directory: Path) -> int:
    """Parses every line and does nothing else: no digests, no order, no index."""
    rows = 0
    for path in sorted(directory.glob("chunk_*.jsonl")):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
            for line in iter(lines.readline, b""):
                orjson.loads(line)
                rows += 1
    return rows


def in_order(directory: Path) -> int:
    """ds[i], one by one."""
    dataset = LazyShardedDataset(directory, dp_rank=0, dp_size=1)
    for index in range(len(dataset)):
        dataset[index]
    return len(dataset)


def _batches(dataset: LazyShardedDataset) -> int:
    total = len(dataset)
    for start in range(0, total, BATCH):
        dataset.__getitems__(list(range(start, min(start + BATCH, total))))
    return total


def in_batches(directory: Path) -> int:
    """ds.__getitems__ in batches, as a DataLoader worker calls it."""
    return _batches(LazyShardedDataset(directory, dp_rank=0, dp_size=1))


def shuffled(directory: Path) -> int:
    """The same with windows of 4 chunks shuffled."""
    return _batches(LazyShardedDataset(directory, dp_rank=0, dp_size=1, shuffle_window=4))


def at_random(directory: Path) -> int:
    """ds[i] in random order over the whole stream."""
    dataset = LazyShardedDataset(directory, dp_rank=0, dp_size=1)
    order = list(range(len(dataset)))
    random.Random(0).shuffle(order)
    for index in order:
        dataset[index]
    return len(dataset)


VARIANTS: dict[str, Callable[[Path], int]] = {
    "orjson floor": floor,
    "ds[i] in order": in_order,
    f"__getitems__, {BATCH}": in_batches,
    f"__getitems__, {BATCH}, window 4": shuffled,
    "ds[i] at random": at_random,
}


def measure_reading(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Returns seconds a row of each variant, one for each round; a first round to warm the caches is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds + 1):
        for name, variant in VARIANTS.items():
            start = time.perf_counter()
            rows = variant(directory)
            if number:
                seconds[name].append((time.perf_counter() - start) / rows)
    return seconds


def report_reading(seconds: dict[str, list[float]]) -> list[dict[str, object]]:
    """Prints a table and returns its rows."""
    base = seconds["orjson floor"]
    print(f"{'':34}{'rows/s':>10}{'us a row':>10}{'ratio to the floor (lowest, highest)':>40}")
    results: list[dict[str, object]] = []
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(base, values, strict=True)]
        median, ratio = statistics.median(values), statistics.median(ratios)
        print(
            f"{name:34}{1 / median:>10,.0f}{median * 1e6:>10.2f}{ratio:>20.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
        )
        results.append({"variant": name, "us_a_row": median * 1e6, "ratio": ratio, "ratios": ratios})
    return results


def make_many_chunks(directory: Path, files: int) -> None:
    """Makes a stream of so many chunk files cheaply: one chunk is written, the others are its copies with other
    numbers."""
    with ChunkWriter(directory, 4) as writer:
        for number in range(4):
            writer.write({"id": number, "text": "x" * 100})
    data = (directory / "chunk_00000.jsonl").read_bytes()
    seal = json.loads((directory / "chunk_00000.jsonl.completed").read_bytes())
    for chunk in range(1, files):
        (directory / f"chunk_{chunk:05d}.jsonl").write_bytes(data)
        (directory / f"chunk_{chunk:05d}.jsonl.completed").write_text(json.dumps(seal | {"chunk": chunk}))
    for name in ("head.json", "stream.end"):
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"chunks": files, "samples": 4 * files}))


FIRST_SAMPLE = """
import sys, time, lazyshard
lazyshard.LazyShardedDataset
start = time.perf_counter()
dataset = lazyshard.LazyShardedDataset(sys.argv[1], dp_rank=0, dp_size=8)
dataset[int(sys.argv[2]) * 8 % len(dataset)]
print((time.perf_counter() - start) * 1000)
"""


def measure_first_sample(directory: Path, rounds: int) -> list[float]:
    """Returns milliseconds from construction to the first sample, a fresh process each time, at places all over the
    stream."""
    found = []
    for number in range(max(5, rounds)):
        command = [sys.executable, "-c", FIRST_SAMPLE, str(directory), str(number * 997)]
        found.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return found


def resident_kb() -> int:
    """Returns the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def measure_memory(directory: Path) -> list[tuple[int, int]]:
    """Returns (chunks read, KB resident) at five places of one pass over the many chunks."""
    dataset = LazyShardedDataset(directory, dp_rank=0, dp_size=1)
    total = len(dataset)
    marks = []
    for index in range(total):
        dataset[index]
        if index % (total // 5) == total // 5 - 1:
            marks.append(((index + 1) // 4, resident_kb()))
    return marks


def main() -> int:
    """Runs everything and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk-files", type=int, default=20_000)
    parser.add_argument(
        "--dir", type=folder, default=None, help="where to put the streams (default: a temporary directory)"
    )
    parser.add_argument("--json", type=Path, default=None, help="append the results as one JSON line to this file")
    args = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}, orjson {orjson.__version__}, numpy {numpy.__version__}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(dir=args.dir) as place:
        many = Path(place) / "many"
        results: dict[str, object] = {}
        for text in ("prose", "plain"):
            stream = Path(place) / text
            make_stream(stream, args.rows, text)
            size = sum(path.stat().st_size for path in stream.glob("chunk_*.jsonl"))
            chunks = -(-args.rows // SAMPLES_PER_CHUNK)
            print(f"\n{args.rows:,} rows of {text} text, {size / args.rows:,.0f} bytes in the mean, in {chunks} chunks")
            results[text] = report_reading(measure_reading(stream, args.rounds))
        make_many_chunks(many, args.chunk_files)
        first = measure_first_sample(many, args.rounds)
        print(
            f"\nfirst sample of {args.chunk_files:,} chunk files: {statistics.median(first):.1f} ms from construction "
            f"({min(first):.1f} to {max(first):.1f})"
        )
        memory = measure_memory(many)
        print("resident memory: " + ", ".join(f"{kb / 1024:.1f} MB after {chunks:,} chunks" for chunks, kb in memory))
        if args.json:
            line = {"machine": machine, "reading": results, "first_sample_ms": first, "memory_kb": memory}
            with args.json.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
