"""`lazyshard verify`: looks at everything in a stream's directory."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Annotated, Final

from typer import Option

from lazyshard.cli import exits, output
from lazyshard.inspection.verification import verify
from lazyshard.inspection.verification_files import Severity

_WORDS: Final[dict[Severity, str]] = {"damage": "damaged", "unchecked": "not to be read", "leftover": "left over"}


def command(
    stream: output.StreamArgument,
    quick: Annotated[bool, Option("--quick", help="Look at names, numbers, seals, sizes; not at rows.")] = False,
    jobs: Annotated[int | None, Option("--jobs", "-j", min=1, max=1024, help="Processes. Default: one a core.")] = None,
    as_json: output.JsonOption = False,
    samples_per_chunk: output.SamplesPerChunkOption = None,
) -> int:
    """Looks at everything in a stream's directory, and says what is not as it should be.

    Every chunk's data against its seal (size, number of rows, row starts, digests), every row as a JSON object; numbers
    without a gap, names, what head.json, stream.end, retired.json and the cursors say; what a crash has left over.

    Changes nothing, and can run at any time: a producer at work is no fault, what it had published at the start is what
    is looked at.

    Examples:
        lazyshard verify /shared/stream
        lazyshard verify /shared/stream --quick
        lazyshard verify /shared/stream --json | jq '.findings[].file'

    Exit codes:
        0  all is well; or there are leftovers only, which are told and which the producer's next start removes
        2  usage; there is no such directory
        5  there is damage: each is told in a line; or there is no stream in it, or one of a later format
        7  there is no damage, but something could not be read: no permission, no answer
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
    result = ", ".join(f"{counts[name]:,} {word}" for name, word in _WORDS.items() if counts[name]) or "all is well"
    effort = "rows not read" if quick else f"{output.size(found.size / max(seconds, 1e-3))}/s"
    begin = f", from {found.retired:,} on" if found.retired else ""
    state = "ended" if found.ended else "live" if found.running else "open"
    kind = "" if found.native else ", without stream.json, so there are no digests"
    chunks, samples = output.count(found.chunks - found.retired, "chunk"), output.count(found.samples, "sample")
    facts = f"{chunks}{begin}, {samples}, {output.size(found.size)}, {state}{kind}"
    lines = [f"{finding.severity}: {finding}" for finding in found.findings]
    lines.append(f"{directory}: {facts}: {result} ({seconds:.1f} s, {effort})")
    output.show(told, lines, as_json)
    unread = exits.FILESYSTEM if counts["unchecked"] else exits.DONE
    return exits.STREAM_DAMAGED if counts["damage"] else unread
