"""What a stream has to be at every moment after a power cut, and what it has to be in the end."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from lazyshard.errors import ChunkRetired, LazyShardError
from lazyshard.format.names import END, HEAD, MANIFEST, QUARANTINE, arrays_name, chunk_name, seal_name
from lazyshard.format.records import End, Head
from lazyshard.format.seal import Seal
from lazyshard.inspection.verification import verify
from lazyshard.stream import StreamReader, list_consumers, read_retired
from lazyshard.stream.retire import list_kept
from tests.harness.scenes.streams import lasting
from tests.harness.tally import Violation


@dataclass(frozen=True, slots=True)
class Told:
    chunks: int = 0  # published, by head.json
    samples: int = 0  # in them
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
        return Told(head["chunks"], head["samples"], head["ended"], committed, met=met)

    def and_later(self, later: Told) -> Told:
        """Returns what was told by then: what was once told stays so."""
        return Told(
            max(self.chunks, later.chunks),
            max(self.samples, later.samples),
            self.ended or later.ended,
            max(self.committed, later.committed),
            self.finished or later.finished,
            later.met,
        )

    def write(self, path: Path) -> None:
        """Writes it down; no call of this counts as one that changes a file."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Told:
        return Told(**json.loads(path.read_text()))


OPTIONAL: Final = {QUARANTINE, "retired.json", "cursors"}
"""What an ended stream may have besides what all have."""


@dataclass(frozen=True, slots=True)
class Whole:
    chunks: tuple[bytes, ...]  # the rows of each chunk, as they are in it
    seals: tuple[dict[str, Any], ...]  # the seals, but for the time in them; none if they differ from run to run
    refused: tuple[tuple[str, int], ...]  # the rows in quarantine, as `(source, line)`, in order
    in_order: bool = True  # whether rows come in one order
    arrays: tuple[bytes, ...] = ()  # the side file of each chunk, as it is; none where rows hold no arrays

    @property
    def samples(self) -> Counter[bytes]:
        return Counter(b"".join(self.chunks).splitlines())


@dataclass(frozen=True, slots=True)
class Found:
    first: int = 0  # chunks below this one are retired
    files: dict[str, bytes] | None = None  # chunks, seals and side files from there on, by name
    committed: int = 0  # the chunks that the consumer is done with


def read_whole(out: Path, *, seals: bool) -> Whole:
    """Reads a stream that was made without a fault, and all of which is there; `seals`: whether they are to be kept."""
    count = End.decode((out / END).read_bytes()).chunks
    chunks = tuple((out / chunk_name(chunk)).read_bytes() for chunk in range(count))
    arrays = tuple((out / arrays_name(chunk)).read_bytes() for chunk in sorted(list_kept(out).arrays))
    found = tuple(_seal(out, chunk) for chunk in range(count)) if seals else ()
    return Whole(chunks, found, refused(out), arrays=arrays)


def refused(out: Path) -> tuple[tuple[str, int], ...]:
    """Returns what is in quarantine, as `(source, line)`."""
    path = out / QUARANTINE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    found = []
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            raise Violation(f"line {number + 1} of {QUARANTINE} is {line[:50]!r}") from None
        found.append((str(entry["source"]), int(entry["line"])))
    return tuple(found)


def check(out: Path, whole: Whole, told: Told, before: Found) -> Found:
    """Checks what every moment must keep. `out`: the stream's directory, which may not be there. `whole`: what is to
    come of it. `told`: what was told before the cut. `before`: what was there after the cut before this one."""
    try:
        return _check(out, whole, told, before)
    except (LazyShardError, OSError) as error:
        raise Violation(f"a file cannot be used: {type(error).__name__}: {error}") from error


def check_ended(out: Path, whole: Whole, told: Told, before: Found) -> None:
    found = check(out, whole, told, before)
    files = found.files or {}
    if not (out / END).exists():
        raise Violation(f"finished, and there is no {END}")
    end = End.decode((out / END).read_bytes())
    if (end.chunks, end.samples) != (len(whole.chunks), whole.samples.total()):
        raise Violation(f"{END} says {end}, there are {len(whole.chunks)} chunks with {whole.samples.total()} samples")
    rows = Counter(b"".join(data for name, data in files.items() if name.endswith(".jsonl")).splitlines())
    if not found.first and rows != whole.samples:
        raise Violation(f"rows lost: {whole.samples - rows}, twice: {rows - whole.samples}")
    if sorted(refused(out)) != sorted(whole.refused):
        raise Violation(f"in quarantine are {refused(out)}, expected {whole.refused}")
    if whole.in_order and refused(out) != whole.refused:
        raise Violation(f"in quarantine the order is {refused(out)}, expected {whole.refused}")
    left = {path.name for path in out.iterdir()} - set(files) - lasting(out) - OPTIONAL
    if left:
        raise Violation(f"left over: {sorted(left)}")
    findings = verify(out, jobs=1).findings
    if findings:
        raise Violation(f"`lazyshard verify` finds {findings[0]}")


