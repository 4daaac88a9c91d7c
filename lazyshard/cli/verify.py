"""Looks at everything in a stream's directory, and says what is not as it should be.

Every chunk's data against its seal (size, number of rows, row starts, digests), every row as a JSON object; numbers
without a gap, names, what head.json, stream.end, retired.json and the cursors say; what a crash has left over.

Changes nothing, and can run at any time: a producer at work is no fault, what it had published at the start is what is
looked at.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.output import (
    JsonOption,
    SamplesPerChunkOption,
    StreamArgument,
    check_stream,
    chunk_bar,
    count,
    epilog,
    say,
    size,
)
from lazyshard.inspection.verification import verify
from lazyshard.inspection.verification_files import Severity
from lazyshard.store.urls import stream_path

_WORDS: Final[dict[Severity, str]] = {"damage": "damaged", "unchecked": "not to be read", "leftover": "left over"}

HELP: Final = __doc__

EPILOG: Final = epilog(
    [
        "lazyshard verify /shared/stream",
        "lazyshard verify /shared/stream --quick",
        "lazyshard verify /shared/stream --json | jq '.findings[].file'",
    ],
    {
        0: "all is well; or there are leftovers only, which are told and which the producer's next start removes",
        2: "usage; there is no such directory",
        5: "there is damage: each is told in a line; or there is no stream in it, or one of a later format",
        7: "there is no damage, but something could not be read: no permission, no answer",
    },
)


def command(
    stream: StreamArgument,
    quick: Annotated[bool, typer.Option("--quick", help="Look at names, numbers, seals, sizes; not at rows.")] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", metavar="N", min=1, max=1024, help="Processes. Default: one a core.")
    ] = None,
    as_json: JsonOption = False,
    samples_per_chunk: SamplesPerChunkOption = None,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    check_stream(stream)
    return lambda: _run(stream_path(stream), samples_per_chunk, quick, jobs or len(os.sched_getaffinity(0)), as_json)


def _run(stream: Path, samples_per_chunk: int | None, quick: bool, jobs: int, as_json: bool) -> int:
    started = time.monotonic()
    with chunk_bar() as show:
        found = verify(stream, samples_per_chunk, quick=quick, jobs=jobs, report=show)
    seconds = time.monotonic() - started
    counts = {severity: found.count(severity) for severity in _WORDS}
    if as_json:
        values = asdict(found)
        bad = {"damage": counts["damage"], "unchecked": counts["unchecked"]}
        told = {"stream": str(stream), "ok": not any(bad.values()), **bad, "leftovers": counts["leftover"]}
        say(json.dumps(told | {"bytes": values.pop("size"), "seconds": round(seconds, 3)} | values))
    else:
        for finding in found.findings:
            say(f"{finding.severity}: {finding}")
        result = ", ".join(f"{counts[name]:,} {word}" for name, word in _WORDS.items() if counts[name]) or "all is well"
        effort = "rows not read" if quick else f"{size(found.size / max(seconds, 1e-3))}/s"
        facts = [
            count(found.chunks - found.retired, "chunk"),
            *([f"from {found.retired:,} on"] if found.retired else []),
            *(count(found.samples, "sample"), size(found.size)),
            "ended" if found.ended else "live" if found.running else "open",
            *([] if found.native else ["without stream.json, so there are no digests"]),
        ]
        say(f"{stream}: {', '.join(facts)}: {result} ({seconds:.1f} s, {effort})")
    if counts["damage"]:
        return exits.STREAM_DAMAGED
    return exits.FILESYSTEM if counts["unchecked"] else exits.DONE
