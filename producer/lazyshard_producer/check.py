"""`lazyshard-producer check`: what a run would do, and the first rows that it would publish. Makes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.errors import RowInvalid, redact
from lazyshard.format.batch import EncodedRow
from lazyshard.format.names import seal_name
from lazyshard.format.records import End
from lazyshard.format.row import check_row
from lazyshard.format.seal import Seal
from lazyshard.store.files import read_file
from lazyshard.stream.recovery import find_manifest
from lazyshard.stream.stream import open_stream
from lazyshard_producer import out_directory
from lazyshard_producer.configuration.quantities import show_amount, show_bytes
from lazyshard_producer.configuration.settings import Limits, Settings, SourceSettings
from lazyshard_producer.opening import check_not_own, check_sources, source_kind, source_size
from lazyshard_producer.rows.encoding import form_of
from lazyshard_producer.rows.pipeline import Pipeline
from lazyshard_producer.rows.refusals import Refusals
from lazyshard_producer.sources.source import RowOrigin
from lazyshard_producer.wording import count, holding, one_line

PATIENCE_S: Final = 2.0  # how long to wait for rows of live sources in all


class PreviewedRow(NamedTuple):
    """A row as it would be published, or what there is of it and why it would be refused."""

    place: RowOrigin
    line: bytes
    refused: str | None = None


def preview(settings: Settings, rows: int, *, clock: Callable[[], float] = time.monotonic) -> list[PreviewedRow]:
    """Returns so many of the rows that a run would publish next, and those refused on the way. Makes nothing.

    Nothing is taken from standard input or pipes, since what is read there is gone: with such a source there are none.
    """
    if any(source_kind(source) == "stdin" for source in settings.sources):
        return []
    found: list[PreviewedRow] = []

    def refuse(error: RowInvalid, place: RowOrigin, line: bytes | None) -> None:
        found.append(PreviewedRow(place, line or b"", error.reason or str(error)))

    committed, samples = _committed(settings)
    refusals = Refusals("skip", None, None, 0, tell=refuse)
    plain = replace(settings, workers=0)
    pipeline = Pipeline(plain, committed, samples=samples, warn=lambda text: None, refusals=refusals)
    deadline = clock() + PATIENCE_S
    try:
        while len(found) < rows and (batch := pipeline.reader.read()) is not None:
            for index, line in enumerate(batch.lines):
                if len(found) >= rows:
                    break
                try:
                    if isinstance(line, RowInvalid):
                        raise line
                    if isinstance(line, EncodedRow):
                        line = line.line
                    check_row(line)
                except RowInvalid as error:
                    batch.refuse(index, error)
                else:
                    found.append(PreviewedRow(batch.place(index), line))
            if not batch.lines:
                left = deadline - clock()
                if pipeline.stats.mixer.wait(max(0.0, left)) and left <= 0:
                    break
    finally:
        pipeline.close()
    return found


def _committed(settings: Settings) -> tuple[Any, int]:
    """Returns the source position of the stream's last seal, None where there is none, and how many rows it holds."""
    out = Path(settings.out)
    stream = open_stream(out, None)
    published = None if stream is None else stream.published()
    if published is None or not published.chunks:
        return None, 0
    path = out / seal_name(published.chunks - 1)
    return Seal.decode(read_file(path), published.chunks - 1, str(path)).source or {}, published.samples


MAX_SHOWN: Final = 400  # characters of a row that are shown: enough to see what it is, no screenful
MAX_SOURCES_SHOWN: Final = 20  # sources that are shown one by one: a pattern may match thousands of files


def describe_run(settings: Settings, rows: int, directory: str | None = None) -> Iterator[str]:
    """Yields the lines that say what a run would do, with so many rows; raises as the run would, of rows once shown.

    `directory` tells how far the stream is, where `settings.out` is none; see `as_directory`.
    """
    there = settings if directory is None else replace(settings, out=directory, spool=None)
    out_directory.check_out(there.out)
    check_not_own(settings)
    notes: list[str] = []
    with out_directory.telling_how_to_begin_anew(settings.out):
        end = out_directory.find_end(there.out, settings.samples_per_chunk)
        if end is None:
            form = form_of(settings)
            find_manifest(Path(there.out), settings.samples_per_chunk, form.arrays, form.encoding)
        else:
            out_directory.check_made_alike(there, end, notes.append)
            out_directory.check_all_taken(there, end, notes.append)
    yield _field("stream", _stream(settings, end, Path(there.out)))
    yield from (_field("", note) for note in notes)
    if end is None:
        check_sources(there)
    yield from _sources(settings.sources)
    yield _field("rows", _rows(settings))
    yield _field("bad rows", _bad_rows(settings))
    yield _field("limits", _limits(settings.limits))
    if settings.metrics_port is not None:
        port = settings.metrics_port or "ANY FREE PORT"
        yield _field("metrics", f"http://{settings.metrics_host}:{port}/metrics")
    if end is None and rows:
        yield from _first_rows(settings, preview(there, rows))


def _stream(settings: Settings, end: End | None, directory: Path) -> str:
    out = redact(settings.out)
    if end is not None:
        return f"{out}: has ended with {holding(end.samples, end.chunks)}; a run would do nothing"
    stream = open_stream(directory, None)
    if stream is None:
        return f"{out}: not there yet; {count(settings.samples_per_chunk, 'sample')} a chunk"
    there = stream.published()
    holds = holding(there.samples, there.chunks)
    return f"{out}: holds {holds}; a run would go on after them, {count(settings.samples_per_chunk, 'sample')} a chunk"


