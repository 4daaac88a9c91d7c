"""One run of the command, from the settings to a stream that has ended or can be resumed; and the preview of a run.

A stream that has ended is recognised without taking its lock, and is changed only to clean up after a crash.
"""

from __future__ import annotations

import contextlib
import glob
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from lazyshard import errors
from lazyshard.cli import output
from lazyshard.format.batch import EncodedRow
from lazyshard.format.records import END, HEAD, MANIFEST, TEMPORARY, End, Head
from lazyshard.format.row import check_row
from lazyshard.store.files import is_there, is_url, read_record, read_seal, stream_path
from lazyshard.stream import ChunkWriter
from lazyshard.stream.listing import Published, list_kept, read_manifest
from lazyshard.stream.lock import Wanted, find_manifest
from lazyshard.stream.members import read_position
from lazyshard.stream.share import Share
from lazyshard.stream.stream import open_stream
from lazyshard.stream.writer import open_sequenced
from lazyshard_producer.configuration.settings import OPTIONS, SOURCE_OPTIONS, Limits, Option, Settings, SourceSettings
from lazyshard_producer.display import Display, Outcome
from lazyshard_producer.errors import SettingInvalid, SourceRefused, count, explain, holding, one_line
from lazyshard_producer.following.directory import list_unread
from lazyshard_producer.following.journal import clear_journals
from lazyshard_producer.limits import Shelf
from lazyshard_producer.loop import Load, RowLoop, stopped
from lazyshard_producer.opening import check_not_own, check_out, check_sources, open_source, source_kind, source_size
from lazyshard_producer.position import PACKED_SIZE, compare_sources, decode_position, plain_name, source_names
from lazyshard_producer.rows.encoding import form_of
from lazyshard_producer.rows.pipeline import Pipeline, changes, describe
from lazyshard_producer.rows.refusals import Refusals
from lazyshard_producer.shipping import open_shelf
from lazyshard_producer.sources.source import PYTHON, STANDARD_INPUT, Context, RowOrigin, file_size
from lazyshard_producer.stop import GivenUp, Stop
from lazyshard_producer.writers import SharedLimits, share_of

_MOST_NAMED: Final = 5  # files that are listed when their rows are missing from a stream that has ended
PATIENCE_S: Final = 2.0  # total wait for rows of live sources
MAX_SHOWN: Final = 400  # characters of a row that are shown: enough to recognise it, less than a screen
MAX_SOURCES_SHOWN: Final = 20  # sources that are listed: a pattern may match thousands of files


def keep_freed_memory() -> None:
    """Makes glibc keep the freed memory of a few batches: otherwise a run spends a third of its time on page faults.

    Freeing a block that was obtained by mmap raises the mmap and trim thresholds: mallopt(3), M_MMAP_THRESHOLD.
    """
    bytes(16 << 20)  # several times what a batch of rows takes while it is read, checked and written


def find_end(out: str, samples_per_chunk: int | None) -> End | None:
    """Returns the end record of a stream that has ended, None if there is no stream or it has not ended."""
    path = stream_path(out)
    if not is_there(path / END) or read_manifest(path, samples_per_chunk) is None:
        return None
    return read_record(path / END, End.decode)


def _open(settings: Settings, shelf: Shelf, own: str, share: Share | None) -> ChunkWriter | End:
    """Returns the writer, or the end record if the stream has ended, or this writer's part of it.

    `own` is the directory in which it publishes; `share` is given for a named writer.
    """
    size, end = settings.samples_per_chunk, find_end(own, settings.samples_per_chunk)
    if end is not None and share is None:
        return end
    if end is None and (share is None or shelf.remote):
        check_sources(replace(settings, out=own))
    form = form_of(settings)
    # As many open files as the system allows: shuffled or mixed sources are open at the same time.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # If no limit can hold the run back, the next rows are read while a chunk is published.
    free = settings.rate is None and (settings.limits == Limits() or settings.writer is not None)
    more: dict[str, Any] = {"overlap": free, "arrays": form.arrays, "encoding": form.encoding}
    try:
        if share is not None and is_url(settings.out):
            # A part that is complete in the store has no shelf for uploads.
            share.uploads = shelf if shelf.remote else None
            if end is not None:
                share.complete(end.samples)
                return end
        return ChunkWriter(own, size, writer=share, **more)
    except errors.StreamEnded as ended:
        # After a crash only the end record was missing, and the writer has written it.
        return _end_after(settings, own, ended)


