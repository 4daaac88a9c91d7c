"""Whether lazyshard can use a filesystem that two mounts or two machines share. See scripts/verify_filesystem."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence

from scripts.filesystem.verify_filesystem_judging import UNTRIED, WRONG_ARGUMENTS, Line, conclude, judge
from scripts.filesystem.verify_filesystem_measuring import Far, FarSilent, Measured, NotTheSame, measure
from scripts.filesystem.verify_filesystem_side import serve


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/verify_filesystem", description=__doc__)
    parser.add_argument("near", metavar="A", nargs="?", help="a folder on the first mount")
    parser.add_argument("far_folder", metavar="B", nargs="?", help="the same folder on the second mount (default: A)")
    parser.add_argument(
        "--far", metavar="COMMAND", help="starts the other side on another machine; B is not given then"
    )
    parser.add_argument("--serve", metavar="FOLDER", help="be the other side, for --far")
    parser.add_argument(
        "--longest", type=float, default=90.0, metavar="SECONDS", help="to wait at the most (default: 90)"
    )
    parser.add_argument("--json", metavar="FILE", help="write measurements and verdicts there")
    args = parser.parse_args(arguments)
    if args.serve is not None:
        if args.near is not None or args.far is not None:
            parser.error("--serve stands alone")
        if not os.path.isdir(args.serve):
            parser.error(f"--serve {args.serve}: there is no such folder")
        serve(args.serve)
        return 0
    if args.near is None:
        parser.error("give a folder, twice where it is mounted twice")
    if args.far is not None and args.far_folder is not None:
        parser.error("give B or --far, not both")
    if not args.longest > 0:
        parser.error(f"--longest is more than 0 seconds, got {args.longest}")
    for folder in (args.near, args.far_folder):
        if folder is not None and not os.path.isdir(folder):
            parser.error(f"{folder}: there is no such folder")
    here = [sys.executable, "-m", "scripts.filesystem.verify_filesystem_side", args.far_folder or args.near]
    command = shlex.split(args.far) if args.far is not None else here
    try:
        with Far(command) as far:
            measured = measure(args.near, far, args.longest)
    except (FarSilent, NotTheSame, OSError) as error:
        print(f"scripts/verify_filesystem: could not try it: {error}", file=sys.stderr)
        return UNTRIED
    lines = judge(measured)
    code, verdict = conclude(lines)
    print(render(measured, lines, args.near, args.far or args.far_folder or args.near))
    print(f"\n{verdict}")
    if args.json is not None:
        told = {"measured": dataclasses.asdict(measured), "verdict": verdict, "code": code}
        try:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(told | {"lines": [dataclasses.asdict(line) for line in lines]}, file, indent=1)
        except OSError as error:
            print(f"scripts/verify_filesystem: --json: {error}", file=sys.stderr)
            return UNTRIED
    return code


def render(measured: Measured, lines: Sequence[Line], near: str, far: str) -> str:
    """Returns the table."""
    left = max(len(line.what) for line in lines)
    shown = [
        f"changes in {near} ({measured.near or 'unknown'}), seen from {far} ({measured.far or 'unknown'}); a question "
        f"there and back takes {1000 * measured.round_trip_s:.1f} ms",
        "",
    ]
    for line in lines:
        shown.append(f"{line.verdict:8} {line.what:{left}}  {line.found}")
        for text in (line.means, f"-> {line.remedy}" if line.remedy else ""):
            if text:
                shown += textwrap.wrap(text, 115, initial_indent=" " * 11, subsequent_indent=" " * 11)
    return "\n".join(shown)


if __name__ == "__main__":
    assert WRONG_ARGUMENTS == 2  # what argparse exits with
    sys.exit(main())
