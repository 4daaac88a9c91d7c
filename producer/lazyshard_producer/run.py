"""One run of the command, from the settings to a stream that has ended or can be resumed; and what it would do.

A stream that has ended is recognised without taking its lock, and not touched unless a crash has left something.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import resource
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lazyshard import errors
from lazyshard.cli import output
from lazyshard.format.batch import EncodedRow
from lazyshard.format.records import END, HEAD, MANIFEST, TEMPORARY, End, Head
from lazyshard.format.row import check_row
from lazyshard.store.files import is_there, is_url, read_file, read_record, read_seal, stream_path
from lazyshard.stream import ChunkWriter
from lazyshard.stream.listing import list_kept, read_manifest
from lazyshard.stream.lock import find_manifest
from lazyshard.stream.stream import open_stream
from lazyshard_producer.configuration.problems import MAX_NAME_BYTES
from lazyshard_producer.configuration.settings import OPTIONS, SOURCE_OPTIONS, Limits, Option, Settings, SourceSettings
from lazyshard_producer.display import Display, Outcome
from lazyshard_producer.errors import SettingInvalid, SourceRefused, count, explain, holding, one_line
from lazyshard_producer.following.directory import list_unread
from lazyshard_producer.following.journal import DIRECTORY, KIND
from lazyshard_producer.loop import Load, RowLoop, clear_journals, stopped
from lazyshard_producer.opening import check_not_own, check_sources, open_source, source_kind, source_size
from lazyshard_producer.position import PACKED_SIZE, compare_sources, decode_position, plain_name, source_names
from lazyshard_producer.rows.encoding import form_of
from lazyshard_producer.rows.pipeline import Pipeline, changes, describe
from lazyshard_producer.rows.refusals import Refusals
from lazyshard_producer.shipping import open_shelf
from lazyshard_producer.sources.source import PYTHON, STANDARD_INPUT, Context, RowOrigin, file_size
from lazyshard_producer.stop import GivenUp, Stop

_MOST_NAMED: Final = 5  # files that are named where a stream that has ended lacks many
PATIENCE_S: Final = 2.0  # how long to wait for rows of live sources in all
MAX_SHOWN: Final = 400  # characters of a row that are shown: enough to see what it is, no screenful
MAX_SOURCES_SHOWN: Final = 20  # sources that are shown one by one: a pattern may match thousands of files


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory of a few batches of rows: else a third of the time of a run goes into new pages.

    Freeing a block that came from the kernel doubles the limit from which memory is given back: mallopt(3).
    """
    bytes(16 << 20)  # several times what a batch of rows takes while it is read, checked and written


def _check_out(out: str) -> None:
    """Checks that a directory can have this name, or has it."""
    problem = long = ""
    try:
        if not stat.S_ISDIR(os.stat(out).st_mode):
            problem = "expected a directory (or nothing yet), found a file"
    except FileNotFoundError:
        problem = "expected a directory, found a link to nothing" if os.path.islink(out) else ""
        # The filesystem says so only once the directories above it are there, that is after some were made.
        long = next((part for part in Path(out).parts if len(os.fsencode(part)) > MAX_NAME_BYTES), "")
    except OSError as cause:
        if cause.errno not in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP):
            raise
        problem = f"cannot be a directory: {cause.strerror}"
        long = out if cause.errno == errno.ENAMETOOLONG else ""
    if long:
        raise SettingInvalid(f"--out: a name of {len(long)} characters is too long: {long[:40]}...", option="--out")
    if problem:
        raise errors.StreamInvalid(f"{out}: {problem}", directory=out)


def find_end(out: str, samples_per_chunk: int) -> End | None:
    """Returns how much an ended stream holds, None where there is no stream or it has not ended."""
    with contextlib.suppress(FileNotFoundError):
        data = read_file(Path(out, END))
        if read_manifest(Path(out), samples_per_chunk) is not None:
            return End.decode(data, str(Path(out, END)))
    return None


def _open(settings: Settings) -> ChunkWriter | End:
    """Returns the writer, or how much the stream holds where it has ended."""
    size = settings.samples_per_chunk
    if end := find_end(settings.out, size):
        return end
    check_sources(settings)
    form = form_of(settings)
    # As many as the system allows: sources that are shuffled or mixed are open at a time.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Where nothing holds it back, the next rows are read while a chunk is published.
    free = settings.rate is None and settings.limits == Limits()
    try:
        return ChunkWriter(settings.out, size, overlap=free, arrays=form.arrays, encoding=form.encoding)
    except errors.StreamEnded:
        # A crash had left only the end to be written, which the writer has done.
        if end := find_end(settings.out, size):
            return end
        raise