def _end_after(settings: Settings, own: str, ended: errors.StreamEnded) -> End:
    """Returns the end record. Raises the error unless the stream has ended with all rows of a named writer."""
    if (end := find_end(own, settings.samples_per_chunk)) is None:
        raise ended
    if settings.writer is not None and find_end(settings.out, settings.samples_per_chunk):
        taken, _ = read_position(stream_path(settings.out)).taken.get(settings.writer, (0, 0))
        if taken < end.samples:
            raise ended
    return end


def _join(settings: Settings, gate: SharedLimits, pause: Callable[[float, str], object]) -> Share | None:
    """Joins a stream of several writers before anything of this writer is changed there.

    Returns None if the stream has ended with all rows of this writer.
    """
    if find_end(settings.place, settings.samples_per_chunk) is None:
        check_sources(settings)
    try:
        return share_of(settings, gate, pause)
    except errors.StreamEnded as ended:
        _end_after(settings, settings.place, ended)
        return None


def _wait_for_sequencer(display: Display, stop: Stop, seconds: float, reason: str) -> None:
    if reason:
        display.wait(reason)
    if stop.sleep(seconds):
        raise GivenUp


def _publish(loop: RowLoop) -> Outcome:
    writer, out = loop.writer, loop.writer.directory
    try:
        loop.shelf.begin(writer.published_chunks)
        return loop.publish()
    except Exception as error:
        fenced = None
        if isinstance(error, OSError | SourceRefused) and not isinstance(error, errors.WriterFailed):
            # Another producer may have removed a file. Check before closing: closing releases the lock.
            try:
                writer.check_owner()
            except (OSError, errors.ProducerFenced) as other:
                fenced = other if isinstance(other, errors.ProducerFenced) else None
        writer.close(end=False, state="failed", note=explain(error))
        if isinstance(error, OSError | errors.ProducerFenced) and _is_gone(out):
            text = "the stream's directory is gone, with all published chunks: it was removed, moved or unmounted"
            advice = "restore it and run the same command again; without it, a run starts from the beginning"
            raise errors.StreamMissing(f"{out}: {text}; {advice}", directory=str(out)) from error
        if fenced is not None:
            raise fenced from error
        raise
    finally:
        # No effect if the run has closed it.
        writer.close(end=False, state="failed")


def _is_gone(out: Path) -> bool:
    """Whether the filesystem reports that there is no such directory. Other errors do not count."""
    try:
        os.stat(out)
    except OSError as cause:
        return isinstance(cause, FileNotFoundError | NotADirectoryError)
    return False


def run(settings: Settings, display: Display, stop: Stop, load: Load | None = None) -> Outcome | End:
    """Publishes the sources as a stream, continuing where the last run stopped, and ends the stream.

    Creates nothing until all sources have been found readable. Returns the end record if the stream had already ended.
    """
    with _named(settings.out):
        keep_freed_memory()
        if not (remote := is_url(settings.out)):
            check_out(settings.out)
        check_not_own(settings)
        gate = None if settings.writer is None else SharedLimits(settings.limits, display.warn)
        try:
            share = None if gate is None else _join(settings, gate, partial(_wait_for_sequencer, display, stop))
            opened = open_shelf(settings, warn=display.warn, stop=stop, prepare=lambda: check_sources(settings))
            with opened as shelf, _named(str(shelf.directory)):
                own = str(shelf.directory) if remote else settings.place
                if share is not None and remote and (end := find_end(own, None)):
                    complete_end(own, end)
                    if not shelf.settle(end.chunks, display.wait):
                        return stopped(settings, stop)
                found = _open(settings, shelf, own, share)
                if isinstance(found, ChunkWriter):
                    return _publish(RowLoop(settings, found, shelf, display, stop, load, gate))
                complete_end(own, found)
                if settings.writer is not None and not remote and (end := find_end(settings.out, None)):
                    complete_end(settings.out, end)
                if not shelf.settle(found.chunks, display.wait):
                    return stopped(settings, stop)
                _check_ended(replace(settings, out=own, spool=None), found, display.warn, stop)
                return found
        except GivenUp:
            # A signal arrived while the run waited for an object store.
            return stopped(settings, stop)


