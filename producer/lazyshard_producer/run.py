"""One run of the command, from the settings to a stream that has ended or can be resumed; and what it would do."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from lazyshard.errors import LazyShardError, ProducerFenced, RowInvalid, StreamEnded, StreamMissing, WriterFailed
from lazyshard.format.batch import EncodedRow
from lazyshard.format.names import seal_name
from lazyshard.format.records import End
from lazyshard.format.row import check_row
from lazyshard.format.seal import Seal
from lazyshard.store.files import read_file
from lazyshard.store.urls import is_url
from lazyshard.stream import ChunkWriter
from lazyshard.stream.recovery import find_manifest
from lazyshard.stream.stream import open_stream
from lazyshard_producer import out_directory
from lazyshard_producer.configuration.quantities import show_bytes
from lazyshard_producer.configuration.settings import OPTIONS, SOURCE_OPTIONS, Limits, Option, Settings, SourceSettings
from lazyshard_producer.display import Display, Metrics, Outcome
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.loop import RowLoop, stopped
from lazyshard_producer.opening import check_not_own, check_sources, source_kind, source_size
from lazyshard_producer.rows.encoding import form_of
from lazyshard_producer.rows.pipeline import Pipeline
from lazyshard_producer.rows.refusals import Refusals
from lazyshard_producer.shipping import open_destination
from lazyshard_producer.shipping.store import GivenUp
from lazyshard_producer.sources.source import RowOrigin
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import count, explain, holding, one_line


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory of a few batches of rows: else a third of the time of a run goes into new pages.

    When a block that came straight from the kernel is freed, glibc takes twice its size as the limit from which it
    gives memory back (mallopt(3), M_MMAP_THRESHOLD). The block is never touched, so it costs nothing.
    """
    bytes(16 << 20)  # several times what a batch of rows takes while it is read, checked and written


def _open(settings: Settings) -> ChunkWriter | End:
    """Returns the writer, or how much the stream holds where it has ended."""
    if end := out_directory.find_end(settings.out, settings.samples_per_chunk):
        return end
    check_sources(settings)
    form = form_of(settings)
    # As many as the system allows: sources that are shuffled or mixed are open at a time.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Where nothing holds it back, the next rows are read while a chunk is published.
    free = settings.rate is None and settings.limits == Limits()
    size, arrays = settings.samples_per_chunk, form.arrays
    try:
        return ChunkWriter(settings.out, size, overlap=free, arrays=arrays, encoding=form.encoding)
    except StreamEnded:
        # A crash had left only the end to be written, which the writer has done.
        if end := out_directory.find_end(settings.out, size):
            return end
        raise


def _publish(loop: RowLoop) -> Outcome:
    writer, out = loop.writer, loop.inner.out
    try:
        loop.destination.begin(writer.published_chunks)
        return loop.publish()
    except Exception as error:
        fenced = None
        if isinstance(error, OSError | SourceRefused) and not isinstance(error, WriterFailed):
            # Another producer may have removed a file. Before ours is closed: that lets others in.
            with contextlib.suppress(OSError):
                try:
                    writer.check_owner()
                except ProducerFenced as other:
                    fenced = other
        writer.close(end=False, state="failed", note=explain(error))
        if isinstance(error, OSError | ProducerFenced) and out_directory.is_gone(out):
            text = "the stream's directory is gone, with what was published in it: it was removed, moved or unmounted"
            advice = "Put it back and run the same command again to go on; without it that command begins anew"
            raise StreamMissing(f"{out}: {text} meanwhile. {advice}", directory=out) from error
        if fenced is not None:
            raise fenced from error
        raise
    finally:
        # Does nothing if the run has closed it.
        writer.close(end=False, state="failed")


