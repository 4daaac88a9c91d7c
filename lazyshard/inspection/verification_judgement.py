"""What the files of a stream say of its chunks and of each other, compared. Decisions only."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from lazyshard.format.names import END, HEAD, MANIFEST, OWNER, RETIRED, TEMPORARY
from lazyshard.inspection.verification_chunks import ChunkVerdict
from lazyshard.inspection.verification_facts import Facts
from lazyshard.inspection.verification_findings import REMOVED, RESTORE, Finding
from lazyshard.inspection.verification_names import ChunkNames, Extent

_START: Final = "start the producer again, it puts that right"

_EITHER: Final = f"restore {HEAD} or {END}, whichever does not fit the chunks, from a copy"

_LOST_MANIFEST: Final = "restore the file from a copy"


def find_extent(facts: Facts, names: ChunkNames) -> Extent:
    """Returns which chunks are to be there.

    What a running producer has published after the look at its head does not count. Of one that does not run every seal
    counts: it may have been killed before it could replace its head.
    """
    if not facts.native:
        return Extent(0, names.sealed_before, native=False, ended=facts.has_end, running=False)
    first = _first(facts, names)
    if facts.end is not None:
        stop = facts.end.chunks
    elif facts.running and facts.head is not None:
        stop = facts.head.chunks
    else:
        stop = max(names.sealed_before, 0 if facts.head is None else facts.head.chunks)
    arrays = facts.manifest is not None and facts.manifest.arrays
    return Extent(first, max(first, stop), native=True, ended=facts.has_end, running=facts.running, arrays=arrays)


def _first(facts: Facts, names: ChunkNames) -> int:
    if _told(facts, RETIRED):
        # What is retired is not known; that the mark cannot be used is told.
        return min(names.seals, default=0)
    mark = facts.retired
    if mark is None or (facts.manifest is not None and mark.stream_id != facts.manifest.stream_id):
        return 0
    return mark.chunks_before


def judge_files(facts: Facts, extent: Extent, last: ChunkVerdict | None) -> Iterator[Finding]:
    """Yields what contradicts the chunks, or is missing or left over beside them.

    Args:
        facts: what the files say.
        extent: which chunks are to be there.
        last: what was found in the last of them, None where it is not there.
    """
    if not facts.native:
        if OWNER in facts.names:
            found = f"no such file, although {OWNER} is there"
            yield _damage("manifest-missing", MANIFEST, "the manifest", found, _LOST_MANIFEST)
        return
    if facts.manifest is None and not _told(facts, MANIFEST):
        yield _damage("manifest-missing", MANIFEST, "the manifest", "no such file", RESTORE)
    yield from _judge_retired(facts, extent)
    yield from _judge_head(facts, extent, last)
    yield from _judge_end(facts, extent, last)
    yield from _judge_consumers(facts, extent)
    if not facts.running:
        for name in facts.temporary:
            yield _leftover("temporary", f"{TEMPORARY}/{name}", "nothing", "what a producer was writing", REMOVED)


def judge_samples(verdict: ChunkVerdict, per_chunk: int, extent: Extent) -> Iterator[Finding]:
    """Yields what is wrong with the number of rows in a chunk: only the last one of an ended stream may be short."""
    rows = verdict.samples
    if rows is None or rows == per_chunk:
        return
    last = verdict.chunk == extent.stop - 1
    short = last and 0 < rows < per_chunk
    if short and extent.ended:
        return
    expected, found = _rows(per_chunk), _rows(rows)
    if last and extent.ended and per_chunk > 1:
        expected = f"1 to {expected}"
    if short:
        way = f"start the producer again, it writes {END}" if extent.native else f"if it ends here, `touch {END}`"
        finding = _leftover("unended", verdict.data, f"{expected}, or {END} after fewer", found, way)
    else:
        finding = _damage("samples", verdict.data, expected, found, RESTORE)
    yield replace(finding, chunk=verdict.chunk)


def _judge_retired(facts: Facts, extent: Extent) -> Iterator[Finding]:
    mark = facts.retired
    if mark is None:
        return
    if facts.manifest is not None and mark.stream_id != facts.manifest.stream_id:
        yield _leftover(
            "other-stream",
            RETIRED,
            f"stream {facts.manifest.stream_id}",
            f"stream {mark.stream_id}",
            "remove the file: nobody heeds it",
        )
    elif extent.stop <= mark.chunks_before and not facts.running:
        # A running producer may have published and deleted more since the look at its head.
        expected = "at least the newest chunk kept, as its producer does"
        yield _damage("retired", RETIRED, expected, f"all chunks below {mark.chunks_before} deleted", RESTORE)


def _judge_head(facts: Facts, extent: Extent, last: ChunkVerdict | None) -> Iterator[Finding]:
    head, end = facts.head, facts.end
    if head is None:
        if not _told(facts, HEAD):
            yield _leftover("head-missing", HEAD, "the head", "no such file, so readers list the directory", _START)
        return
    if facts.manifest is not None:
        per_chunk = facts.manifest.samples_per_chunk
        short = head.chunks * per_chunk - head.samples
        if not (short == 0 or (head.ended and 0 < short < per_chunk)):
            yield _damage("head", HEAD, f"{head.chunks:,} chunks of {_rows(per_chunk)}", _rows(head.samples), _START)
            return
    says = _chunks_of(head.chunks, head.samples)
    if end is not None:
        expected = f"{_chunks_of(end.chunks, end.samples)}, as {END} says"
        if head.ended and (head.chunks, head.samples) != (end.chunks, end.samples):
            yield _damage("head", HEAD, expected, says, _EITHER)
        elif head.chunks > end.chunks:
            yield _damage("head", HEAD, expected, f"{says}, and more to come", _EITHER)
        elif not head.ended and not facts.running:
            yield _leftover("head-behind", HEAD, expected, f"{says}, so readers wait for more", _START)
    elif head.ended:
        if not facts.has_end:
            yield _damage("end-missing", END, f"the end, after {says}, as {HEAD} says", "no such file", RESTORE)
    elif not facts.running:
        sealed = extent.stop - (1 if last is not None and _is_short(last, facts) else 0)
        if head.chunks < sealed:
            yield _leftover("head-behind", HEAD, f"{sealed} chunks, as the seals say", f"{head.chunks}", _START)


def _judge_end(facts: Facts, extent: Extent, last: ChunkVerdict | None) -> Iterator[Finding]:
    if facts.end is None or facts.manifest is None or last is None or last.samples is None:
        return
    samples = (extent.stop - 1) * facts.manifest.samples_per_chunk + last.samples
    if samples != facts.end.samples:
        yield _damage("end", END, f"{_rows(samples)}, as the seals say", _rows(facts.end.samples), RESTORE)


def _judge_consumers(facts: Facts, extent: Extent) -> Iterator[Finding]:
    stream_id = None if facts.manifest is None else facts.manifest.stream_id
    for file, cursor in facts.cursors:
        forget = f"if that run is over, `lazyshard forget STREAM {shlex.quote(cursor.consumer)}`"
        if stream_id is not None and cursor.stream_id != stream_id:
            yield _damage("other-stream", file, f"stream {stream_id}", _called(cursor.stream_id), forget)
        elif cursor.chunks_before > extent.stop:
            found = f"done with the chunks below {cursor.chunks_before:,}"
            yield _damage("ahead", file, f"at most the {extent.stop:,} published chunks", found, forget)
        elif facts.manifest is not None and not extent.ended:
            # Past the end of a stream a run may be in another epoch.
            published = extent.stop * facts.manifest.samples_per_chunk
            if cursor.consumed > published:
                found = f"{cursor.consumed:,} samples consumed"
                yield _damage("ahead", file, f"at most the {published:,} published samples", found, forget)
    for file, mark in facts.readings:
        if stream_id is not None and mark.stream_id != stream_id:
            remedy = "nothing to do: it is a hint, which nobody heeds"
            yield _leftover("other-stream", file, f"stream {stream_id}", _called(mark.stream_id), remedy)


def _is_short(verdict: ChunkVerdict, facts: Facts) -> bool:
    return (
        facts.manifest is not None
        and verdict.samples is not None
        and verdict.samples < facts.manifest.samples_per_chunk
    )


def _told(facts: Facts, file: str) -> bool:
    """Whether there is a finding that the file cannot be used."""
    return any(found.file == file for found in facts.findings)


def _chunks_of(chunks: int, samples: int) -> str:
    return f"{chunks:,} chunk{'' if chunks == 1 else 's'} with {_rows(samples)}"


def _rows(number: int) -> str:
    return f"{number:,} row{'' if number == 1 else 's'}"


def _called(stream_id: str | None) -> str:
    return "a stream without manifest" if stream_id is None else f"stream {stream_id}"


def _damage(kind: str, file: str, expected: str, found: str, remedy: str) -> Finding:
    return Finding(severity="damage", kind=kind, file=file, expected=expected, found=found, remedy=remedy)


def _leftover(kind: str, file: str, expected: str, found: str, remedy: str) -> Finding:
    return Finding(severity="leftover", kind=kind, file=file, expected=expected, found=found, remedy=remedy)
