"""Verification: looks at everything that a stream has published, and at what lies beside it. Changes nothing.

A producer at work is no fault: what it had published at the first look is what is looked at, and what it deletes
meanwhile by its rules of retention is passed over. Memory: the names of the directory.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lazyshard.errors import LazyShardError, StreamMismatch
from lazyshard.format.names import END, HEAD, MANIFEST, OWNER, RETIRED, TEMPORARY
from lazyshard.format.records import Manifest, check_samples_per_chunk
from lazyshard.inspection.survey import stream_unsealed
from lazyshard.inspection.verification_chunks import (
    REMOVED,
    ChunkBatch,
    ChunkVerdict,
    Fault,
    Severity,
    check_chunk,
    check_in_order,
    damage,
    leftover,
)
from lazyshard.inspection.verification_files import (
    Extent,
    StreamFiles,
    find_extent,
    gather_facts,
    leftovers,
    missing_chunks,
    plan_batches,
    sort_names,
    unmarked_chunks,
)
from lazyshard.stream.manifest import read_manifest, stream_missing
from lazyshard.stream.reader import GRACE_S
from lazyshard.stream.retire import read_retired

_LOOK_S: Final = 1.0  # How often a file is looked for again that is to appear
_START: Final = "start the producer again, it puts that right"

_EITHER: Final = f"restore {HEAD} or {END}, whichever does not fit the chunks, from a copy"

_LOST_MANIFEST: Final = "restore the file from a copy"


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found."""

    native: bool  # whether the stream has a manifest; if not, only rows, names and numbers can be looked at
    stream_id: str | None  # its identity, None where it has none that can be read
    samples_per_chunk: int | None  # rows in every chunk but the last, None where there is no chunk to tell
    retired: int  # chunks of [0, retired) are deleted
    chunks: int  # chunks of [retired, chunks) are published, and were looked at
    samples: int  # rows in them, as far as that is known
    size: int  # bytes in their files, as far as that is known
    ended: bool  # whether the stream has ended
    running: bool  # whether its producer was at work
    quick: bool  # whether the rows were left unread
    findings: tuple[Fault, ...]  # what is wrong, in the order of the chunks

    def count(self, severity: Severity) -> int:
        """Returns how many findings there are of a severity."""
        return sum(finding.severity == severity for finding in self.findings)