def _publish(loop: RowLoop) -> Outcome:
    writer, out = loop.writer, loop.writer.directory
    try:
        loop.shelf.begin(writer.published_chunks)
        return loop.publish()
    except Exception as error:
        fenced = None
        if isinstance(error, OSError | SourceRefused) and not isinstance(error, errors.WriterFailed):
            # Another producer may have removed a file. Before ours is closed: that lets others in.
            try:
                writer.check_owner()
            except (OSError, errors.ProducerFenced) as other:
                fenced = other if isinstance(other, errors.ProducerFenced) else None
        writer.close(end=False, state="failed", note=explain(error))
        if isinstance(error, OSError | errors.ProducerFenced) and _is_gone(out):
            text = "the stream's directory is gone, with what was published in it: it was removed, moved or unmounted"
            advice = "put it back and run the same command again, which begins anew without it"
            raise errors.StreamMissing(f"{out}: {text}; {advice}", directory=str(out)) from error
        if fenced is not None:
            raise fenced from error
        raise
    finally:
        # Does nothing if the run has closed it.
        writer.close(end=False, state="failed")


def _is_gone(out: Path) -> bool:
    """Whether the filesystem says that there is no such directory. No answer, or no permission, is none."""
    try:
        os.stat(out)
    except OSError as cause:
        return isinstance(cause, FileNotFoundError | NotADirectoryError)
    return False


def run(settings: Settings, display: Display, stop: Stop, load: Load | None = None) -> Outcome | End:
    """Publishes the sources as a stream, from where the last run came to, and ends it.

    Nothing is made before the sources were found to be readable. Returns the end that was found if the stream had ended
    before.
    """
    with _named(settings.out):
        keep_freed_memory()
        if not is_url(settings.out):
            _check_out(settings.out)
        check_not_own(settings)
        try:
            opened = open_shelf(settings, warn=display.warn, stop=stop, prepare=lambda: check_sources(settings))
            with opened as shelf, _named(str(shelf.directory)):
                inner = replace(settings, out=str(shelf.directory), spool=None)
                if isinstance(found := _open(inner), ChunkWriter):
                    return _publish(RowLoop(settings, found, shelf, display, stop, load))
                complete_end(inner.out, found)
                if not shelf.settle(found.chunks, display.wait):
                    return stopped(settings, stop)
                _check_ended(inner, found, display.warn, stop)
                return found
        except GivenUp:
            # A signal has come while an object store was being waited for.
            return stopped(settings, stop)


@contextlib.contextmanager
def _named(out: str) -> Iterator[None]:
    """Has errors of the filesystem say which one it is: the stream's, since those of sources are told as such."""
    try:
        yield
    except OSError as error:
        if error.filename is None and not isinstance(error, errors.LazyShardError):
            error.filename = out
        raise


def complete_end(out: str, end: End) -> None:
    """Does what may be left behind the end: readers are told of it, `.tmp/`, retired chunks and journals go."""
    stream, told = Path(out), False
    manifest = read_manifest(stream, None)
    assert manifest is not None
    with contextlib.suppress(FileNotFoundError, errors.LazyShardError):
        head = read_record(stream / HEAD, Head.decode)
        told = head.ended and (head.chunks, head.samples) == (end.chunks, end.samples)
    # Deleting may have failed as the run was ending, which has told of it and continued.
    if not told or os.path.lexists(stream / TEMPORARY) or list_kept(stream, arrays=manifest.arrays).leftovers:
        # Opening does it. One that holds the lock is at it.
        with contextlib.suppress(errors.StreamEnded, errors.ProducerFenced):
            ChunkWriter(out, arrays=manifest.arrays, encoding=manifest.encoding)
    clear_journals(stream)


_Entry = dict[str, Any]
_Tell = Callable[[str], None]


def _check_ended(settings: Settings, end: End, warn: _Tell, stop: Stop | None = None) -> None:
    """Looks whether a stream that has ended is the one asked for: its rows made alike, and all rows of the sources.

    Pipes and functions cannot be looked at without taking their rows, nor standard input where no run asks, which has
    a `stop`: that is told, as are lacking sources, and that only the mix would differ.
    """
    # A source that has gone would tell what rows are.
    with contextlib.suppress(SourceRefused):
        form = form_of(settings)
        find_manifest(Path(settings.out), settings.samples_per_chunk, form.arrays, form.encoding)
    earlier = "the stream was ended by an earlier release; rows that were added to its sources since are not noticed"
    if (source := end.source) is None:
        try:
            source = read_seal(Path(settings.out), max(0, end.chunks - 1)).source
        except OSError:
            return warn(earlier)
    position, names = decode_position(source, settings.out), source_names(source)
    changed = changes(position.recipe, describe(settings)) if end.chunks else {}
    if changed.keys() - {"weights"}:
        text = f"the stream has ended, and its rows were made in another way: {', '.join(changed.values())}"
        advice = "continue with the settings of before, or choose another --out"
        raise SettingInvalid(f"{text}; {advice}", option=f"--{next(iter(changed)).replace('_', '-')}")
    if changed:
        warn(f"the stream was mixed otherwise: {', '.join(changed.values())}")
    # Behind the last of full chunks there may have been rows that were left out.
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
        what += f"{', '.join(missing[:_MOST_NAMED])}{more}. Publish them as a stream of their own, with another --out"
        raise errors.StreamEnded(what, samples=end.samples)
    if (difference := compare_sources(names, [one.path for one in settings.sources])) is not None:
        number, expected, actual = difference
        warn(f"the stream was made from other sources: source {number} was {expected}, now it is {actual}")


