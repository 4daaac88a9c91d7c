"""How full packs are, how many there are and how long it takes: `lazyshard.plan.pack_samples` beside `binpacking`.

Run by `scripts/bench_pack`. Lengths are drawn at random: lognormal of three widths with the same mean, and uniform, cut
at the capacity. In each round both pack the same new lengths, one after the other; ours in this process, binpacking in
one of its own. All is processor time, and a ratio is taken within a round. At last, what it takes to make sequences of
a raw stream as training reads it, which every process that reads does with all rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard import ChunkWriter, Pack, Pad, Split, StreamReader
from lazyshard.data.sequence_planner import SequencePlanner, SequenceWalk
from lazyshard.format.sequence_state import Place
from lazyshard.plan import pack_samples
from lazyshard.plan.packing import efficiency
from scripts.benchmarks.bench_report import Report, spread, versions_of

LEAST_EFFICIENCY: Final = 0.995
LEAST_SPEEDUP: Final = 50.0
JUDGED: Final = "lognormal, sigma 1"
"""The lengths for which efficiency and speed are asked for; never more packs than binpacking: for all of them."""

BUFFERS: Final = (100, 300, 1_000, 3_000, 10_000, 30_000)

WINDOWS: Final = (1, 3, 10, 30)
"""Chunks of 1,000 rows."""

Lengths = npt.NDArray[np.int64]
Peer = Callable[[Lengths], dict[str, Any]]


class Shape(NamedTuple):
    """How lengths are spread: lognormal of this sigma, or uniform where it is None."""

    name: str
    sigma: float | None

    def draw(self, seed: int, args: argparse.Namespace, samples: int) -> Lengths:
        """Returns so many lengths."""
        rng = np.random.default_rng(seed)
        if self.sigma is None:
            return rng.integers(1, args.capacity + 1, samples)
        drawn = rng.lognormal(np.log(args.mean) - self.sigma**2 / 2, self.sigma, samples)
        return np.clip(np.rint(drawn), 1, args.capacity).astype(np.int64)


SHAPES: Final = (
    Shape("lognormal, sigma 0.5", 0.5),
    Shape("lognormal, sigma 1", 1.0),
    Shape("lognormal, sigma 1.5", 1.5),
    Shape("uniform", None),
)


@contextlib.contextmanager
def opened_peer(python: str | None, capacity: int) -> Iterator[Peer | None]:
    """Starts the other one."""
    if python is None:
        yield None
        return
    program = Path(__file__).with_name("bench_pack_peer.py")
    with subprocess.Popen([python, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        to, back = process.stdin, process.stdout

        def ask(lengths: Lengths) -> dict[str, Any]:
            to.write(json.dumps({"lengths": lengths.tolist(), "capacity": capacity}) + "\n")
            to.flush()
            answer = back.readline()
            if not answer:
                raise RuntimeError("binpacking has failed, see above")
            found: dict[str, Any] = json.loads(answer)
            return found

        ask(np.array([1]))
        yield ask
        to.close()


def measure_beside(peer: Peer | None, args: argparse.Namespace, report: Report) -> None:
    """Prints how both pack one buffer."""
    print(f"\n{args.samples:,} samples of {args.mean} tokens in the mean, packs of {args.capacity:,}")
    print(f"{'':22}{'filled, %':>24}{'packs over the least':>24}{'ms':>20}{'binpacking: packs':>19}{'times':>22}")
    for shape in SHAPES:
        found: dict[str, list[float]] = {name: [] for name in ("filled", "over", "ms", "more", "times")}
        for seed in range(args.rounds):
            lengths = shape.draw(seed, args, args.samples)
            start = time.process_time()
            packs = len(pack_samples(lengths, args.capacity))
            seconds = time.process_time() - start
            found["filled"].append(efficiency(lengths, packs, args.capacity))
            found["over"].append(packs - -(-int(lengths.sum()) // args.capacity))
            found["ms"].append(seconds * 1e3)
            if peer is not None:
                theirs = peer(lengths)
                found["more"].append(theirs["packs"] - packs)
                found["times"].append(theirs["seconds"] / seconds)
        row = f"{shape.name:22}{spread(found['filled'], 100, 2):>24}{spread(found['over'], digits=0):>24}"
        row += f"{spread(found['ms'], digits=1):>20}"
        if peer is not None:
            row += f"{'+' + spread(found['more'], digits=0):>19}{spread(found['times'], digits=0):>22}"
        print(row)
        report.results[shape.name] = found
        judge(shape.name, found, report)


def judge(name: str, found: dict[str, list[float]], report: Report) -> None:
    """Notes what is worse than asked for; `Report.judge` is for medians that should be low."""
    if name == JUDGED:
        if (filled := statistics.median(found["filled"])) < LEAST_EFFICIENCY:
            report.worse.append(f"{name}: {filled:.2%} filled, asked for: {LEAST_EFFICIENCY:.1%}")
        if found["times"] and (times := statistics.median(found["times"])) < LEAST_SPEEDUP:
            report.worse.append(f"{name}: {times:.0f} times as fast as binpacking, asked for: {LEAST_SPEEDUP:.0f}")
    if found["more"] and min(found["more"]) < 0:
        report.worse.append(f"{name}: {-min(found['more']):.0f} packs more than binpacking, asked for: none")


def measure_buffers(args: argparse.Namespace, report: Report) -> None:
    """Prints how the buffer counts where there are many samples: each buffer is packed for itself."""
    shape, samples = next(shape for shape in SHAPES if shape.name == JUDGED), 10 * max(BUFFERS)
    print(f"\n{samples:,} samples, {shape.name}, one buffer after the other")
    print(f"{'buffer':>10}{'filled, %':>24}{'us a sample':>22}")
    for buffer in BUFFERS:
        filled, cost = [], []
        for seed in range(args.rounds):
            lengths = shape.draw(seed, args, samples)
            start = time.process_time()
            packs = sum(len(pack_samples(lengths[at : at + buffer], args.capacity)) for at in range(0, samples, buffer))
            cost.append((time.process_time() - start) / samples * 1e6)
            filled.append(efficiency(lengths, packs, args.capacity))
        print(f"{buffer:>10,}{spread(filled, 100, 2):>24}{spread(cost, digits=2):>22}")
        report.results[f"buffer of {buffer}"] = {"filled": filled, "us": cost}


def measure_run_time(args: argparse.Namespace, report: Report) -> None:
    """Prints what every reading process does with all rows of a raw stream: lengths read, sequences made."""
    shape, samples = next(shape for shape in SHAPES if shape.name == JUDGED), 10 * args.samples
    print(
        f"\nat run time: {samples:,} samples, {shape.name}, chunks of 1,000; lengths read, sequences of all ranks made"
    )
    print(f"{'':8}{'window':>10}{'filled, %':>12}{'us a sample':>22}")
    lengths = shape.draw(0, args, samples)
    with tempfile.TemporaryDirectory(prefix="lazyshard-bench-") as folder:
        with ChunkWriter(Path(folder) / "stream", 1000) as writer:
            for length in lengths.tolist():
                writer.write(b"{}", tokens=length)
        for form in (Pack(args.capacity), Split(size=args.capacity, eos=0), Pad(args.capacity)):
            for window in WINDOWS:
                cost = []
                for _ in range(args.rounds):
                    reader = StreamReader(Path(folder) / "stream")
                    walk = SequenceWalk(SequencePlanner(reader, form.rule, window, None, "raise"), Place(), 0)
                    start = time.process_time()
                    sequences = len(walk.sequences(0, samples))
                    cost.append((time.process_time() - start) / samples * 1e6)
                filled, name = efficiency(lengths, sequences, args.capacity), type(form).__name__
                print(f"{name:8}{window:>10}{filled * 100:>12.2f}{spread(cost, digits=2):>22}")
                report.results[f"at run time, {name}, {window} chunks"] = {"filled": [filled], "us": cost}


def main() -> int:
    """Measures and reports; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000, help="of a buffer")
    parser.add_argument("--capacity", type=int, default=8192, help="tokens of a pack")
    parser.add_argument("--mean", type=int, default=700, help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", default=None, help="Python with binpacking; scripts/bench_pack gives it")
    parser.add_argument("--json", type=Path, default=None, help="append the results as one JSON line to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    args = parser.parse_args()
    if min(args.samples, args.capacity, args.mean, args.rounds) < 1:
        parser.error("--samples, --capacity, --mean and --rounds are at least 1")
    with opened_peer(args.peer, args.capacity) as peer:
        beside = "" if peer is None else f", binpacking {peer(np.array([1]))['version']} in a process of its own"
        report = Report(versions_of(["numpy"]) + beside)
        measure_beside(peer, args, report)
    measure_buffers(args, report)
    measure_run_time(args, report)
    return report.conclude(args)


if __name__ == "__main__":
    sys.exit(main())
