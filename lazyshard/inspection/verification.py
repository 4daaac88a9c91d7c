"""Verification: looks at everything that a stream has published, and at what lies beside it. Changes nothing.

A producer at work is no fault: what it had published at the first look is what is looked at, and what it deletes
meanwhile by its rules of retention is passed over.

Memory: the names of the directory, and for each process what `lazyshard.inspection.verification_chunks` takes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lazyshard.errors import LazyShardError, StreamMismatch, StreamUnsealed
from lazyshard.format import Manifest, check_samples_per_chunk
from lazyshard.format.names import MANIFEST, SEAL_SUFFIX
from lazyshard.inspection.verification_chunks import ChunkBatch, ChunkVerdict, check_chunk
from lazyshard.inspection.verification_facts import Facts, gather_facts
from lazyshard.inspection.verification_findings import Finding, Severity, in_order
from lazyshard.inspection.verification_judgement import find_extent, judge_files, judge_samples
from lazyshard.inspection.verification_names import ChunkNames, Extent, leftovers, missing_chunks, sort_names
from lazyshard.inspection.verification_plan import plan_batches, unmarked_chunks
from lazyshard.inspection.verification_processes import check_in_order
from lazyshard.stream.manifest import how_to_mark, read_manifest, stream_missing
from lazyshard.stream.reader import GRACE_S
from lazyshard.stream.retire import read_retired

_LOOK_S: Final = 1.0
"""How often a file is looked for again that is to appear."""

Report = Callable[[str, int, int], None]
"""Called with what is done, how many chunks of it are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found.

    Attributes:
        native: whether the stream has a manifest; if not, only rows, names and numbers can be looked at.
        stream_id: its identity, None where it has none that can be read.
        samples_per_chunk: rows in every chunk but the last, None where there is no chunk to tell.
        retired: chunks of [0, retired) are deleted.
        chunks: chunks of [retired, chunks) are published, and were looked at.
        samples: rows in them, as far as that is known.
        size: bytes in their data files, as far as that is known.
        ended: whether the stream has ended.
        running: whether its producer was at work.
        quick: whether the rows were left unread.
        findings: what is wrong, in the order of the chunks.
    """

    native: bool
    stream_id: str | None
    samples_per_chunk: int | None
    retired: int
    chunks: int
    samples: int
    size: int
    ended: bool
    running: bool
    quick: bool
    findings: tuple[Finding, ...]

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
    report: Report = lambda phase, done, total: None,
) -> Verified:
    """Looks at a stream.

    What is wrong with its files is returned, not raised.

    Args:
        directory: the stream's directory.
        samples_per_chunk: rows in every chunk but the last of a foreign directory; None for those of its first chunk.
            Of a stream of ours None, or what its manifest says.
        quick: whether to leave the rows unread: names, numbers and sizes alone are compared.
        jobs: how many processes may work at a time.
        clock: returns seconds since 1970.
        grace_s: how many seconds a file of a chunk may stay invisible that a running producer has published: network
            filesystems remember that it was not there.
        report: is told how far it is.

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
    _check_kind(directory, facts, names)
    extent = find_extent(facts, names)
    tally = _Tally(extent, samples_per_chunk)
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
    findings = [*facts.findings, *names.findings, *tally.findings]
    findings += missing_chunks(names, now, tally.missing | unmarked_chunks(names, extent), tally.there)
    findings += leftovers(names, extent)
    findings += judge_files(facts, extent, tally.last)
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
        findings=in_order(findings),
    )


class _Tally:
    """What is known of the chunks so far."""

    def __init__(self, extent: Extent, per_chunk: int | None) -> None:
        self.per_chunk = per_chunk
        self.samples = 0
        self.size = 0
        self.missing: dict[int, str] = {}
        self.there: set[int] = set()
        self.last: ChunkVerdict | None = None
        self.findings: list[Finding] = []
        self._extent = extent

    def add(self, verdict: ChunkVerdict) -> None:
        """Takes what was found in a chunk; the chunks come in order, but for those that were missing at first."""
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
            self.findings += judge_samples(verdict, self.per_chunk, self._extent)
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


def _check_kind(directory: Path, facts: Facts, names: ChunkNames) -> None:
    if facts.native or names.seals:
        return
    if not names.data:
        raise stream_missing(directory)
    raise StreamUnsealed(
        f"{directory}: {len(names.data)} chunk files, but no {SEAL_SUFFIX} marker, so nothing tells which of them are "
        f"complete; {how_to_mark(directory)}",
        directory=str(directory),
    )


def _look_again(batches: list[ChunkBatch], tally: _Tally, facts: Facts, until: float) -> None:
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


def _retired(facts: Facts) -> int:
    if facts.manifest is not None:
        with contextlib.suppress(LazyShardError, OSError):
            return read_retired(facts.directory, facts.manifest.stream_id)
    return 0


def _check_identity(directory: Path, facts: Facts) -> None:
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
