"""What a verification finds in the names of a directory: which chunks there are, and what is missing or left over.

Decisions only: names go in, findings come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from lazyshard.format.names import (
    SEAL_SUFFIX,
    chunk_name,
    parse_arrays_name,
    parse_chunk_name,
    parse_tokens_name,
    seal_name,
    tokens_name,
)
from lazyshard.inspection.verification_findings import REMOVED, RESTORE, Finding


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """The chunk files of a directory.

    Attributes:
        data: file name of each chunk's rows, by chunk number.
        seals: file name of each chunk's seal or marker, by chunk number.
        findings: names that a chunk cannot have.
        arrays: name of each chunk's side file, by chunk number.
        tokens: the chunks that have a file of measured lengths, by the name under which it is looked for.
    """

    data: dict[int, str]
    seals: dict[int, str]
    findings: tuple[Finding, ...]
    arrays: dict[int, str] = field(default_factory=dict)
    tokens: frozenset[int] = field(default_factory=frozenset)

    @property
    def sealed_before(self) -> int:
        """The number after that of the last seal, 0 if there is none."""
        return max(self.seals, default=-1) + 1


@dataclass(frozen=True, slots=True)
class Extent:
    """Which chunks are to be there.

    Attributes:
        first: the chunks below it are retired.
        stop: the chunks of the half-open range [first, stop) are published.
        native: whether a producer of ours fills the directory.
        ended: whether the stream has ended.
        running: whether its producer is at work: what lies outside of the range may be in its hands.
        arrays: whether each chunk has a side file.
    """

    first: int
    stop: int
    native: bool
    ended: bool
    running: bool
    arrays: bool = False


def sort_names(found: Iterable[str], *, native: bool) -> ChunkNames:
    """Returns the chunk files among the names of a directory; any other name is passed over.

    Args:
        found: the names.
        native: whether only the names that a producer of ours gives are names of chunks.
    """
    kept: tuple[dict[int, str], dict[int, str]] = ({}, {})
    others: dict[tuple[int, bool], list[str]] = {}
    findings: list[Finding] = []
    arrays: dict[int, str] = {}
    tokens: set[int] = set()
    for name in found:
        parsed = parse_chunk_name(name)
        if parsed is None:
            measured = parse_tokens_name(name) if native else None
            if (number := parse_arrays_name(name)) is not None:
                arrays[number] = name
            elif measured is not None and name == tokens_name(measured):
                tokens.add(measured)
            continue
        chunk, is_seal = parsed
        first = kept[is_seal].setdefault(chunk, name)
        if first is not name:
            others.setdefault(parsed, [first]).append(name)
    for (chunk, is_seal), names in others.items():
        right = _canonical(chunk, is_seal)
        best = right if right in names else min(names)
        kept[is_seal][chunk] = best
        findings.append(_doubled(chunk, best, ", ".join(sorted(set(names) - {best}))))
    for is_seal in (False, True) if native else ():
        for chunk, name in kept[is_seal].items():
            right = _canonical(chunk, is_seal)
            if name != right and (chunk, is_seal) not in others:
                findings.append(_misnamed(chunk, name, right))
    return ChunkNames(kept[False], kept[True], tuple(findings), arrays, frozenset(tokens))


def _canonical(chunk: int, is_seal: bool) -> str:
    return seal_name(chunk) if is_seal else chunk_name(chunk)


def missing_chunks(names: ChunkNames, extent: Extent, missing: dict[int, str], there: Set[int]) -> Iterator[Finding]:
    """Yields a finding for each chunk that lacks a file, and one for a whole run of chunks that are not there at all.

    Args:
        names: what was listed.
        extent: which chunks are to be there.
        missing: by chunk, the name of a file that was expected, but not there when it was opened.
        there: chunks that were found when they were opened, whether they were listed or not.
    """
    listed = names.data.keys() | names.seals.keys()
    for chunk, name in missing.items():
        if chunk >= extent.first and chunk in listed:
            yield _incomplete(chunk, name, names, extent.native)
    position = extent.first
    for chunk in sorted(chunk for chunk in listed | there if extent.first <= chunk < extent.stop):
        if chunk > position:
            yield _gap(position, chunk, extent.native)
        position = chunk + 1
    if position < extent.stop:
        yield _gap(position, extent.stop, extent.native)


def leftovers(names: ChunkNames, extent: Extent) -> Iterator[Finding]:
    """Yields a finding for each chunk file outside of what is published."""
    if extent.running:
        return
    for chunk, name in _outside(names.seals, extent):
        if chunk >= extent.stop:
            yield Finding(
                severity="damage",
                kind="beyond-end",
                file=name,
                expected=f"no chunk from {extent.stop} on, as stream.end says",
                found="a seal",
                remedy="restore stream.end from a copy, or remove the file with its data if it is not of this stream",
                chunk=chunk,
            )
        else:
            yield _retired(chunk, name, extent.first)
    for chunk, name in _outside(names.data, extent):
        if chunk < extent.first:
            yield _retired(chunk, name, extent.first)
        elif chunk not in names.seals:
            yield _unpublished(chunk, name, extent)
    for chunk, name in _outside(names.arrays, extent) if extent.arrays else ():
        if chunk < extent.first:
            yield _retired(chunk, name, extent.first)
        elif chunk not in names.seals:
            yield _unpublished(chunk, name, extent)
    for chunk in sorted(names.tokens):
        if chunk < extent.first:
            yield _retired(chunk, tokens_name(chunk), extent.first)
        elif chunk >= extent.stop:
            yield foreign_tokens(chunk, "a published chunk beside it", "none")


def _outside(names: dict[int, str], extent: Extent) -> Iterator[tuple[int, str]]:
    return ((chunk, name) for chunk, name in names.items() if not extent.first <= chunk < extent.stop)


def _gap(start: int, stop: int, native: bool) -> Finding:
    seal = "seal" if native else "marker"
    if stop == start + 1:
        expected, found = f"the chunk and its {seal}", "neither"
    else:
        expected, found = f"the chunks {start} to {stop - 1} and their {seal}s", f"none of these {stop - start:,}"
    return Finding(
        severity="damage",
        kind="missing",
        file=chunk_name(start),
        expected=expected,
        found=found,
        remedy="restore the files from a copy",
        chunk=start,
    )


def _incomplete(chunk: int, absent: str, names: ChunkNames, native: bool) -> Finding:
    seal, arrays = absent.endswith(SEAL_SUFFIX), parse_arrays_name(absent) is not None
    what = "a seal" if native else "a marker"
    remedy = RESTORE
    if seal and not native:
        remedy = f"if {names.data.get(chunk, chunk_name(chunk))} is complete, make it: `touch {absent}`"
    return Finding(
        severity="damage",
        kind="seal-missing" if seal else "arrays-missing" if arrays else "data-missing",
        file=absent,
        expected=what if seal else f"the {'arrays of the ' if arrays else ''}rows of the chunk",
        found="no such file although " + ("the chunk counts as published" if seal else f"{what} is there"),
        remedy=remedy,
        chunk=chunk,
    )


def _unpublished(chunk: int, name: str, extent: Extent) -> Finding:
    remedy = REMOVED
    if not extent.native:
        remedy = f"if it is complete, mark it: `touch {name}{SEAL_SUFFIX}`; otherwise its producer is still to do so"
        if extent.ended:
            remedy += ". Until then readers do not take the stream for ended"
    return Finding(
        # Of a foreign stream the end does not count as long as there is such a file.
        severity="damage" if extent.ended and not extent.native else "leftover",
        kind="unpublished",
        file=name,
        expected="a seal beside it" if extent.native else "a marker beside it",
        found="none, so it was never published",
        remedy=remedy,
        chunk=chunk,
    )


def _retired(chunk: int, name: str, first: int) -> Finding:
    return Finding(
        severity="leftover",
        kind="retired",
        file=name,
        expected=f"no chunk below {first}, which retired.json says are deleted",
        found="the file",
        remedy=REMOVED,
        chunk=chunk,
    )


def foreign_tokens(chunk: int, expected: str, found: str) -> Finding:
    """Returns the finding for a file of measured lengths that is not of the chunk that is there: nobody heeds it."""
    return Finding(
        severity="leftover",
        kind="other-chunk",
        file=tokens_name(chunk),
        expected=expected,
        found=found,
        remedy="nothing to do: readers pass over it, and `lazyshard measure` replaces it",
        chunk=chunk,
    )


def _doubled(chunk: int, name: str, others: str) -> Finding:
    return Finding(
        severity="damage",
        kind="doubled",
        file=name,
        expected=f"one file for chunk {chunk}",
        found=f"also {others}",
        remedy="keep the right one and move the other out of the directory",
        chunk=chunk,
    )


def _misnamed(chunk: int, name: str, right: str) -> Finding:
    return Finding(
        severity="damage",
        kind="misnamed",
        file=name,
        expected=f"the name {right}",
        found="another padding, under which readers do not look",
        remedy=f"rename it: `mv {name} {right}`",
        chunk=chunk,
    )
