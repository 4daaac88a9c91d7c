"""`lazyshard verify`: looks at everything in a stream's directory, and says what is not as it should be."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

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
from lazyshard.inspection.verification import Verified, verify
from lazyshard.inspection.verification_chunks import Severity
from lazyshard.store.urls import stream_path

_MAX_JOBS: Final = 1024

_WORDS: Final[dict[Severity, str]] = {"damage": "damaged", "unchecked": "not to be read", "leftover": "left over"}

HELP: Final = """Looks at everything in a stream's directory, and says what is not as it should be.

Every chunk's data against its seal (size, number of rows, row starts, digests), every row as a JSON object; numbers
without a gap, names, what head.json, stream.end, retired.json and the cursors say; what a crash has left over.

Changes nothing, and can run at any time: a producer at work is no fault, what it had published at the start is what is
looked at."""

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
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave the rows unread: look at names, numbers, seals and sizes alone.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", metavar="N", min=1, max=_MAX_JOBS, help="Processes that look. Default: one for each core."
        ),
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
        verified = verify(stream, samples_per_chunk, quick=quick, jobs=jobs, report=show)
    seconds = time.monotonic() - started
    if as_json:
        say(json.dumps(_values(stream, verified, seconds)))
    else:
        for finding in verified.findings:
            say(f"{finding.severity}: {finding}")
        counts = ((verified.count(severity), word) for severity, word in _WORDS.items())
        result = ", ".join(f"{number:,} {word}" for number, word in counts if number) or "all is well"
        effort = "rows not read" if quick else f"{size(verified.size / max(seconds, 1e-3))}/s"
        say(f"{stream}: {_facts(verified)}: {result} ({seconds:.1f} s, {effort})")
    if verified.count("damage"):
        return exits.STREAM_DAMAGED
    return exits.FILESYSTEM if verified.count("unchecked") else exits.DONE


def _facts(verified: Verified) -> str:
    facts = [
        count(verified.chunks - verified.retired, "chunk"),
        count(verified.samples, "sample"),
        size(verified.size),
        "ended" if verified.ended else "live" if verified.running else "open",
    ]
    if verified.retired:
        facts.insert(1, f"from {verified.retired:,} on")
    if not verified.native:
        facts.append("without stream.json, so there are no digests")
    return ", ".join(facts)


def _values(stream: Path, verified: Verified, seconds: float) -> dict[str, Any]:
    values = asdict(verified)
    counts = {"damage": verified.count("damage"), "unchecked": verified.count("unchecked")}
    return {
        "stream": str(stream),
        "ok": not any(counts.values()),
        **counts,
        "leftovers": verified.count("leftover"),
        "bytes": values.pop("size"),
        "seconds": round(seconds, 3),
        **values,
    }