@contextlib.contextmanager
def _named(out: str) -> Iterator[None]:
    """Adds the stream's path to filesystem errors without one; errors of sources have been converted already."""
    try:
        yield
    except OSError as error:
        if error.filename is None and not isinstance(error, errors.LazyShardError):
            error.filename = out
        raise


def complete_end(out: str, end: End) -> None:
    """Finishes the steps that follow the end: announces it in head.json, removes `.tmp/`, retired chunks, journals."""
    stream, told = Path(out), False
    manifest = read_manifest(stream, None)
    assert manifest is not None
    with contextlib.suppress(FileNotFoundError, errors.LazyShardError):
        head = read_record(stream / HEAD, Head.decode)
        told = head.ended and (head.chunks, head.samples) == (end.chunks, end.samples)
    # Deletion may have failed while the run was ending; that run has reported it and continued.
    if not told or os.path.lexists(stream / TEMPORARY) or list_kept(stream, arrays=manifest.arrays).leftovers:
        # Opening a writer does all of it. If another producer holds the lock, that producer does it.
        with contextlib.suppress(errors.StreamEnded, errors.ProducerFenced):
            if manifest.writers is None:
                ChunkWriter(out, arrays=manifest.arrays, encoding=manifest.encoding)
            else:
                open_sequenced(stream, time.time, manifest.arrays, manifest.encoding)
    clear_journals(stream)


_Entry = dict[str, Any]
_Tell = Callable[[str], None]


def _check_ended(settings: Settings, end: End, warn: _Tell, stop: Stop | None = None) -> None:
    """Checks that a stream that has ended was made with these settings and contains all rows of the sources.

    Pipes and functions cannot be checked without consuming their rows, nor can standard input without `stop`, that is
    outside of a run. Warns of these, of missing sources, and if only the weights differ.
    """
    # A source that no longer exists cannot say what its rows are.
    with contextlib.suppress(SourceRefused):
        form = form_of(settings)
        find_manifest(Path(settings.out), Wanted(settings.samples_per_chunk, form.arrays, form.encoding))
    earlier = "the stream was ended by an earlier release; rows added to its sources since then are not detected"
    if (source := end.source) is None:
        try:
            source = read_seal(Path(settings.out), max(0, end.chunks - 1)).source
        except OSError:
            return warn(earlier)
    position, names = decode_position(source, settings.out), source_names(source)
    changed = changes(position.recipe, describe(settings)) if end.chunks else {}
    if changed.keys() - {"weights"}:
        text = f"the stream has ended, and its rows were made with other settings: {', '.join(changed.values())}"
        advice = "use the previous settings, or choose another --out"
        raise SettingInvalid(f"{text}; {advice}", option=f"--{next(iter(changed)).replace('_', '-')}")
    if changed:
        warn(f"the stream was mixed with other weights: {', '.join(changed.values())}")
    # If the last chunk is full, rows that were left out may have followed it.
    if end.source is None and not end.samples % settings.samples_per_chunk:
        return warn(earlier)
    entries = dict(zip(names, position.sources, strict=True))
    missing: list[str] = []
    for one in settings.sources:
        entry = entries.get(plain_name(one.path))
        missing += _not_taken(one) if entry is None else _behind(settings, one, entry, warn, stop)
    if missing:
        more = f" and {len(missing) - _MOST_NAMED:,} more" if len(missing) > _MOST_NAMED else ""
        what = f"the stream has ended with {count(end.samples, 'sample')}, and these rows are not in it: "
        what += f"{', '.join(missing[:_MOST_NAMED])}{more}. Publish them as another stream, with another --out"
        raise errors.StreamEnded(what, samples=end.samples)
    if (difference := compare_sources(names, [one.path for one in settings.sources])) is not None:
        number, expected, actual = difference
        warn(f"the stream was made from other sources: source {number} was {expected}, now it is {actual}")


