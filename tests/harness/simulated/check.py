"""Predictions beside real runs: at each number of ranks one that the training limits and one that the producer limits.

    python -m tests.harness.simulated.check [--ranks 2 4 8] [--tolerance 0.15]

takes about a minute. Exit codes: 0 all predictions fit; 1 one is off by more than is allowed, or a run failed; 2 usage.

The simulation is told what a step took in the same run, waits left out: these ranks only sleep, but a busy machine lets
them sleep for longer.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.simulation import Setting, outcome
from tests.harness.simulated.real import Measured, RealRunFailed, measure

# Where sleeping takes so many times as long as it was asked to, what is measured is other people's work
_BUSY: Final = 1.25

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


class Comparison(NamedTuple):
    name: str  # which
    predicted: float  # by the simulation
    measured: float  # in the real run
    allowed: float  # how far they may be apart

    @property
    def fits(self) -> bool:
        return abs(self.predicted - self.measured) <= self.allowed

    @property
    def error(self) -> float | None:
        """Of the prediction, as a share of what was measured; None where that is 0."""
        return None if not self.measured else (self.predicted - self.measured) / self.measured


def compare(measured: Measured, tolerance: float) -> list[Comparison]:
    """Returns the prediction for a run beside what was measured. Besides the tolerance each figure may be off by what
    processes take to start, and by what one event more or less comes to: half a second, a twentieth of the time
    stalled, two chunks, ten looks and two of each rank."""
    found, ranks = outcome(measured.setting), measured.setting.ranks
    return [
        Comparison(name, predicted, real, tolerance * real + besides)
        for name, predicted, real, besides in (
            ("first step, s", found["first_step_s"], measured.first_step_s, 0.5),
            ("last step, s", found["end_s"], measured.end_s, 0.5),
            ("stalled, s", found["stalled_s"], measured.stalled_s, 0.05 * measured.end_s),
            ("share stalled", found["stall_share"], measured.stall_share, 0.05),
            ("disk peak, chunks", found["peak_chunks"], measured.peak_chunks, 2.0),
            ("opens of head.json", found["head_opens"], measured.head_opens, 10.0 + 2.0 * ranks),
            ("opens of chunks", found["chunk_opens"], measured.chunk_opens, 0.0),
        )
    ]


def describe(setting: Setting) -> str:
    ahead = "" if setting.max_ahead is None else f", --max-ahead {setting.max_ahead}"
    head = "" if not setting.head_start else f", {setting.head_start} of them in advance"
    return (
        f"{setting.ranks} ranks of {setting.batch} rows a step of {1000 * setting.step_seconds:.0f} ms; "
        f"{setting.rows} rows at {setting.producer_rate:g} a second{head}; {setting.samples_per_chunk} a chunk, window "
        f"{setting.window}{ahead}, {'woken' if setting.woken else 'polling'}"
    )


def lines(comparisons: Iterable[Comparison]) -> Iterator[str]:
    yield f"  {'':20}{'predicted':>11}{'measured':>11}{'off by':>9}"
    for one in comparisons:
        digits = 0 if one.predicted == int(one.predicted) and one.measured == int(one.measured) else 3
        error = "-" if one.error is None else f"{one.error:+.1%}"
        verdict = "" if one.fits else f"   more than {one.allowed:.3g}"
        yield f"  {one.name:20}{one.predicted:>11,.{digits}f}{one.measured:>11,.{digits}f}{error:>9}{verdict}"


def check(
    cases: Iterable[Setting], place: Path | None, tolerance: float, say: Callable[[str], None]
) -> list[tuple[Setting, list[Comparison]]]:
    """Runs cases for real and compares them with their predictions. `place`: where to put the streams; None for a
    temporary folder. `tolerance`: share of what was measured by which a prediction may be off. `say`: is given each
    line of the report as soon as it is known."""
    found = []
    for case in cases:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            real = measure(case, Path(folder))
        comparisons = compare(real, tolerance)
        found.append((real.setting, comparisons))
        say(f"\n{describe(real.setting)}")
        for line in lines(comparisons):
            say(line)
        if real.setting.step_seconds > _BUSY * case.step_seconds:
            say(f"  this machine is busy: a step of {1000 * case.step_seconds:.0f} ms took longer; so may all else")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4, 8), choices=(2, 4, 8), help="only those")
    parser.add_argument("--tolerance", type=float, default=0.15, help="share by which predictions may be off (0.15)")
    parser.add_argument("--dir", type=Path, help="where to put the streams (a temporary folder)")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    cases = [case for case in CASES if case.ranks in args.ranks]
    try:
        found = check(cases, args.dir, args.tolerance, lambda line: print(line, flush=True))
    except RealRunFailed as error:
        print(f"a real run failed: {error}", file=sys.stderr)
        return 1
    fits = [one.fits for _, comparisons in found for one in comparisons]
    print(f"\n{sum(fits)} of {len(fits)} predictions are within {args.tolerance:.0%} and what each may be off besides")
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    return 0 if all(fits) else 1


if __name__ == "__main__":
    sys.exit(main())