def verify(
    directory: Path,
    samples_per_chunk: int | None = None,
    *,
    quick: bool = False,
    jobs: int = 1,
    clock: Callable[[], float] = time.time,
    grace_s: float = GRACE_S,
    report: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Verified:
    """Looks at a stream, by so many processes at a time. What is wrong with its files is returned, not raised.

    Of a foreign directory `samples_per_chunk` are the rows in every chunk but the last; None for those of its first; of
    a stream of ours None, or what its manifest says. If `quick`, rows are left unread: names, numbers and sizes alone
    are compared. A file that a running producer has published may stay invisible for `grace_s` seconds. `report` is
    told what is done, how many chunks of it are done, and how many there are.

    Raises:
        StreamMissing: there is no stream in it.
        StreamUnsealed: chunk files without any marker.
        StreamMismatch: its manifest has another samples_per_chunk; or another stream took its place meanwhile.
        VersionUnsupported: a later format.
        ChildProcessError: a process has ended before its work was done.
        FileUnreadable, OSError: the directory cannot be read.
        ValueError: samples_per_chunk is impossible.
    """
    started = time.monotonic()
    if samples_per_chunk is not None:
        check_samples_per_chunk(samples_per_chunk)
    facts = gather_facts(directory, clock())
    if facts.manifest is not None:
        samples_per_chunk = _agreed(directory, facts.manifest, samples_per_chunk)
    names = sort_names(facts.names, native=facts.native)
    if not facts.native and not names.seals:
        raise stream_unsealed(directory, len(names.data)) if names.data else stream_missing(directory)
    extent = find_extent(facts, names)
    tally = _ChunkTally(extent, samples_per_chunk)
    batches = plan_batches(directory, names, extent, samples_per_chunk, quick=quick)
    total = sum(len(batch.files) for batch in batches)
    done = 0
    report("verifying", done, total)
    for verdicts in check_in_order(batches, jobs):
        for verdict in verdicts:
            tally.add(verdict)
        done += len(verdicts)
        report("verifying", done, total)
    if extent.running:
        _look_again(batches, tally, facts, started + grace_s)
    _check_identity(directory, facts)
    # What the producer has deleted meanwhile, by its own rules, is not missing.
    now = replace(extent, first=max(extent.first, _retired(facts)))
    missing = tally.missing | unmarked_chunks(names, extent)
    findings = [
        *facts.findings,
        *names.findings,
        *tally.findings,
        *missing_chunks(names, now, missing, tally.there),
        *leftovers(names, extent),
        *_judge_files(facts, extent, tally.last),
    ]
    return Verified(
        native=facts.native,
        stream_id=None if facts.manifest is None else facts.manifest.stream_id,
        samples_per_chunk=tally.per_chunk,
        retired=extent.first,
        chunks=extent.stop,
        samples=tally.samples,
        size=tally.size,
        ended=extent.ended,
        running=extent.running,
        quick=quick,
        findings=tuple(sorted(findings, key=_key)),
    )


class _ChunkTally:
    """What is known of the chunks so far; they come in order, but for those that were missing at first."""

    def __init__(self, extent: Extent, per_chunk: int | None) -> None:
        self.per_chunk = per_chunk
        self.samples = 0
        self.size = 0
        self.missing: dict[int, str] = {}
        self.there: set[int] = set()
        self.last: ChunkVerdict | None = None
        self.findings: list[Fault] = []
        self._extent = extent

    def add(self, verdict: ChunkVerdict) -> None:
        """Takes what was found in a chunk."""
        if verdict.missing is not None:
            self.missing[verdict.chunk] = verdict.missing
            return
        self.missing.pop(verdict.chunk, None)
        self.there.add(verdict.chunk)
        self.findings += verdict.findings
        self.samples += verdict.samples or 0
        self.size += verdict.size or 0
        if self.per_chunk is None:
            self.per_chunk = verdict.samples
        if self.per_chunk is not None:
            self.findings += _judge_samples(verdict, self.per_chunk, self._extent)
        if verdict.chunk == self._extent.stop - 1:
            self.last = verdict


def _agreed(directory: Path, manifest: Manifest, asked: int | None) -> int:
    if asked not in (None, manifest.samples_per_chunk):
        raise StreamMismatch(
            f"{directory}: the stream has {manifest.samples_per_chunk} samples per chunk, asked for {asked}; leave "
            f"that out, {MANIFEST} tells",
            directory=str(directory),
            expected=str(asked),
            actual=str(manifest.samples_per_chunk),
        )
    return manifest.samples_per_chunk


def _look_again(batches: list[ChunkBatch], tally: _ChunkTally, facts: StreamFiles, until: float) -> None:
    """Gives files time to appear that a running producer has published, and has not deleted since."""
    while True:
        retired = _retired(facts)
        wanted = {chunk for chunk in tally.missing if chunk >= retired}
        left = until - time.monotonic()
        if not wanted or left <= 0:
            return
        time.sleep(min(_LOOK_S, left))
        for batch in batches:
            for files in batch.files:
                if files.chunk in wanted:
                    tally.add(check_chunk(batch.directory, files, quick=batch.quick))


def _retired(facts: StreamFiles) -> int:
    if facts.manifest is not None:
        with contextlib.suppress(LazyShardError, OSError):
            return read_retired(facts.directory, facts.manifest.stream_id)
    return 0


def _check_identity(directory: Path, facts: StreamFiles) -> None:
    if facts.manifest is None:
        return
    found = read_manifest(directory, None)
    if found is None or found.stream_id != facts.manifest.stream_id:
        raise StreamMismatch(
            f"{directory}: the stream was replaced while it was looked at; run the same command again",
            directory=str(directory),
            expected=facts.manifest.stream_id,
            actual=None if found is None else found.stream_id,
        )


def _judge_files(facts: StreamFiles, extent: Extent, last: ChunkVerdict | None) -> Iterator[Fault]:
    """Yields what contradicts the chunks, or is missing or left over beside them; `last` is the last one's verdict."""
    if not facts.native:
        if OWNER in facts.names:
            found = f"no such file, although {OWNER} is there"
            yield damage("manifest-missing", MANIFEST, "the manifest", found, _LOST_MANIFEST)
        return
    if facts.manifest is None and not facts.told(MANIFEST):
        yield damage("manifest-missing", MANIFEST, "the manifest", "no such file")
    yield from _judge_retired(facts, extent)
    yield from _judge_head(facts, extent, last)
    yield from _judge_end(facts, extent, last)
    yield from _judge_consumers(facts, extent)
    if not facts.running:
        for name in facts.temporary:
            yield leftover("temporary", f"{TEMPORARY}/{name}", "nothing", "what a producer was writing", REMOVED)


def _judge_samples(verdict: ChunkVerdict, per_chunk: int, extent: Extent) -> Iterator[Fault]:
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
        finding = leftover("unended", verdict.data, f"{expected}, or {END} after fewer", found, way)
    else:
        finding = damage("samples", verdict.data, expected, found)
    yield replace(finding, chunk=verdict.chunk)


def _judge_retired(facts: StreamFiles, extent: Extent) -> Iterator[Fault]:
    mark = facts.retired
    if mark is None:
        return
    if facts.manifest is not None and mark.stream_id != facts.manifest.stream_id:
        expected, remedy = f"stream {facts.manifest.stream_id}", "remove the file: nobody heeds it"
        yield leftover("other-stream", RETIRED, expected, f"stream {mark.stream_id}", remedy)
    elif extent.stop <= mark.chunks_before and not facts.running:
        # A running producer may have published and deleted more since the look at its head.
        expected = "at least the newest chunk kept, as its producer does"
        yield damage("retired", RETIRED, expected, f"all chunks below {mark.chunks_before} deleted")


def _judge_head(facts: StreamFiles, extent: Extent, last: ChunkVerdict | None) -> Iterator[Fault]:
    head, end = facts.head, facts.end
    if head is None:
        if not facts.told(HEAD):
            yield leftover("head-missing", HEAD, "the head", "no such file, so readers list the directory", _START)
        return
    if facts.manifest is not None:
        per_chunk = facts.manifest.samples_per_chunk
        short = head.chunks * per_chunk - head.samples
        if not (short == 0 or (head.ended and 0 < short < per_chunk)):
            yield damage("head", HEAD, f"{head.chunks:,} chunks of {_rows(per_chunk)}", _rows(head.samples), _START)
            return
    says = _chunks_of(head.chunks, head.samples)
    if end is not None:
        expected = f"{_chunks_of(end.chunks, end.samples)}, as {END} says"
        if head.ended and (head.chunks, head.samples) != (end.chunks, end.samples):
            yield damage("head", HEAD, expected, says, _EITHER)
        elif head.chunks > end.chunks:
            yield damage("head", HEAD, expected, f"{says}, and more to come", _EITHER)
        elif not head.ended and not facts.running:
            yield leftover("head-behind", HEAD, expected, f"{says}, so readers wait for more", _START)
    elif head.ended:
        if not facts.has_end:
            yield damage("end-missing", END, f"the end, after {says}, as {HEAD} says", "no such file")
    elif not facts.running:
        per_chunk = 0 if facts.manifest is None else facts.manifest.samples_per_chunk
        is_short = last is not None and last.samples is not None and last.samples < per_chunk
        sealed = extent.stop - (1 if is_short else 0)
        if head.chunks < sealed:
            yield leftover("head-behind", HEAD, f"{sealed} chunks, as the seals say", f"{head.chunks}", _START)


def _judge_end(facts: StreamFiles, extent: Extent, last: ChunkVerdict | None) -> Iterator[Fault]:
    if facts.end is None or facts.manifest is None or last is None or last.samples is None:
        return
    samples = (extent.stop - 1) * facts.manifest.samples_per_chunk + last.samples
    if samples != facts.end.samples:
        yield damage("end", END, f"{_rows(samples)}, as the seals say", _rows(facts.end.samples))


def _judge_consumers(facts: StreamFiles, extent: Extent) -> Iterator[Fault]:
    stream_id = None if facts.manifest is None else facts.manifest.stream_id
    for file, cursor in facts.cursors:
        forget = f"if that run is over, `lazyshard forget STREAM {shlex.quote(cursor.consumer)}`"
        if stream_id is not None and cursor.stream_id != stream_id:
            yield damage("other-stream", file, f"stream {stream_id}", _called(cursor.stream_id), forget)
        elif cursor.chunks_before > extent.stop:
            found = f"done with the chunks below {cursor.chunks_before:,}"
            yield damage("ahead", file, f"at most the {extent.stop:,} published chunks", found, forget)
        elif facts.manifest is not None and not extent.ended:
            # Past the end of a stream a run may be in another epoch.
            published = extent.stop * facts.manifest.samples_per_chunk
            if cursor.consumed > published:
                found = f"{cursor.consumed:,} samples consumed"
                yield damage("ahead", file, f"at most the {published:,} published samples", found, forget)
    for file, mark in facts.readings:
        if stream_id is not None and mark.stream_id != stream_id:
            remedy = "nothing to do: it is a hint, which nobody heeds"
            yield leftover("other-stream", file, f"stream {stream_id}", _called(mark.stream_id), remedy)


def _chunks_of(chunks: int, samples: int) -> str:
    return f"{chunks:,} chunk{'' if chunks == 1 else 's'} with {_rows(samples)}"


def _rows(number: int) -> str:
    return f"{number:,} row{'' if number == 1 else 's'}"


def _called(stream_id: str | None) -> str:
    return "a stream without manifest" if stream_id is None else f"stream {stream_id}"


def _key(finding: Fault) -> tuple[int, str, int, str]:
    """Returns the order of a report: the stream itself, then chunk by chunk."""
    chunk, row = (-1 if one is None else one for one in (finding.chunk, finding.row))
    return chunk, finding.file, row, finding.kind
