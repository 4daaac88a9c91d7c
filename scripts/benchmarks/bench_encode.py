"""What a sample costs a trainer's process that is encoded already, against one that it encodes itself.

Run by `scripts/bench_encode`. Both streams hold the same chat rows of about 2 KB; both are read in order, in batches of
8, by `LazyShardedDataset`, and give the same samples, which is checked. What is counted is the processor's time of the
process, reading included on both sides. Rounds alternate, so a noisy machine disturbs both alike; the ratio is taken
round by round. "cached" is the raw stream again, with all of its samples in a cache of encoded ones, so that nothing is
encoded: the ratio is to the encoded stream. Rows with 1 MiB of features are read beside the same bytes, and beside
other loaders' reading of the same arrays, each in an environment of its own: see `bench_encode_features`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
PROCESS: Final = Path(__file__).with_name("bench_encode_process.py")

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "integrations" / "swift")]

from scripts.benchmarks import bench_encode_features as features  # noqa: E402
from scripts.benchmarks.bench_read import make_stream  # noqa: E402

PARTS: Final = ("encoding", "features")

LARGEST_SHARE: Final = 1 / 20
"""Of the time on the fly that a sample of an encoded stream may take."""

LARGEST_CACHED: Final = 1.2
"""Times what a sample of an encoded stream takes that one out of the cache may take."""


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Returns the ratios round by round.

    >>> ratios([1.0, 3.0], [2.0, 4.0])
    [0.5, 0.75]
    """
    return [one / other for one, other in zip(over, under, strict=True)]


def failures(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns what is worse than asked for, a line each."""
    found = []
    share = statistics.median(ratios(seconds["encoded"], seconds["on the fly"]))
    if share > LARGEST_SHARE:
        found.append(f"a sample of an encoded stream takes {share:.3f} of the time on the fly, more than 1/20")
    cached = statistics.median(ratios(seconds["cached"], seconds["encoded"]))
    if cached > LARGEST_CACHED:
        found.append(f"a sample of the cache takes {cached:.3f} of the time of an encoded stream, more than 1.2")
    return found


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Returns the median with the least and the greatest value.

    >>> spread([3.0, 1.0, 2.0])
    '2.0 (1.0-3.0)'
    """
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def measure(place: Path, rows: int, rounds: int) -> dict[str, Any]:
    """Returns what the process has found; see `bench_encode_process`."""
    stream = place / "stream"
    make_stream(stream, rows, "prose")
    more = {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "integrations" / "swift"))),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # One thread, as in a worker beside others.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    settings = json.dumps({"place": str(place), "stream": str(stream), "rounds": rounds})
    command = [sys.executable, str(PROCESS), settings]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | more, check=False)
    if done.returncode:
        raise SystemExit(f"scripts/bench_encode: its process failed with {done.returncode}\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(found: Mapping[str, Any], rows: int, rounds: int) -> list[str]:
    """Returns the lines about encoding and its cache."""
    seconds: Mapping[str, Sequence[float]] = found["seconds"]
    lines = [f"{rows} chat rows of {found['tokens']:.0f} tokens, {rounds} rounds, median (least-greatest)\n"]
    for name in ("on the fly", "encoded", "cached"):
        micros = [one / rows * 1e6 for one in seconds[name]]
        lines.append(f"{name:12}{spread(micros):>28}  microseconds of processor a sample")
    share = spread(ratios(seconds["encoded"], seconds["on the fly"]), 4)
    cached = spread(ratios(seconds["cached"], seconds["encoded"]), 3)
    lines.append(f"{'ratio':12}{share:>28}  asked for: at most 0.0500")
    return [*lines, f"{'cached':12}{cached:>28}  of encoded; at most 1.200\n"]


def main() -> int:
    """Runs everything and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench_encode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    parser.add_argument("--rows", type=int, default=2000, metavar="N", help="chat rows (2000)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="passes through each stream (5)")
    parser.add_argument("--dir", help="where to put the streams (the system's temporary directory)")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="directory with the environments of other loaders")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--check", action="store_true", help="fail where a figure is worse than asked for")
    given = parser.parse_args()
    if given.rows < 1 or given.rounds < 1:
        parser.error("--rows and --rounds are 1 or more")
    parts = [given.only] if given.only else PARTS
    if "encoding" in parts and importlib.util.find_spec("swift") is None:
        print("scripts/bench_encode: ms-swift is not installed", file=sys.stderr)
        return 2
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}")
    found: dict[str, Any] = {"rows": given.rows}
    worse: list[str] = []
    with tempfile.TemporaryDirectory(dir=given.dir, ignore_cleanup_errors=True) as place:
        if "encoding" in parts:
            found |= measure(Path(place), given.rows, given.rounds)
            print(*report(found, given.rows, given.rounds), sep="\n", flush=True)
            worse += failures(found["seconds"])
        if "features" in parts:
            found["features"] = features.measure(Path(place, "arrays"), given.rounds, given.peers)
            print(*features.table(found["features"]), sep="\n", flush=True)
            worse += features.failures(found["features"])
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n")
    for line in worse:
        print(f"worse than asked for: {line}")
    return 1 if given.check and worse else 0


if __name__ == "__main__":
    sys.exit(main())
