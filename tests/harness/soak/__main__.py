"""Soaks a producer and a training job, or makes a stream of a million chunks. As a program: see scripts/soak."""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn by chance (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="the most at a time (default: %(default)s)")
    parser.add_argument("--million", action="store_true", help="the stream of a million chunks instead")
    parser.add_argument("--chunks", type=int, default=1_000_000, help="of that stream (default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=None, help="where to put everything (default: a temporary folder)")
    parser.add_argument("--json", type=Path, default=None, help="append the report as one JSON line to this file")
    parser.add_argument("--mutant", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.minutes <= 0 or args.ranks < 1 or args.chunks < 100:
        parser.error("--minutes must be above 0, --ranks at least 1, --chunks at least 100")
    if args.dir is not None:
        args.dir.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="soak-", dir=args.dir))
    try:
        violations = _million(args, place) if args.million else _soak(args, place)
    except OSError as error:
        print(f"scripts/soak: {error}", file=sys.stderr)
        shutil.rmtree(place, ignore_errors=True)
        return 2
    if violations:
        print(f"what was said is in {place}")
        return 1
    shutil.rmtree(place, ignore_errors=True)
    return 0


def _soak(args: argparse.Namespace, place: Path) -> int:
    from tests.harness.planted.soak import MUTANTS  # Loads torch, which the long stream does not need
    from tests.harness.soak.job import Rules
    from tests.harness.soak.run import Settings, Soak

    if args.mutant is not None:
        MUTANTS[args.mutant].install()
    rules = Rules(seed=args.seed, window=(2, 0, 1, 3)[args.seed % 4])
    # Killed processes leave things; not in `place`: sockets have short paths
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as temporary:
        os.environ["TMPDIR"] = temporary
        tempfile.tempdir = None
        report = Soak(Settings(60 * args.minutes, args.seed, args.ranks, rules), place, _say).run()
    print(report)
    _append(args.json, report.as_json())
    return len(report.violations)


def _million(args: argparse.Namespace, place: Path) -> int:
    from tests.harness.soak.million import measure, room

    with room(place, args.chunks) as folder:
        measured = measure(folder, args.chunks, _say)
    print(measured)
    _append(args.json, asdict(measured))
    return len(measured.violations)


def _say(line: str) -> None:
    print(time.strftime("%T"), line, flush=True)


def _append(path: Path | None, found: object) -> None:
    if path is not None:
        with path.open("ab") as file:
            file.write(orjson.dumps(found) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