def _not_taken(source: SourceSettings) -> list[str]:
    """Returns a source that is not part of the stream, unless the source is empty."""
    path = source.path
    if path == STANDARD_INPUT:
        return ["standard input"]
    if glob.has_magic(path) and not os.path.lexists(path):
        return []
    if source_kind(source) != "jsonl":
        return [plain_name(path)]
    return [_grown(path, 0, size)] if (size := file_size(path)) else []


def _behind(settings: Settings, source: SourceSettings, entry: _Entry, warn: _Tell, stop: Stop | None) -> list[str]:
    """Returns the source, or files of it, if it has rows after the position at which it ended."""
    path = source.path
    if path == STANDARD_INPUT and stop is not None:
        return ["standard input"] if _has_more(settings, source, entry, stop) else []
    if path.startswith(PYTHON) or entry["kind"] == "stdin":
        warn(f"{path}: not checked for more rows; nothing can be added to a stream that has ended")
        return []
    if not (is_there(stream_path(path) / MANIFEST) if is_url(path) else os.path.lexists(path)):
        return []
    if entry["kind"] == source_kind(source) == "follow":
        context = Context(Path(settings.out), settings.max_row_bytes)
        return [_grown(*one) for one in list_unread(source, entry, context)]
    size, is_file = file_size(path), os.path.isfile(path)
    # The size of a directory means nothing. A compressed file is read from its start only if its size has changed.
    if (is_file and size in (0, entry.get(PACKED_SIZE))) or not _has_more(settings, source, entry, None):
        return []
    read = int(entry.get(PACKED_SIZE) or entry.get("offset") or 0)
    return [_grown(path, read, size) if is_file else plain_name(path)]


def _grown(path: str, read: int, there: int) -> str:
    return f"{plain_name(path)} ({count(there - read, 'byte')}{f' behind byte {read:,}' if read else ''})"


def _has_more(settings: Settings, source: SourceSettings, entry: _Entry, stop: Stop | None) -> bool:
    """Returns whether a source has a row after those that were read. Waits for standard input until that is known."""
    with contextlib.closing(open_source(source, entry, Context(Path(settings.out), settings.max_row_bytes))) as opened:
        if stop is None:
            # Do not wait for a stream that is still being produced.
            opened.end()
        while (stop is None or stop.requested is None) and (rows := opened.read()) is not None:
            if rows.lines:
                return True
            if stop is not None:
                opened.wait(1.0)
    return False


def describe_run(settings: Settings, rows: int, directory: str) -> Iterator[str]:
    """Yields lines that describe what a run would do, with its first `rows` rows; raises the errors of a run.

    Errors in rows are raised after the rows are shown. The stream's state is read from `directory`, because
    `settings.out` may be in an object store; see `as_directory`.
    """
    size, there = settings.samples_per_chunk, replace(settings, out=directory, spool=None)
    check_out(directory)
    check_not_own(settings)
    notes: list[str] = []
    end = find_end(there.place, size)
    if end is None:
        form, shared = form_of(settings), settings.writer is not None
        find_manifest(Path(directory), Wanted(size, form.arrays, form.encoding, shared))
    else:
        _check_ended(replace(there, out=there.place), end, notes.append)
    stream = open_stream(Path(there.place), None)
    published = None if stream is None else stream.published()
    if end is not None:
        text = f"has ended with {holding(end.samples, end.chunks)}; a run would do nothing"
    elif published is None:
        text = f"does not exist yet; {count(size, 'sample')} per chunk"
    else:
        there_is = holding(published.samples, published.chunks)
        text = f"holds {there_is}; a run would continue after them, {count(size, 'sample')} per chunk"
    yield _field("stream", f"{settings.place}: {text}")
    yield from (_field("", note) for note in notes)
    if end is None:
        check_sources(there)
    yield from _sources(settings.sources)
    for table in ("", "rows", "encoding", "limits"):
        told = _told((option for option in OPTIONS if option.table == table), settings)
        yield _field(table or "run", "; ".join(told) or "defaults")
    if end is None and rows:
        yield from _first_rows(replace(there, out=there.place), published or Published(0, 0, False), rows)


