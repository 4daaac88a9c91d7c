"""What a stream has to be at every moment after a power cut, and what it has to be in the end."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.errors import LazyShardError
from lazyshard.format.names import END, MANIFEST, QUARANTINE, arrays_name, chunk_name, seal_name
from lazyshard.format.records import End
from lazyshard.format.seal import Seal
from lazyshard.inspection.verification import verify
from lazyshard.stream import list_consumers, read_retired
from lazyshard.stream.retention import list_kept
from tests.harness.points.sealed import SealedChunks
from tests.harness.scenes.streams import lasting


@dataclass(frozen=True, slots=True)
class Told:
    chunks: int = 0  # published, by head.json
    ended: bool = False  # whether the stream has ended
    committed: int = 0  # chunks that a consumer has acknowledged, and was told that its cursor says so durably
    finished: bool = False  # whether the command that ended it has returned: nobody starts it again
    met: str = field(default="", compare=False)  # name of the call at which that was

    @staticmethod
    def look(out: Path, committed: int = 0, met: str = "") -> Told:
        try:
            head = json.loads((out / "head.json").read_bytes())
        except (OSError, ValueError):
            return Told(committed=committed, met=met)
        return Told(head["chunks"], head["ended"], committed, met=met)

    def and_later(self, later: Told) -> Told:
        """Returns what was told by then: what was once told stays so."""
        chunks, committed = max(self.chunks, later.chunks), max(self.committed, later.committed)
        return Told(chunks, self.ended or later.ended, committed, self.finished or later.finished, later.met)


OPTIONAL: Final = {QUARANTINE, "retired.json", "cursors"}  # What an ended stream may have besides what all have


class Whole(NamedTuple):
    lines: tuple[str, ...]  # the rows, in order
    per_chunk: int
    seals: tuple[dict[str, Any], ...]  # the seals, but for the time in them; none if they differ from run to run
    refused: tuple[tuple[str, int], ...]  # the rows in quarantine, as `(source, line)`, in order
    arrays: tuple[bytes, ...] | None  # the bytes of each row's arrays; None where rows hold none

    @property
    def chunks(self) -> int:
        return -(-len(self.lines) // self.per_chunk)


@dataclass(frozen=True, slots=True)
class Found:
    first: int = 0  # chunks below this one are retired
    files: dict[str, bytes] = field(default_factory=dict)  # chunks, seals and side files, by name
    committed: int = 0  # the chunks that the consumer is done with


def read_whole(out: Path, per_chunk: int, *, seals: bool) -> Whole:
    """Reads a stream that was made without a fault, and all of which is there; `seals`: whether they are to be kept."""
    count = End.decode((out / END).read_bytes()).chunks
    lines, arrays = [], []
    for chunk in range(count):
        lines += (out / chunk_name(chunk)).read_bytes().decode().splitlines()
        sealed = Seal.decode((out / seal_name(chunk)).read_bytes(), chunk).arrays
        if sealed is not None:
            data, ends = (out / arrays_name(chunk)).read_bytes(), sealed.offsets.tolist()
            arrays += [data[begin:end] for begin, end in itertools.pairwise(ends)]
    found = tuple(_seal(out, chunk) for chunk in range(count)) if seals else ()
    return Whole(tuple(lines), per_chunk, found, refused(out), tuple(arrays) or None)


def refused(out: Path) -> tuple[tuple[str, int], ...]:
    """Returns what is in quarantine, as `(source, line)`."""
    path = out / QUARANTINE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    found = []
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            raise AssertionError(f"line {number + 1} of {QUARANTINE} is {line[:50]!r}") from None
        found.append((str(entry["source"]), int(entry["line"])))
    return tuple(found)


def check(out: Path, whole: Whole, told: Told, before: Found) -> Found:
    """Checks what every moment must keep. `out`: the stream's directory, which may not be there. `told`: what was told
    before the cut. `before`: what was there after the cut before this one."""
    try:
        return _check(out, whole, told, before)
    except (LazyShardError, OSError) as error:
        raise AssertionError(f"a file cannot be used: {type(error).__name__}: {error}") from error


def check_ended(out: Path, whole: Whole, told: Told, before: Found) -> None:
    found = check(out, whole, told, before)
    assert (out / END).exists(), f"finished, and there is no {END}"
    end = End.decode((out / END).read_bytes())
    if (end.chunks, end.samples) != (whole.chunks, len(whole.lines)):
        raise AssertionError(f"{END} says {end}, there are {whole.chunks} chunks with {len(whole.lines)} samples")
    order = list if whole.seals else sorted
    assert order(refused(out)) == order(whole.refused), f"in quarantine are {refused(out)}, expected {whole.refused}"
    there = {name for name in found.files if int(name[6:11]) >= found.first}
    left = {path.name for path in out.iterdir()} - there - lasting(out) - OPTIONAL
    assert not left, f"left over: {sorted(left)}"
    findings = verify(out, jobs=1).findings
    assert not findings, f"`lazyshard verify` finds {findings[0]}"


def _check(out: Path, whole: Whole, told: Told, before: Found) -> Found:
    if not out.is_dir():
        assert not (told != Told() or before.files), f"the directory is gone, {told} was told"
        return Found()
    # Rows of a followed directory, whose seals differ from run to run, come in any order.
    sealed = SealedChunks(
        out, whole.lines, whole.per_chunk, ordered=bool(whole.seals), known=before.files, arrays=whole.arrays
    )
    committed = _check_consumers(out, told, before, list_kept(out).complete)
    sealed.look(committed)
    chunks, first = sealed.chunks, read_retired(out)
    assert chunks >= told.chunks, f"{told.chunks} chunks were told, {chunks} are there"
    assert first >= before.first, f"chunks below {before.first} were retired, now only those below {first} are"
    for chunk in range(first, chunks):
        _check_seal(out, chunk, whole)
    assert not (told.ended and not (out / END).exists()), f"the end was told, {END} is gone"
    sealed.check_claims()
    if (out / MANIFEST).exists():
        seen = sealed.read_through()
        # The next start of the producer tells it anew, but where that is done nobody would.
        if told.finished and not seen.ended:
            raise AssertionError(f"the command has finished, a reader is told of {seen.chunks} chunks and of no end")
    elif told.chunks or chunks:
        raise AssertionError(f"{MANIFEST} is gone, {told} was told, {chunks} chunks are there")
    return Found(first, sealed.known, committed)


def _check_seal(out: Path, chunk: int, whole: Whole) -> None:
    seal = _seal(out, chunk)
    kept = seal["source"].get("quarantine_bytes", 0)
    refused_rows = (out / QUARANTINE).read_bytes() if kept and (out / QUARANTINE).exists() else b""
    if len(refused_rows) < kept or (kept and not refused_rows[:kept].endswith(b"\n")):
        size = len(refused_rows)
        raise AssertionError(
            f"the seal of chunk {chunk} counts {kept} bytes of {QUARANTINE}, which has {size} or is torn"
        )
    if whole.seals and seal != whole.seals[chunk]:
        raise AssertionError(f"the seal of chunk {chunk} is {seal}, expected {whole.seals[chunk]}")


def _check_consumers(out: Path, told: Told, before: Found, published: int) -> int:
    done = 0
    for consumer in list_consumers(out, published):
        assert consumer.problem is None, f"a cursor does not count: {consumer.problem}"
        done = consumer.chunks_before
    if done < max(told.committed, before.committed):
        raise AssertionError(f"{max(told.committed, before.committed)} chunks were committed, the cursor says {done}")
    return done


def _seal(out: Path, chunk: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / seal_name(chunk)).read_bytes())
    del found["sealed_at"]
    return found