def _not_taken(source: SourceSettings) -> list[str]:
    """Returns a source of which nothing is in the stream, unless there is nothing in it."""
    path = source.path
    if path == STANDARD_INPUT:
        return ["standard input"]
    if glob.has_magic(path) and not os.path.lexists(path):
        return []
    if source_kind(source) != "jsonl":
        return [plain_name(path)]
    return [_grown(path, 0, size)] if (size := file_size(path)) else []


def _behind(settings: Settings, source: SourceSettings, entry: _Entry, warn: _Tell, stop: Stop | None) -> list[str]:
    """Returns the source, or files of it, if it holds rows behind the place where it ended."""
    path = source.path
    if path == STANDARD_INPUT and stop is not None:
        return ["standard input"] if _has_more(settings, source, entry, stop) else []
    if path.startswith(PYTHON) or entry["kind"] == "stdin":
        warn(f"{path}: not looked at; nothing can be added to a stream that has ended")
        return []
    if not (is_there(stream_path(path) / MANIFEST) if is_url(path) else os.path.lexists(path)):
        return []
    if entry["kind"] == source_kind(source) == KIND:
        place = Path(settings.out, DIRECTORY)
        return [_grown(*one) for one in list_unread(source, entry, place, settings.max_row_bytes)]
    size, is_file = file_size(path), os.path.isfile(path)
    # Of a directory the size says nothing. A compressed file is read from its start only if it is another size.
    if (is_file and size in (0, entry.get(PACKED_SIZE))) or not _has_more(settings, source, entry, None):
        return []
    read = int(entry.get(PACKED_SIZE) or entry.get("offset") or 0)
    return [_grown(path, read, size) if is_file else plain_name(path)]


def _grown(path: str, read: int, there: int) -> str:
    return f"{plain_name(path)} ({count(there - read, 'byte')}{f' behind byte {read:,}' if read else ''})"


def _has_more(settings: Settings, source: SourceSettings, entry: _Entry, stop: Stop | None) -> bool:
    """Returns whether a source holds a row behind those that were read; standard input is waited for, till then."""
    with contextlib.closing(open_source(source, entry, Context(Path(settings.out), settings.max_row_bytes))) as opened:
        if stop is None:
            # A stream that is still produced is looked at, not waited for.
            opened.end()
        while (stop is None or stop.requested is None) and (rows := opened.read()) is not None:
            if rows.lines:
                return True
            if stop is not None:
                opened.wait(1.0)
    return False


def describe_run(settings: Settings, rows: int, directory: str) -> Iterator[str]:
    """Yields the lines that say what a run would do, with so many rows; raises as the run would, of rows once shown.

    `directory` tells how far the stream is, where `settings.out` is none; see `as_directory`.
    """
    size, there = settings.samples_per_chunk, replace(settings, out=directory, spool=None)
    _check_out(directory)
    check_not_own(settings)
    notes: list[str] = []
    end = find_end(directory, size)
    if end is None:
        form = form_of(settings)
        find_manifest(Path(directory), size, form.arrays, form.encoding)
    else:
        _check_ended(there, end, notes.append)
    stream = open_stream(Path(directory), None)
    published = None if stream is None else stream.published()
    if end is not None:
        text = f"has ended with {holding(end.samples, end.chunks)}; a run would do nothing"
    elif published is None:
        text = f"not there yet; {count(size, 'sample')} a chunk"
    else:
        there_is = holding(published.samples, published.chunks)
        text = f"holds {there_is}; a run would continue after them, {count(size, 'sample')} a chunk"
    yield _field("stream", f"{settings.out}: {text}")
    yield from (_field("", note) for note in notes)
    if end is None:
        check_sources(there)
    yield from _sources(settings.sources)
    for table in ("", "rows", "encoding", "limits"):
        told = _told((option for option in OPTIONS if option.table == table), settings)
        yield _field(table or "run", "; ".join(told) or "as by default")
    if end is None and rows:
        yield from _first_rows(there, published.chunks if published else 0, published.samples if published else 0, rows)


def _told(options: Iterable[Option], settings: Settings | SourceSettings) -> list[str]:
    """Returns the options whose values are not those by default."""
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


def _first_rows(settings: Settings, chunks: int, samples: int, rows: int) -> Iterator[str]:
    """Yields so many of the rows that a run would publish next, those refused on the way among them. Makes nothing."""
    if any(source_kind(source) == "stdin" for source in settings.sources):
        yield _field("next", "not looked at: what is read from standard input or a pipe is gone")
        return
    committed = (read_seal(Path(settings.out), chunks - 1).source or {}) if chunks else None
    found: list[tuple[RowOrigin, bytes, str | None]] = []

    def refuse(error: errors.RowInvalid, place: RowOrigin, line: bytes | None) -> None:
        found.append((place, line or b"", error.reason or str(error)))

    plain, refusals = replace(settings, workers=0), Refusals("skip", None, None, 0, tell=refuse)
    pipeline = Pipeline(plain, committed, samples=samples, warn=lambda text: None, refusals=refusals)
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