def _told(options: Iterable[Option], settings: Settings | SourceSettings) -> list[str]:
    """Returns the options whose values differ from the defaults."""
    return [f"{one.name} = {one.show(settings)}" for one in options if one.is_set(settings)]


def _sources(sources: Sequence[SourceSettings]) -> Iterator[str]:
    order = ", mixed by weight" if sources[0].weight is not None else ", one after another"
    yield _field("sources", f"{count(len(sources), 'source')}{order if len(sources) > 1 else ''}")
    for number, source in enumerate(sources[:MAX_SOURCES_SHOWN], 1):
        size = source_size(source)
        parts = [source.path, source_kind(source), *([] if size is None else [output.size(size)])]
        yield one_line(f"  {number:>6}  {', '.join([*parts, *_told(SOURCE_OPTIONS, source)])}")
    if len(sources) > MAX_SOURCES_SHOWN:
        yield f"     ...  and {len(sources) - MAX_SOURCES_SHOWN:,} more"


def _first_rows(settings: Settings, published: Published, rows: int) -> Iterator[str]:
    """Yields the next `rows` rows that a run would publish, refused rows included. Creates nothing."""
    if any(source_kind(source) == "stdin" for source in settings.sources):
        yield _field("next", "not read: rows read from standard input or a pipe would be lost")
        return
    chunks = published.chunks
    committed = (read_seal(Path(settings.out), chunks - 1).source or {}) if chunks else None
    found: list[tuple[RowOrigin, bytes, str | None]] = []

    def refuse(error: errors.RowInvalid, place: RowOrigin, line: bytes | None) -> None:
        found.append((place, line or b"", error.reason or str(error)))

    plain, refusals = replace(settings, workers=0), Refusals("skip", None, None, 0, tell=refuse)
    pipeline = Pipeline(plain, committed, samples=published.samples, warn=lambda text: None, refusals=refusals)
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.closing(pipeline):
        while len(found) < rows and (batch := pipeline.read()) is not None:
            for index, line in enumerate(batch.lines[: rows - len(found)]):
                try:
                    if isinstance(line, errors.RowInvalid):
                        raise line
                    text = line.line if isinstance(line, EncodedRow) else line
                    check_row(text)
                    found.append((batch.place(index), text, None))
                except errors.RowInvalid as error:
                    batch.refuse(index, error)
            left = deadline - time.monotonic()
            if not batch.lines and pipeline.mixer.wait(max(0.0, left)) and left <= 0:
                break
    yield _field("next", count(len(found), "row") if found else "no rows")
    for place, row, refused in found:
        shown = row.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
        cut = f" ... ({count(len(row), 'byte')})" if len(shown) > MAX_SHOWN else ""
        where, why = f"{place.file}:{place.line}", "" if refused is None else f"refused: {refused}: "
        yield one_line(f"  {where}  {why}{shown[:MAX_SHOWN]}{cut}")
        if refused is not None and settings.on_bad_row == "fail":
            message = f"{where}: {refused}; a run would end here with --on-bad-row fail"
            raise errors.RowInvalid(message, reason=refused, file=place.file, line=place.line, byte=place.byte)


def _field(name: str, text: str) -> str:
    return one_line(f"{name:<8}  {text}")