def _sources(sources: Sequence[SourceSettings]) -> Iterator[str]:
    mixed = sources[0].weight is not None and len(sources) > 1
    total = sum(source.weight or 0.0 for source in sources)
    order = "mixed by weight" if mixed else "one after another"
    yield _field("sources", f"{count(len(sources), 'source')}{f', {order}' if len(sources) > 1 else ''}")
    for number, source in enumerate(sources[:MAX_SOURCES_SHOWN], 1):
        parts = [source.path, source_kind(source), *_details(source)]
        if mixed:
            parts.append(f"{(source.weight or 0.0) / total:.1%} of the rows")
        yield one_line(f"  {number:>6}  {', '.join(parts)}")
    if len(sources) > MAX_SOURCES_SHOWN:
        yield f"     ...  and {len(sources) - MAX_SOURCES_SHOWN:,} more"


def _details(source: SourceSettings) -> Iterator[str]:
    size = source_size(source)
    if size is not None:
        yield show_bytes(size)
    if source.follow:
        finished = {
            "rename": "complete as they appear",
            "marker": f"complete when {source.marker} is there",
            "idle": f"complete when they have not grown for {source.idle_s:g} s",
        }
        yield f"files {source.pattern}, {finished[source.finished_by]}, until {source.end_marker} is there"


def _rows(settings: Settings) -> str:
    told = "the encoder's length" if settings.encode is not None else "the length measured"
    lengths = repr(settings.length_field) if settings.encode is settings.measure is None else told
    workers = f" in {count(settings.workers, 'worker')}" if settings.workers else ""
    encoding = "" if settings.transform else workers
    pairs = (new if new == old else f"{new}={old}" for new, old in settings.columns)
    split = (
        asdict(settings.splitting).items() - {("size", settings.split), ("overlap", 0)} if settings.splitting else ()
    )
    given = "".join(f", {name} {value}" for name, value in sorted(split) if value is not None)
    among = f"{settings.pack_buffer:,} rows at a time, fewer where they hold {show_bytes(settings.pack_buffer_bytes)}"
    ranks = settings.balance or 0
    held = f"{ranks * settings.samples_per_chunk:,} at a time, micro batches of {settings.micro_batch_size}"
    parts = (
        (settings.columns, f"columns {', '.join(pairs)}"),
        (settings.where, f"where {settings.where}"),
        (settings.transform, f"transform {settings.transform}{workers}"),
        (settings.encode, f"encoded by {settings.encode} {settings.model or ''}".rstrip() + encoding),
        (settings.measure, f"measured by {settings.measure} {settings.model or ''}".rstrip()),
        (settings.shuffle, f"shuffled {settings.shuffle:,} at a time with seed {settings.seed}"),
        (settings.pack, f"packed to {settings.pack:,} tokens by {lengths}, among {among}"),
        (settings.split, f"cut into sequences of {settings.split:,} tokens{given}"),
        (settings.pad, f"padded to {settings.pad:,} tokens with {settings.pad_token}"),
        (ranks, f"dealt by cost to {count(ranks, 'rank')}, {held}, lengths in {lengths}"),
        (settings.rate, f"at most {settings.rate or 0:g} a second"),
    )
    return "; ".join(text for value, text in parts if value) or "as they are"


def _bad_rows(settings: Settings) -> str:
    if settings.on_bad_row == "fail":
        return "the first one ends the run"
    what = "left out" if settings.on_bad_row == "skip" else f"to {redact(settings.out)}/quarantine.jsonl"
    most = "any number" if settings.max_bad_rows is None else f"{settings.max_bad_rows:,} at the most"
    return f"{what}, {most}"


def _limits(limits: Limits) -> str:
    parts = []
    if limits.max_ahead is not None:
        parts.append(f"at most {show_amount(limits.max_ahead)} ahead of the slowest reader")
    if limits.max_disk is not None:
        parts.append(f"at most {show_bytes(limits.max_disk)} on disk")
    if limits.min_free_disk is not None:
        parts.append(f"{show_bytes(limits.min_free_disk)} stay free")
    deleted = "chunks that no consumer needs are deleted"
    last = f"{deleted}, but for the last {'one' if limits.retain == 1 else limits.retain}"
    parts.append({"all": "every chunk stays", "consumed": deleted}.get(str(limits.retain), last))
    if limits.consumers and limits.retain != "all":
        have = "has" if len(limits.consumers) == 1 else "have"
        parts.append(f"none before {', '.join(limits.consumers)} {have} registered")
    return "; ".join(parts)


def _first_rows(settings: Settings, rows: Sequence[PreviewedRow]) -> Iterator[str]:
    if not rows and any(source_kind(source) == "stdin" for source in settings.sources):
        yield _field("next", "not looked at: what is read from standard input or a pipe is gone")
        return
    yield _field("next", count(len(rows), "row") if rows else "no rows")
    for row in rows:
        text = row.line.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
        cut = f" ... ({count(len(row.line), 'byte')})" if len(text) > MAX_SHOWN else ""
        refused = f"refused: {row.refused}: " if row.refused is not None else ""
        where = f"{row.place.file}:{row.place.line}"
        yield one_line(f"  {where}  {refused}{text[:MAX_SHOWN]}{cut}")
        if row.refused is not None and settings.on_bad_row == "fail":
            raise RowInvalid(
                f"{where}: {row.refused}; a run would end here with --on-bad-row fail",
                reason=row.refused,
                file=row.place.file,
                line=row.place.line,
                byte=row.place.byte,
            )


def _field(name: str, text: str) -> str:
    return one_line(f"{name:<8}  {text}")
