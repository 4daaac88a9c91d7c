"""`lazyshard verify`: checks everything in a stream's directory."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Annotated, Final

from typer import Option

from lazyshard.cli import exits, output
from lazyshard.inspection.verification import verify
from lazyshard.inspection.verification_files import Severity

_WORDS: Final[dict[Severity, str]] = {"damage": "damaged", "unchecked": "unreadable", "leftover": "left over"}


def command(
    stream: output.StreamArgument,
    quick: Annotated[bool, Option("--quick", help="Check names, numbers, seals and sizes, but not rows.")] = False,
    jobs: Annotated[int | None, Option("--jobs", "-j", min=1, max=1024, help="Processes. Default: all cores.")] = None,
    as_json: output.JsonOption = False,
    samples_per_chunk: output.SamplesPerChunkOption = None,
) -> int:
    """Checks everything in a stream's directory and reports damage and leftovers.

    Checks each chunk's data against its seal (size, number of rows, row starts, digests), that each row is a JSON
    object, that chunk numbers have no gap, file names, head.json, stream.end, retired.json and the cursors, and looks
    for files left over by a crash. If several writers write the stream, also checks their pieces that are not in it,
    and that the rows of each writer follow each other.

    Changes nothing and can run at any time, also while a producer is running: it checks the chunks that were published
    when it started.

    Examples:
        lazyshard verify /shared/stream
        lazyshard verify /shared/stream --quick
        lazyshard verify /shared/stream --json | jq '.findings[].file'

    Exit codes:
        0  no damage; leftovers are reported, and the producer removes them when it starts
        2  usage error; no such directory
        5  damage was found, each printed on a line; or no stream in the directory, or a later format
        7  no damage found, but something could not be read: no permission, no answer
    """
    directory, started = output.find_stream(stream), time.monotonic()
    with output.chunk_bar() as report:
        jobs = jobs or len(os.sched_getaffinity(0))
        found = verify(directory, samples_per_chunk, quick=quick, jobs=jobs, report=report)
    seconds, values = time.monotonic() - started, asdict(found)
    counts = {severity: found.count(severity) for severity in _WORDS}
    bad = {"damage": counts["damage"], "unchecked": counts["unchecked"]}
    told = {"stream": str(directory), "ok": not any(bad.values()), **bad, "leftovers": counts["leftover"]}
    told |= {"bytes": values.pop("size"), "seconds": round(seconds, 3)} | values
    result = ", ".join(f"{counts[name]:,} {word}" for name, word in _WORDS.items() if counts[name]) or "no damage"
    effort = "rows not read" if quick else f"{output.size(found.size / max(seconds, 1e-3))}/s"
    begin = f", from {found.retired:,} on" if found.retired else ""
    state = "ended" if found.ended else "live" if found.running else "open"
    kind = "" if found.native else ", without stream.json, so digests are not checked"
    chunks, samples = output.count(found.chunks - found.retired, "chunk"), output.count(found.samples, "sample")
    part = "not part of it" if found.ended else "not in it yet"
    waiting = f", {output.count(found.pieces, 'piece')} of writers {part}" if found.pieces else ""
    facts = f"{chunks}{begin}, {samples}, {output.size(found.size)}, {state}{waiting}{kind}"
    lines = [f"{finding.severity}: {finding}" for finding in found.findings]
    lines.append(f"{directory}: {facts}: {result} ({seconds:.1f} s, {effort})")
    output.show(told, lines, as_json)
    unread = exits.FILESYSTEM if counts["unchecked"] else exits.DONE
    return exits.STREAM_DAMAGED if counts["damage"] else unread