def run(
    settings: Settings,
    display: Display,
    stop: Stop,
    *,
    metrics: Metrics | None = None,
    load: Callable[[], Settings] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome | End:
    """Publishes the sources as a stream, from where the last run came to, and ends it.

    Nothing is made before the sources were found to be readable. Returns how it came out; the end that was found if the
    stream had ended before. `load` reads the settings anew when SIGHUP has come.
    """
    with _named(settings.out):
        keep_freed_memory()
        if not is_url(settings.out):
            out_directory.check_out(settings.out)
        check_not_own(settings)
        try:
            opened = open_destination(settings, warn=display.warn, stop=stop, prepare=lambda: check_sources(settings))
            begin_anew = out_directory.telling_how_to_begin_anew(settings.out)
            with opened as destination, _named(destination.directory), begin_anew:
                inner = replace(settings, out=destination.directory, spool=None)
                found, metrics = _open(inner), metrics or Metrics()
                if isinstance(found, ChunkWriter):
                    more = (load, clock, sleep)
                    return _publish(RowLoop(settings, inner, found, destination, display, metrics, stop, *more))
                out_directory.complete_end(inner.out, found)
                if not destination.settle(found.chunks, display.wait):
                    return stopped(settings, stop)
                out_directory.check_ended(inner, found, display.warn, lambda: stop.requested is not None)
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
        if error.filename is None and not isinstance(error, LazyShardError):
            error.filename = out
        raise


PATIENCE_S: Final = 2.0  # how long to wait for rows of live sources in all
MAX_SHOWN: Final = 400  # characters of a row that are shown: enough to see what it is, no screenful
MAX_SOURCES_SHOWN: Final = 20  # sources that are shown one by one: a pattern may match thousands of files


def describe_run(settings: Settings, rows: int, directory: str) -> Iterator[str]:
    """Yields the lines that say what a run would do, with so many rows; raises as the run would, of rows once shown.

    `directory` tells how far the stream is, where `settings.out` is none; see `as_directory`.
    """
    there = replace(settings, out=directory, spool=None)
    out_directory.check_out(directory)
    check_not_own(settings)
    notes: list[str] = []
    with out_directory.telling_how_to_begin_anew(settings.out):
        end = out_directory.find_end(directory, settings.samples_per_chunk)
        if end is None:
            form = form_of(settings)
            find_manifest(Path(directory), settings.samples_per_chunk, form.arrays, form.encoding)
        else:
            out_directory.check_ended(there, end, notes.append)
    stream = open_stream(Path(directory), None)
    published = None if stream is None else stream.published()
    size = f"{count(settings.samples_per_chunk, 'sample')} a chunk"
    if end is not None:
        text = f"has ended with {holding(end.samples, end.chunks)}; a run would do nothing"
    elif published is None:
        text = f"not there yet; {size}"
    else:
        text = f"holds {holding(published.samples, published.chunks)}; a run would go on after them, {size}"
    yield _field("stream", f"{settings.out}: {text}")
    yield from (_field("", note) for note in notes)
    if end is None:
        check_sources(there)
    yield from _sources(settings.sources)
    plain = Settings(sources=(), out=settings.out, samples_per_chunk=settings.samples_per_chunk)
    for name, table in (("run", ""), ("rows", "rows"), ("encoding", "encoding"), ("limits", "limits")):
        told = _told((option for option in OPTIONS if option.table == table), settings, plain)
        yield _field(name, "; ".join(told) or "as by default")
    if end is None and rows:
        yield from _first_rows(there, published.chunks if published else 0, published.samples if published else 0, rows)


def _told(
    options: Iterable[Option], settings: Settings | SourceSettings, plain: Settings | SourceSettings
) -> list[str]:
    """Returns the options whose values are not those of `plain`."""
    return [f"{one.name} = {one.show(settings)}" for one in options if one.of(settings) != one.of(plain)]


def _sources(sources: Sequence[SourceSettings]) -> Iterator[str]:
    order = "mixed by weight" if sources[0].weight is not None else "one after another"
    yield _field("sources", f"{count(len(sources), 'source')}{f', {order}' if len(sources) > 1 else ''}")
    for number, source in enumerate(sources[:MAX_SOURCES_SHOWN], 1):
        size = source_size(source)
        parts = [source.path, source_kind(source), *([] if size is None else [show_bytes(size)])]
        parts += _told(SOURCE_OPTIONS, source, SourceSettings(path=source.path))
        yield one_line(f"  {number:>6}  {', '.join(parts)}")
    if len(sources) > MAX_SOURCES_SHOWN:
        yield f"     ...  and {len(sources) - MAX_SOURCES_SHOWN:,} more"


def _first_rows(settings: Settings, chunks: int, samples: int, rows: int) -> Iterator[str]:
    """Yields so many of the rows that a run would publish next, those refused on the way among them. Makes nothing."""
    if any(source_kind(source) == "stdin" for source in settings.sources):
        yield _field("next", "not looked at: what is read from standard input or a pipe is gone")
        return
    committed = None
    if chunks:
        path = Path(settings.out, seal_name(chunks - 1))
        committed = Seal.decode(read_file(path), chunks - 1, str(path)).source or {}
    found: list[tuple[RowOrigin, bytes, str | None]] = []

    def refuse(error: RowInvalid, place: RowOrigin, line: bytes | None) -> None:
        found.append((place, line or b"", error.reason or str(error)))

    refusals = Refusals("skip", None, None, 0, tell=refuse)
    plain = replace(settings, workers=0)
    pipeline = Pipeline(plain, committed, samples=samples, warn=lambda text: None, refusals=refusals)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while len(found) < rows and (batch := pipeline.read()) is not None:
            for index, line in enumerate(batch.lines[: rows - len(found)]):
                try:
                    if isinstance(line, RowInvalid):
                        raise line
                    text = line.line if isinstance(line, EncodedRow) else line
                    check_row(text)
                except RowInvalid as error:
                    batch.refuse(index, error)
                else:
                    found.append((batch.place(index), text, None))
            left = deadline - time.monotonic()
            if not batch.lines and pipeline.stats.mixer.wait(max(0.0, left)) and left <= 0:
                break
    finally:
        pipeline.close()
    yield _field("next", count(len(found), "row") if found else "no rows")
    for place, row, refused in found:
        shown = row.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
        cut = f" ... ({count(len(row), 'byte')})" if len(shown) > MAX_SHOWN else ""
        where, why = f"{place.file}:{place.line}", "" if refused is None else f"refused: {refused}: "
        yield one_line(f"  {where}  {why}{shown[:MAX_SHOWN]}{cut}")
        if refused is not None and settings.on_bad_row == "fail":
            message = f"{where}: {refused}; a run would end here with --on-bad-row fail"
            raise RowInvalid(message, reason=refused, file=place.file, line=place.line, byte=place.byte)


def _field(name: str, text: str) -> str:
    return one_line(f"{name:<8}  {text}")