def _check(out: Path, whole: Whole, told: Told, before: Found) -> Found:
    if not out.is_dir():
        if told != Told() or before.files:
            raise Violation(f"the directory is gone, {told} was told")
        return Found()
    listing = list_kept(out)
    if listing.gap is not None or listing.complete != listing.first + len(listing.seals):
        raise Violation(f"sealed are {sorted(listing.seals)}, with data {sorted(listing.data)}, from {listing.first}")
    if listing.complete < told.chunks:
        raise Violation(f"{told.chunks} chunks were told, {listing.complete} are there")
    committed = _check_consumers(out, told, before, listing.complete, listing.first)
    files: dict[str, bytes] = {}
    samples = Counter[bytes]()
    for chunk in range(listing.first, listing.complete):
        rows = (out / listing.data[chunk]).read_bytes()
        files[listing.data[chunk]], files[listing.seals[chunk]] = rows, (out / listing.seals[chunk]).read_bytes()
        _check_chunk(out, chunk, rows, whole)
        if whole.arrays:
            files[arrays_name(chunk)] = _check_arrays(out, chunk, whole)
        samples.update(rows.splitlines())
    if samples - whole.samples:
        raise Violation(f"there twice, or never given: {samples - whole.samples}")
    # Those below the mark may be gone by now.
    for name, data in (before.files or {}).items():
        if files.get(name) != data and int(name[6:11]) >= listing.first:
            raise Violation(f"{name} was sealed, and has changed or gone")
    _check_claims(out, listing.complete, listing.first, samples.total(), told)
    return Found(listing.first, files, committed)


def _check_chunk(out: Path, chunk: int, rows: bytes, whole: Whole) -> None:
    path = out / seal_name(chunk)
    seal = Seal.decode(path.read_bytes(), chunk, str(path))
    lines = rows.splitlines(keepends=True)
    if seal.size != len(rows) or [xxhash.xxh3_64_intdigest(line) for line in lines] != seal.digests.tolist():
        raise Violation(f"chunk {chunk} has {len(rows)} bytes in {len(lines)} rows, and is not what was sealed")
    kept = seal.source.get("quarantine_bytes", 0)
    size = (out / QUARANTINE).stat().st_size if kept and (out / QUARANTINE).exists() else 0
    if size < kept or (kept and not (out / QUARANTINE).read_bytes()[:kept].endswith(b"\n")):
        raise Violation(f"the seal of chunk {chunk} counts {kept} bytes of {QUARANTINE}, which has {size} or is torn")
    if not whole.in_order:
        return
    if rows != whole.chunks[chunk]:
        raise Violation(f"chunk {chunk} holds {rows!r}, expected {whole.chunks[chunk]!r}")
    if whole.seals and _seal(out, chunk) != whole.seals[chunk]:
        raise Violation(f"the seal of chunk {chunk} is {_seal(out, chunk)}, expected {whole.seals[chunk]}")


def _check_arrays(out: Path, chunk: int, whole: Whole) -> bytes:
    """Checks a side file, and returns it; in such streams rows have one order."""
    path = out / arrays_name(chunk)
    if not path.exists():
        raise Violation(f"chunk {chunk} is sealed, {path.name} is missing")
    data = path.read_bytes()
    sealed = Seal.decode((out / seal_name(chunk)).read_bytes(), chunk).arrays
    if sealed is None or sealed.size != len(data):
        raise Violation(f"{path.name} has {len(data)} bytes, and is not what was sealed")
    parts = itertools.pairwise(sealed.offsets.tolist())
    if [xxhash.xxh3_64_intdigest(data[begin:end]) for begin, end in parts] != sealed.digests.tolist():
        raise Violation(f"{path.name} holds {data!r}, which is not what was sealed")
    if data != whole.arrays[chunk]:
        raise Violation(f"{path.name} holds {data!r}, expected {whole.arrays[chunk]!r}")
    return data


def _check_consumers(out: Path, told: Told, before: Found, published: int, first: int) -> int:
    done = 0
    for consumer in list_consumers(out, published):
        if consumer.problem is not None:
            raise Violation(f"a cursor does not count: {consumer.problem}")
        done = consumer.chunks_before
    if done < max(told.committed, before.committed):
        raise Violation(f"{max(told.committed, before.committed)} chunks were committed, the cursor says {done}")
    if first > done:
        raise Violation(f"chunks below {first} are deleted, acknowledged are those below {done}")
    if first < before.first:
        raise Violation(f"chunks below {before.first} were retired, now only those below {first} are")
    return done


def _check_claims(out: Path, chunks: int, first: int, samples: int, told: Told) -> None:
    """Checks what the stream says of itself, and what a reader makes of it."""
    ended = (out / END).exists()
    if told.ended and not ended:
        raise Violation(f"the end was told, {END} is gone")
    if ended:
        end = End.decode((out / END).read_bytes(), END)
        if end.chunks != chunks or (not first and end.samples != samples):
            raise Violation(f"{END} says {end}, sealed are {chunks} chunks, {samples} samples are there")
    if not (out / MANIFEST).exists():
        if told.chunks or chunks:
            raise Violation(f"{MANIFEST} is gone, {told} was told, {chunks} chunks are there")
        return
    head = (out / HEAD).read_bytes() if (out / HEAD).exists() else b""
    # It is not synced, being a hint: a cut may leave the name of it and nothing in it.
    if head.strip(b"\0"):
        says = Head.decode(head, HEAD)
        if says.chunks > chunks or (says.ended and not ended):
            raise Violation(f"{HEAD} says {says}, sealed are {chunks} chunks")
    reader = StreamReader(out, max_wait=0)
    if reader.seen.chunks > chunks:
        raise Violation(f"a reader is told of {reader.seen.chunks} chunks, {chunks} are there")
    # The next start of the producer tells it anew, but where that is done nobody would.
    if told.finished and not reader.seen.ended:
        raise Violation(f"the command has finished, a reader is told of {reader.seen.chunks} chunks and of no end")
    _read(reader, first, read_retired(out))


def _read(reader: StreamReader, first: int, mark: int) -> None:
    for sample in range(reader.seen.samples):
        try:
            reader.read(sample)
        except ChunkRetired:
            if sample // reader.samples_per_chunk >= mark:
                raise Violation(f"sample {sample} is called retired, retired are chunks below {first}") from None


def _seal(out: Path, chunk: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / seal_name(chunk)).read_bytes())
    del found["sealed_at"]
    return found
