"""Regression benchmarks: packing, balancing by cost, tables of blends, the start-up file.

- pack: fill rate and time of packs with lognormal lengths, compared with the package binpacking.
- balance: the largest cost of a rank divided by the mean, over all steps, if a producer deals rows by cost.
- blend: the time to build the table of a blend of 100 streams.
- startup: the time that `lazyshard_swift.pth` adds to each interpreter start, of which a training job has dozens.

All times are CPU time.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
import subprocess
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from lazyshard.plan.balance import Balance, Cost
from lazyshard.plan.blend import BlendTable, whole_parts
from lazyshard.plan.sequences import pack_samples
from scripts.benchmarks.bench_harness import ROOT, Benchmark, Failed, Figures, Row, Setting, Side, bound, child
from scripts.benchmarks.bench_process import timed
from tests.plan.evenness import evenness, step_costs

CAPACITY: Final = 8192
MEAN: Final = 700
SIGMA: Final = 1.0
"""Of the lengths, in tokens: lognormal, cut at the capacity."""

RANKS: Final = 64
SAMPLES_PER_CHUNK: Final = 1000

Lengths = npt.NDArray[np.int64]


def make_lengths(seed: int, samples: int) -> Lengths:
    """Draws lengths."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, samples)
    return np.clip(np.rint(drawn), 1, CAPACITY).astype(np.int64)


def prepare_pack(setting: Setting) -> Mapping[str, Side]:
    """Returns the sides of `pack`: in each round all of them get the same new lengths."""
    samples = setting.size(10_000, 1_000)
    ours, theirs, least = itertools.count(), itertools.count(), itertools.count()

    def packing() -> Figures:
        lengths = make_lengths(next(ours), samples)
        packs: list[object] = []
        taken = timed(lambda: packs.extend(pack_samples(lengths, CAPACITY)))
        return {"packs": len(packs), "processor us": taken["processor us"]}

    def beside() -> Figures:
        settings = {"lengths": make_lengths(next(theirs), samples).tolist(), "capacity": CAPACITY}
        return child("bench_formats.binpack", settings, setting.place, setting.python("binpacking"))

    def tokens() -> Figures:
        return {"packs": int(make_lengths(next(least), samples).sum()) / CAPACITY}

    return {"pack_samples": packing, "binpacking": beside, "all tokens over the capacity": tokens}


PACK: Final = Benchmark(
    "pack",
    "10,000 samples of 700 tokens into packs of 8,192",
    (
        Row("filled", "pack_samples", "all tokens over the capacity", "packs", 0.995),
        Row("packs", "pack_samples", "binpacking", "packs", 1.0),
        Row("speed", "pack_samples", "binpacking", "processor us", 50.0),
    ),
    prepare_pack,
)


def prepare_balance(setting: Setting) -> Mapping[str, Side]:
    """Returns the sides of `balance`."""
    size = setting.size(SAMPLES_PER_CHUNK, 200)
    seeds = itertools.count()

    def even(rows: int, dealt: bool) -> Figures:
        balance, cost = Balance(RANKS, size, rows, next(seeds)), Cost()
        lengths = make_lengths(0, balance.stripe)
        if dealt:
            lengths = lengths[balance.order(cost.of(lengths), 0)]
        found = evenness(step_costs(cost.of(lengths), RANKS, size, rows))
        assert found is not None
        return {"largest over mean": found.overall}

    return {
        f"{how}, {rows} a micro batch": functools.partial(even, rows, how == "dealt")
        for how in ("dealt", "as they come")
        for rows in (1, 8)
    }


_LARGEST: Final = 1.02
_COSTS: Final = "largest over mean"

BALANCE: Final = Benchmark(
    "balance",
    "how even the steps of 64 ranks are, lognormal lengths",
    (
        bound("dealt-1", "dealt, 1 a micro batch", _LARGEST, _COSTS),
        bound("dealt-8", "dealt, 8 a micro batch", _LARGEST, _COSTS),
        Row("gain-1", "dealt, 1 a micro batch", "as they come, 1 a micro batch", _COSTS, 2.0),
        Row("gain-8", "dealt, 8 a micro batch", "as they come, 8 a micro batch", _COSTS, 2.0),
    ),
    prepare_balance,
)


def prepare_blend(setting: Setting) -> Mapping[str, Side]:
    """Returns the side of `blend`: weights at random, other ones each time."""
    rng = random.Random(0)

    def table() -> Figures:
        weights = [rng.uniform(0.1, 10) for _ in range(100)]
        return {"processor ms": timed(lambda: BlendTable(whole_parts(weights)))["processor us"] / 1e3}

    return {"the table of 100 streams": table}


BLEND: Final = Benchmark(
    "blend",
    "the table of a blend; what its rows cost is read.blend and read.blend-windows",
    (bound("table", "the table of 100 streams", 50.0, "processor ms"),),
    prepare_blend,
)


def _environment(place: Path, active: bool) -> tuple[str, dict[str, str]]:
    """Makes a virtual environment that has the package, with its `.pth` file or not; returns how to start it."""
    venv.create(place, symlinks=True)
    python = str(place / "bin" / "python")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    (packages,) = place.glob("lib/python*/site-packages")
    source = ROOT / "integrations" / "swift"
    shutil.copytree(
        source / "lazyshard_swift", packages / "lazyshard_swift", ignore=shutil.ignore_patterns("__pycache__")
    )
    if active:
        shutil.copy(source / "lazyshard_swift.pth", packages)
    subprocess.run([python, "-m", "compileall", "-q", str(packages)], check=True)
    code = "import sys; print(any(hasattr(finder, 'lazyshard_swift') for finder in sys.meta_path))"
    found = subprocess.check_output([python, "-c", code], env=kept, text=True).strip()
    if found != str(active):
        raise Failed(f"{packages}: whether it is active should be {active}, is {found}")
    return python, kept


def prepare_startup(setting: Setting) -> Mapping[str, Side]:
    """Returns the sides of `startup`: places that hold the same files, compiled, but for the `.pth` file."""
    starts = setting.size(100, 3)

    def starting(active: bool) -> Side:
        made = functools.cache(lambda: _environment(setting.place / f"active_{active}", active))

        def start() -> None:
            python, variables = made()
            for _ in range(starts):
                # Not subprocess.run: its own work would be in the figure.
                pid = os.posix_spawn(python, [python, "-c", "pass"], variables)
                if status := os.waitpid(pid, 0)[1]:
                    raise Failed(f"{python} ended with status {status}")

        def turn() -> Figures:
            made()
            return {"processor ms": timed(start, starts)["processor us"] / 1e3}

        return turn

    return {"python -c pass": starting(True), "the same without the .pth file": starting(False)}


STARTUP: Final = Benchmark(
    "startup",
    "what lazyshard_swift.pth costs each start of the interpreter",
    (Row("pth", "python -c pass", "the same without the .pth file", "processor ms", 0.95),),
    prepare_startup,
)
