"""Predictions beside real runs: at each number of ranks one that the training limits and one that the producer limits.

    python -m tests.harness.simulated.check [--ranks 2 4 8] [--tolerance 0.15]

takes about a minute. Exit codes: 0 all predictions fit; 1 one is off by more than is allowed, or a run failed; 2 usage.
The simulation is told what a step took in the same run, waits left out: these ranks only sleep, but a busy machine lets
them sleep for longer."""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from lazyshard.simulation import Setting, outcome
from tests.harness.simulated.real import Measured, RealRunFailed, measure

_BUSY: Final = 1.25  # Where sleeping takes so many times as long, other people's work is measured

_COMMON: Final[dict[str, Any]] = {
    **{"batch": 4, "step_seconds": 0.1, "workers": 0, "latency_s": 0.0, "row_bytes": 200},
    **{"retain": "consumed", "checkpoint_steps": 10},
}


def _case(ranks: int, per_chunk: int, rows: int, rate: float, **more: Any) -> Setting:
    return Setting(ranks=ranks, samples_per_chunk=per_chunk, rows=rows, producer_rate=rate, **(_COMMON | more))


CASES: Final = (
    _case(2, 20, 640, 200.0, max_ahead="6 chunks"),
    _case(2, 20, 400, 50.0),
    _case(4, 20, 1280, 400.0, max_ahead="16 chunks", window=2),
    _case(4, 25, 800, 100.0, woken=True),
    _case(8, 20, 2560, 800.0, head_start=320),
    _case(8, 10, 1600, 200.0, window=2),
)


def compare(measured: Measured, tolerance: float) -> list[bool]:
    """Prints prediction and measurement; returns which figures fit, within the tolerance and one event more or less."""
    predicted, ranks = outcome(measured.setting), measured.setting.ranks
    print(f"\n{measured.setting}\n  {'':20}{'predicted':>11}{'measured':>11}")
    fits = []
    for name, wanted, real, besides in (
        ("first step, s", predicted["first_step_s"], measured.first_step_s, 0.5),
        ("last step, s", predicted["end_s"], measured.end_s, 0.5),
        ("stalled, s", predicted["stalled_s"], measured.stalled_s, 0.05 * measured.end_s),
        ("share stalled", predicted["stall_share"], measured.stall_share, 0.05),
        ("disk peak, chunks", predicted["peak_chunks"], measured.peak_chunks, 2.0),
        ("opens of head.json", predicted["head_opens"], measured.head_opens, 10.0 + 2.0 * ranks),
        ("opens of chunks", predicted["chunk_opens"], measured.chunk_opens, 0.0),
    ):
        allowed = tolerance * real + besides
        fits.append(abs(wanted - real) <= allowed)
        verdict = "" if fits[-1] else f"   more than {allowed:.3g} apart"
        print(f"  {name:20}{wanted:>11,.3f}{real:>11,.3f}{verdict}", flush=True)
    return fits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4, 8), choices=(2, 4, 8), help="only those")
    parser.add_argument("--tolerance", type=float, default=0.15, help="share by which predictions may be off (0.15)")
    parser.add_argument("--dir", type=Path, help="where to put the streams (a temporary folder)")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    fits: list[bool] = []
    for case in CASES:
        if case.ranks not in args.ranks:
            continue
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            try:
                real = measure(case, Path(folder))
            except RealRunFailed as error:
                print(f"a real run failed: {error}", file=sys.stderr)
                return 1
        fits += compare(real, args.tolerance)
        if real.setting.step_seconds > _BUSY * case.step_seconds:
            print(f"  this machine is busy: a step of {1000 * case.step_seconds:.0f} ms took longer; so may all else")
    print(f"\n{sum(fits)} of {len(fits)} predictions are within {args.tolerance:.0%} and what each may be off besides")
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    return 0 if all(fits) else 1


if __name__ == "__main__":
    sys.exit(main())
