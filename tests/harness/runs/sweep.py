"""Plays runs of a training job that is killed and resumed, one seed after another: see scripts/sweep_resumes."""

import argparse
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.harness.runs.plan import make_blend_plan, make_plan
from tests.harness.runs.play import Played, Runs
from tests.harness.tally import Tally

_RUNS: Final = 1000


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    """Plays 1,000 runs of 3 to 5 kills each, a seed a run, from `seed` * 1,000 on; every fourth one is over a blend."""
    with Runs(place) as nursery:
        for number in range(seed * _RUNS, seed * _RUNS + max(1, int(_RUNS * scale))):
            blend = number % 4 == 3
            _count(tally, nursery.play(make_blend_plan(number) if blend else make_plan(number)), blend=blend)


def _count(tally: Tally, played: Played, *, blend: bool) -> None:
    kills = sum(played.kills.values())
    tally.trial(faults=kills + played.deaths, points=kills)
    tally.count("runs over blends", blend)
    tally.count("kills of all ranks", kills)
    tally.count("kills of the producer alone", played.deaths)
    tally.count("resumes from an older checkpoint", played.again)
    tally.count("chunks deleted", played.deleted)
    if played.kind is not None:
        again = f"scripts/sweep_resumes {'--blend ' if blend else ''}--runs 1 --seed {played.seed}"
        tally.violation(f"{played.kind}: {played.text} (alone: {again})")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/sweep_resumes", description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default: %(default)s)")
    parser.add_argument("--blend", action="store_true", help="over blends of two or three streams")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time (default: the CPUs)")
    parser.add_argument("--dir", type=Path, help="where the runs write (default: the folder of temporary files)")
    given = parser.parse_args(arguments)
    if given.runs < 1 or given.jobs < 1:
        parser.error("--runs and --jobs are at least 1")
    folder = Path(tempfile.mkdtemp(prefix="sweep-resumes-", dir=given.dir))
    tally = Tally("training", say=lambda line: print(line, flush=True))
    make = make_blend_plan if given.blend else make_plan
    seeds = iter(range(given.seed, given.seed + given.runs))
    lock = threading.Lock()

    def work(job: int) -> None:
        with Runs(folder / f"job-{job}") as nursery:
            for seed in seeds:  # Each job takes the next seed that is left
                played = nursery.play(make(seed))
                with lock:
                    _count(tally, played, blend=given.blend)

    jobs = min(given.jobs, given.runs)
    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(work, job) for job in range(jobs)]:
            done.result()
    print(tally)
    if tally.violations:
        print(f"what the failed runs have written: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
