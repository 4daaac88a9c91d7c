"""Verification: checks everything that a stream has published, and the other files in its directory. Changes nothing.

A running producer is not a fault: only what it had published when the check started is checked, and what it deletes
meanwhile under its retention rules is ignored. Memory: the names of the directory, and a verdict for each chunk.

Chunks are checked by several processes: parsing holds the interpreter's lock. They end soon after this process, however
it ends, and block Ctrl-C: only this process handles it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, NamedTuple

from lazyshard.errors import ChunkCorrupt, LazyShardError, RowInvalid, StreamMismatch, StreamMissing
from lazyshard.format import records
from lazyshard.format.arrays import fill_row, may_hold_arrays
from lazyshard.format.batch import check_lines
from lazyshard.format.records import END, FORMAT, FORMAT_WITH_ARRAYS, HEAD, MANIFEST, OWNER, RETIRED
from lazyshard.format.row import check_row, parse_lines, parse_row
from lazyshard.format.seal import Seal
from lazyshard.format.state import ReadingHint
from lazyshard.format.writers import WRITERS, Sequenced, piece_stream_id
from lazyshard.inspection import verification_files as facts
from lazyshard.inspection.verification_files import ChunkFiles, Fault, Severity, StreamFiles, Taken, leftover
from lazyshard.store.files import open_file, open_unread, read_file
from lazyshard.stream.chunk import Chunk, ChunkArrays, open_copy, open_foreign
from lazyshard.stream.listing import read_manifest, stream_missing, stream_unsealed
from lazyshard.stream.members import writer_names
from lazyshard.stream.reader import GRACE_S
from lazyshard.stream.waiting import Parent

_LOOK_S: Final = 1.0  # how often to check for a file that should appear
_START: Final = "start the producer again, which fixes it"
_EITHER: Final = f"restore {HEAD} or {END}, whichever does not match the chunks, from a copy"
_OWN: Final = "use another writer's name, and remove this folder"
_BLOCK_BYTES: Final = 1 << 20  # rows are read in pieces of about this size; larger ones gain nothing
_BATCH_ROWS: Final = 4096  # checked between two progress reports: at 2 KB per row 8 MB, a few hundredths of a second
_BATCH_CHUNKS: Final = 64


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a verification."""

    native: bool  # whether the stream has a manifest; if not, only rows, names and numbers can be checked
    stream_id: str | None  # its identity, None if there is none that can be read
    samples_per_chunk: int | None  # rows in every chunk but the last, None if there is no chunk
    retired: int  # the chunks [0, retired) are deleted
    chunks: int  # the chunks [retired, chunks) are published, and were checked
    samples: int  # rows in them, as far as known
    size: int  # bytes in their files, as far as known
    ended: bool
    running: bool  # whether its producer was running
    quick: bool  # whether the rows were not read
    findings: tuple[Fault, ...]  # what is wrong, in the order of the chunks
    pieces: int = 0  # pieces of its writers with rows that are not in it, and were checked, too

    def count(self, severity: Severity) -> int:
        """Returns the number of findings of a severity."""
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
    first_chunk: int = 0,
) -> Verified:
    """Checks a stream, with `jobs` processes. Faults in its files are returned, not raised.

    For a foreign directory `samples_per_chunk` are the rows in every chunk but the last; None: as many as in its first.
    `quick` does not read rows. A file that a running producer has published may stay invisible for `grace_s` seconds.
    `report` is called with the phase, the chunks done, and their total. Chunks before `first_chunk` are not checked.
    Raises StreamMissing, FileInvalid,
    VersionUnsupported, OSError: there is no such stream, or it cannot be read; StreamMismatch: it has another
    samples_per_chunk, or another stream replaced it meanwhile; ChildProcessError: a process has ended early.
    """
    until, per_chunk = time.monotonic() + grace_s, samples_per_chunk
    if per_chunk is not None:
        records.check_samples_per_chunk(per_chunk)
    files = facts.read_files(directory, clock())
    if files.manifest is not None:
        if per_chunk is not None:
            read_manifest(directory, per_chunk)
        per_chunk = files.manifest.samples_per_chunk
    if not files.native and not files.seals:
        raise stream_unsealed(directory, len(files.data)) if files.data else stream_missing(directory)
    chunks = [one for one in facts.chunks_to_check(files) if one.chunk >= first_chunk]
    verdicts, positions = dict[int, ChunkVerdict](), facts.SealedPositions()
    size = _BATCH_CHUNKS if quick else max(1, min(_BATCH_CHUNKS, _BATCH_ROWS // (per_chunk or _BATCH_ROWS)))
    report("verifying", 0, len(chunks))
    for found in check_in_order(directory, quick, [chunks[at : at + size] for at in range(0, len(chunks), size)], jobs):
        for one in found:
            # A position grows with the writers, and only that of the chunk before is needed.
            verdicts[one.chunk] = one._replace(position=None)
            positions.add(one.chunk, one.position, one.samples)
        report("verifying", len(verdicts), len(chunks))
    while files.running and (left := until - time.monotonic()) > 0:
        # Waits for files that a running producer has published, and has not deleted since, to appear.
        retired = files.retired_now()
        absent = [one for one in chunks if one.chunk >= retired and verdicts[one.chunk].missing is not None]
        if not absent:
            break
        time.sleep(min(_LOOK_S, left))
        verdicts.update((one.chunk, check_chunk(directory, quick, one)) for one in absent)
    manifest = None if files.manifest is None else read_manifest(directory, None)
    if (now := None if manifest is None else manifest.stream_id) != files.stream_id:
        what = f"{directory}: the stream was replaced while it was checked; run the same command again"
        raise StreamMismatch(what, directory=str(directory), expected=files.stream_id, actual=now)
    pieces = 0
    if files.manifest is not None and files.manifest.writers is not None:
        again = partial(verify, quick=quick, jobs=jobs, clock=clock, grace_s=grace_s)
        findings, pieces = _check_writers(directory, files.manifest, positions.taken, again)
        files.findings += [*positions.findings, *findings]
    return _judge(files, verdicts, per_chunk, quick, pieces)


def _check_writers(
    directory: Path, manifest: records.Manifest, taken: Taken | None, again: Callable[..., Verified]
) -> tuple[list[Fault], int]:
    """Checks pieces that are not in the stream, by `again`, which verifies a folder; returns findings and pieces."""
    findings, waiting = list[Fault](), 0
    for name in writer_names(directory):
        rows = 0 if taken is None else taken.get(name, (0, 0))[0]
        folder, first = f"{WRITERS}/{name}", rows // manifest.samples_per_chunk
        try:
            found = again(directory / folder, first_chunk=first)
        except StreamMissing:
            continue
        except (LazyShardError, OSError) as error:
            findings.append(facts.file_fault(f"{folder}/{records.MANIFEST}", error))
            continue
        # Pieces have numbers of their own.
        findings += [replace(one, file=f"{folder}/{one.file}", chunk=None) for one in found.findings]
        if first * manifest.samples_per_chunk + found.samples > rows:
            waiting += found.chunks - first
        expected = piece_stream_id(manifest.stream_id, name)
        if found.stream_id not in (None, expected):
            told = f"stream {expected}", f"stream {found.stream_id}, of another writer or another shared stream"
            findings.append(Fault("other-stream", f"{folder}/{records.MANIFEST}", *told, _OWN))
        if found.chunks * manifest.samples_per_chunk < rows:
            told = f"{rows:,} rows of this writer, as in the stream", f"{found.chunks:,} pieces"
            findings.append(Fault("position", folder, *told, f"restore the folder from a copy, or {_OWN}"))
    return findings, waiting


def _judge(
    files: StreamFiles, verdicts: dict[int, ChunkVerdict], per_chunk: int | None, quick: bool, pieces: int
) -> Verified:
    """Returns the result: faults of chunks and names, and contradictions between the files."""
    there = [one for one in verdicts.values() if one.missing is None]
    if per_chunk is None:
        per_chunk = next((one.samples for one in there if one.samples is not None), None)
    rows = next((one.samples for one in there if one.chunk == files.stop - 1), None)
    absent = facts.missing_chunks(files, files.retired_now(), {one.chunk: one.missing for one in verdicts.values()})
    findings = [*files.findings, *absent]
    findings += (fault for one in there for fault in (*one.findings, *_judge_samples(files, one, per_chunk)))
    findings += [*facts.leftovers(files), *_judge_files(files, rows)]

    def place(one: Fault) -> tuple[int, str, int, str]:
        # The stream itself first, then chunk by chunk
        return -1 if one.chunk is None else one.chunk, one.file, -1 if one.row is None else one.row, one.kind

    samples, size = sum(one.samples or 0 for one in there), sum(one.size or 0 for one in there)
    about = files.native, files.stream_id, per_chunk, files.first, files.stop, samples, size
    return Verified(*about, files.ended, files.running, quick, tuple(sorted(findings, key=place)), pieces)


def _judge_samples(files: StreamFiles, verdict: ChunkVerdict, per_chunk: int | None) -> Iterator[Fault]:
    """Yields faults in the number of rows of a chunk: only the last one of an ended stream may be short."""
    rows = verdict.samples
    if rows is None or per_chunk is None or rows == per_chunk:
        return
    last, expected = verdict.chunk == files.stop - 1, _count(per_chunk)
    if not (last and 0 < rows < per_chunk):
        expected = f"1 to {expected}" if last and files.ended and per_chunk > 1 else expected
        yield Fault("samples", verdict.data, expected, _count(rows), chunk=verdict.chunk)
    elif not files.ended:
        way = f"start the producer again, which writes {END}" if files.native else f"if it ends here, `touch {END}`"
        yield leftover("unended", verdict.data, f"{expected}, or {END} after fewer", _count(rows), way, verdict.chunk)


def _judge_files(files: StreamFiles, rows: int | None) -> Iterator[Fault]:
    """Yields files that contradict the chunks or are missing; `rows` are those of the last chunk."""
    if not files.native:
        if OWNER in files.names:
            yield Fault("manifest-missing", MANIFEST, "the manifest", f"no such file, although {OWNER} exists")
        return
    per_chunk = 0 if files.manifest is None else files.manifest.samples_per_chunk
    if files.manifest is None and not files.told(MANIFEST):
        yield Fault("manifest-missing", MANIFEST, "the manifest", "no such file")
    mark = files.retired
    if mark is not None and files.stream_id not in (None, mark.stream_id):
        yield leftover("other-stream", RETIRED, f"stream {files.stream_id}", f"stream {mark.stream_id}", "remove it")
    elif mark is not None and files.stop <= mark.chunks_before and not files.running:
        # A running producer may have published and deleted more since its head was read.
        yield Fault("retired", RETIRED, "the newest chunk kept", f"all chunks below {mark.chunks_before} deleted")
    yield from _judge_head(files, per_chunk, rows)
    if files.end is not None and per_chunk and rows is not None:
        samples = (files.stop - 1) * per_chunk + rows
        if samples != files.end.samples:
            yield Fault("end", END, f"{_count(samples)}, as in the seals", _count(files.end.samples))
    yield from _judge_consumers(files, files.stop * per_chunk)


def _judge_head(files: StreamFiles, per_chunk: int, rows: int | None) -> Iterator[Fault]:
    """Yields contradictions between the head and the end or the chunks, the last of which has `rows` rows."""
    head, end = files.head, files.end
    if head is None:
        if not files.told(HEAD):
            yield leftover("head-missing", HEAD, "the head", "no such file, so readers list the directory", _START)
        return
    says = f"{_count(head.chunks, 'chunk')} with {_count(head.samples)}"
    if per_chunk and not head.is_whole(per_chunk, ended=head.ended):
        yield Fault("head", HEAD, f"{head.chunks:,} chunks of {_count(per_chunk)}", _count(head.samples), _START)
    elif end is not None:
        expected = f"{_count(end.chunks, 'chunk')} with {_count(end.samples)}, as in {END}"
        if head.ended and (head.chunks, head.samples) != (end.chunks, end.samples):
            yield Fault("head", HEAD, expected, says, _EITHER)
        elif head.chunks > end.chunks:
            yield Fault("head", HEAD, expected, f"{says}, and more to come", _EITHER)
        elif not head.ended and not files.running:
            yield leftover("head-behind", HEAD, expected, f"{says}, so readers wait for more", _START)
    elif head.ended:
        if not files.ended:
            yield Fault("end-missing", END, f"the end, after {says}, as in {HEAD}", "no such file")
    elif not files.running:
        sealed = files.stop - (rows is not None and rows < per_chunk)
        if head.chunks < sealed:
            yield leftover("head-behind", HEAD, f"{sealed} chunks, as in the seals", f"{head.chunks}", _START)


def _judge_consumers(files: StreamFiles, published: int) -> Iterator[Fault]:
    """Yields cursors and hints of other streams, and cursors that are ahead of the published samples."""
    stream_id, expected = files.stream_id, f"stream {files.stream_id}"
    for file, told in files.cursors:
        forget = f"if that run is over, `lazyshard forget STREAM {shlex.quote(told.consumer)}`"
        if stream_id is not None and told.stream_id != stream_id:
            other = "a stream without manifest" if told.stream_id is None else f"stream {told.stream_id}"
            if isinstance(told, ReadingHint):
                yield leftover("other-stream", file, expected, other, "nothing to do: it is only a hint")
            else:
                yield Fault("other-stream", file, expected, other, forget)
        elif isinstance(told, ReadingHint):
            continue
        elif told.chunks_before > files.stop:
            done = f"{_count(told.chunks_before, 'chunk')} done"
            yield Fault("ahead", file, f"at most {_count(files.stop, 'chunk')}", done, forget)
        elif stream_id is not None and not files.ended and told.consumed > published:
            # Past the end of a stream a run may be in another epoch.
            yield Fault("ahead", file, f"at most {published:,} samples", f"{told.consumed:,} samples consumed", forget)


def _count(number: int, noun: str = "row") -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class ChunkVerdict(NamedTuple):
    """The result for a chunk: rows and bytes, None if unknown; `missing` names a file that does not exist."""

    chunk: int
    data: str
    samples: int | None
    size: int | None
    findings: tuple[Fault, ...]
    missing: str | None = None
    position: Sequenced | None = None  # in its seal, if the sequencer of several writers has written it


def check_chunk(directory: Path, quick: bool, files: ChunkFiles) -> ChunkVerdict:
    """Checks a chunk; `quick` only compares sizes with the seal, but still counts the rows of a foreign chunk."""
    name, opened = files.data, open_unread if quick else open_file
    samples = size = position = None
    try:
        if files.seal is None:
            chunk = open_foreign(directory / name, files.chunk)
            samples, size = len(chunk), chunk.offset(len(chunk))
        else:
            name = files.seal
            seal = Seal.decode(read_file(directory / name), files.chunk, name)
            samples, size, position = seal.samples, seal.size, Sequenced.read_source(seal.source)
            if (seal.arrays is None) is not (files.arrays is None):
                told = (FORMAT, FORMAT_WITH_ARRAYS) if files.arrays is None else (FORMAT_WITH_ARRAYS, FORMAT)
                raise ChunkCorrupt(field="format", expected=f"{told[0]}, as in {MANIFEST}", actual=str(told[1]))
            rows, side = opened(directory / (name := files.data)), None
            if seal.arrays is not None and files.arrays is not None:
                size += seal.arrays.size
                side = opened(directory / (name := files.arrays))
            chunk = open_copy(rows, seal, side)
        faults = () if quick else _bad_rows(files, chunk)
    except FileNotFoundError:
        return ChunkVerdict(files.chunk, files.data, samples, size, (), name)
    except (LazyShardError, OSError) as error:
        where = os.path.basename(error.file or name) if isinstance(error, ChunkCorrupt) else name
        faults = (facts.file_fault(where, error, files.chunk),)
    return ChunkVerdict(files.chunk, files.data, samples, size, faults, position=position)


def _bad_rows(files: ChunkFiles, chunk: Chunk) -> tuple[Fault, ...]:
    """Returns the first bad row of each kind, and their number. Raises ChunkCorrupt: a file was cut."""
    first: dict[tuple[str, str], Fault] = {}
    for row, error in _errors(chunk, sealed=files.seal is not None):
        if isinstance(error, ChunkCorrupt):
            if error.row is None:
                raise error
            file, told = os.path.basename(error.file or files.data), (str(error.expected), str(error.actual))
            found = Fault("digest", file, *told, chunk=files.chunk, row=row, byte=error.byte)
        else:
            # For a sealed row the byte is relative to the row, otherwise to the file.
            start = chunk.offset(row)
            byte = (error.byte or 0) + (start if error.file is None else 0)
            what = f"{str(error.reason).removeprefix('expected a JSON object, found ')} (byte {byte})"
            fix = f"{facts.RESTORE}, or have its producer make it again: readers refuse this row"
            found = Fault("row", files.data, "a JSON object on a line", what, fix, files.chunk, row=row, byte=start)
        before = first.get(key := (found.file, found.kind), found)
        first[key] = replace(before, rows=before.rows + 1)
    return tuple(first.values())


def _errors(chunk: Chunk, *, sealed: bool) -> Iterator[tuple[int, RowInvalid | ChunkCorrupt]]:
    """Yields each bad row with its error, or the error of its file."""
    row, budget = 0, _BLOCK_BYTES
    while row < len(chunk):
        try:
            lines = chunk.lines(row, len(chunk), 1, budget)
        except (ChunkCorrupt, RowInvalid) as error:
            yield row, error
            # The whole block is read again for each bad row in it, so after one, rows are read singly for a while.
            row, budget = row + 1, 0
            continue
        budget = min(_BLOCK_BYTES, max(2 * budget, 4096))
        checks: list[Callable[[bytes, int], None]] = []
        if chunk.arrays is not None:
            checks.append(partial(_check_arrays, chunk.arrays))
        # Without digests the reader has already checked the rows.
        if sealed and not (all(line.endswith(b"\n") for line in lines) and check_lines(lines).refused is None):
            checks.append(_check_line)
        for at, line in enumerate(lines, row) if checks else ():
            for check in checks:
                try:
                    check(line, at)
                except (ChunkCorrupt, RowInvalid) as error:
                    yield at, error
        row += len(lines)


def _check_line(line: bytes, row: int) -> None:
    if not line.endswith(b"\n"):
        raise RowInvalid(reason="no newline at its end", byte=len(line))
    check_row(line)


def _check_arrays(arrays: ChunkArrays, line: bytes, row: int) -> None:
    data = arrays.read_rows(row, row + 1)
    # Lines that are not a JSON object were reported before.
    if may_hold_arrays(line) and parse_lines([line]):
        fill_row(parse_row(line), data)


def check_in_order(
    directory: Path, quick: bool, batches: list[list[ChunkFiles]], jobs: int, alone_s: float = 0.5
) -> Iterator[list[ChunkVerdict]]:
    """Yields the results of each batch, in order, from at most `jobs` processes, which start after `alone_s`."""
    started, done = time.monotonic(), 0
    while done < len(batches) and (jobs == 1 or time.monotonic() - started < alone_s):
        yield [check_chunk(directory, quick, files) for files in batches[done]]
        done += 1
    workers: list[tuple[BaseProcess, Connection]] = []
    jobs = min(jobs, len(batches) - done)
    try:
        for _ in range(jobs):
            workers.append(_start(directory, quick))
        # They read this once they have started, and wait while their results are not received.
        for number, (_, results) in enumerate(workers):
            results.send(batches[done + number :: jobs])
        for number in range(done, len(batches)):
            found = workers[(number - done) % jobs][1].recv()
            if isinstance(found, BaseException):
                raise found
            yield found
    except (EOFError, ConnectionError) as cause:
        raise ChildProcessError("a process has ended early; if memory was short, use fewer --jobs") from cause
    finally:
        # Unless all is done, their results are not needed, and a share that does not answer would block them.
        for process, results in workers:
            process.kill()
            process.join()
            results.close()


def _start(directory: Path, quick: bool) -> tuple[BaseProcess, Connection]:
    # Spawned, since a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(directory, quick, theirs), daemon=True)
    # Processes started now block Ctrl-C while they run; starting the tracker at that time would unblock it.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def _work(directory: Path, quick: bool, results: Connection) -> None:
    """Checks the batches that are sent, and ends with the process that has started this one."""
    Parent().follow()
    with contextlib.suppress(EOFError, ConnectionError):
        for batch in results.recv():
            try:
                results.send([check_chunk(directory, quick, files) for files in batch])
            except Exception as error:
                results.send(error)
