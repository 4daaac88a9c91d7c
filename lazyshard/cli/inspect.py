"""`lazyshard inspect`: shows what a stream holds, and its rows."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Annotated, Any, Final

from rich.console import Console
from rich.highlighter import JSONHighlighter
from rich.text import Text
from typer import Argument, Option

from lazyshard.cli import exits, output
from lazyshard.errors import ChunkMissing, ChunkRetired
from lazyshard.inspection import inspection
from lazyshard.inspection.row_facts import Lengths
from lazyshard.inspection.survey import tolerate
from lazyshard.inspection.thumbnails import images_in, thumbnail
from lazyshard.stream.cursor import list_consumers
from lazyshard.stream.stream import Stream, open_now

_LENGTHS: Final = {
    "row_bytes": "row length in bytes",
    "row_arrays_bytes": "arrays of a row in bytes",
    "row_tokens": "row length in tokens",
}


def command(
    stream: output.StreamArgument,
    sample: Annotated[int | None, Argument(metavar="N", min=0, help="The sample to show, counted from 0.")] = None,
    chunk: Annotated[int | None, Option(metavar="K", min=0, help="Show this chunk: its seal and first rows.")] = None,
    rows: Annotated[int | None, Option(metavar="M", min=0, help="Rows to show. Default: 1, with --chunk 3.")] = None,
    full: Annotated[bool, Option("--full", help="Do not shorten values.")] = False,
    every: Annotated[bool, Option("--all", help="Overview: read the seals of all chunks, not of some.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object on one line, with whole rows.")] = False,
    samples_per_chunk: output.SamplesPerChunkOption = None,
) -> int:
    """Shows an overview of a stream (facts, row lengths, keys) or some of its rows.

    Without N or --chunk: the overview. Lengths are taken from the seals, so only the first rows are read; in a stream
    of many chunks, evenly spaced chunks are examined. It ends with advice on chunk size, lengths and shuffling. With N:
    that sample; on a terminal with colours with thumbnails of its images, for which Pillow is needed.

    Changes nothing and does not wait: for a stream that is still being written it shows the published part.

    Examples:
        lazyshard inspect /shared/stream
        lazyshard inspect /shared/stream 123456
        lazyshard inspect /shared/stream 0 --rows 5 --full
        lazyshard inspect /shared/stream --chunk 17
        lazyshard inspect /shared/stream --all --json | jq .advice

    Exit codes:
        0  shown
        2  usage error; no such directory, sample or chunk
        3  a row is not a JSON object, or file names in the directory contradict each other
        5  no stream in the directory, a later format, or what was requested is damaged or deleted
        7  the filesystem or store failed: no permission, no answer
    """
    directory, whole = output.find_stream(stream), sample is None and chunk is None
    output.refuse_if(sample is not None and chunk is not None, "--chunk", "give either N or --chunk")
    output.refuse_if(rows is not None and whole, "--rows", "can only be used with N or --chunk")
    output.refuse_if(every and not whole, "--all", "cannot be used with N or --chunk")
    shown = rows if rows is not None else 1 if chunk is None else 3
    if chunk is not None:
        lines = _chunk_page(open_now(directory, samples_per_chunk), chunk, shown, full, as_json)
    elif sample is not None:
        lines = _row_page(open_now(directory, samples_per_chunk), sample, shown, full, as_json)
    else:
        lines = _overview_page(directory, samples_per_chunk, every, as_json)
    console, colour = Console(), JSONHighlighter()
    for line in lines:
        if isinstance(line, bytes):
            show_image(console, line)
        # A program may read the output of --json through a terminal, too: `ssh -t`, FORCE_COLOR.
        elif console.is_terminal and not as_json:
            console.print(colour(output.one_line(line)), soft_wrap=True)
        else:
            output.say(line)
    return exits.DONE


def _overview_page(directory: Path, samples_per_chunk: int | None, every: bool, as_json: bool) -> Iterator[str]:
    found = inspection.overview(directory, samples_per_chunk, every=every)
    consumers = tolerate(lambda: list_consumers(directory, found.published.chunks), []) or ()
    advice = inspection.advise(found, inspection.training_of(consumers, found.samples_per_chunk))
    values, head, gap = _overview_values(found, advice), found.published.head, found.published.gap
    if as_json:
        yield json.dumps(values)
        return
    values["state"] = head and (f"{head.state}: {head.note}" if head.note else head.state)
    values["gap"] = None if gap is None else f"chunk {gap:,} lacks its data or its marker: later ones do not count"
    yield from _value_lines(values)
    if found.unread:
        yield ""
        yield f"{output.count(found.unread, 'chunk')} could not be read, run `lazyshard verify`: {found.reason}"
    yield from _titled("what to change", [line for one in advice for line in (f"  {one.text}", f"    {one.setting}")])


def _chunk_page(stream: Stream, number: int, rows: int, full: bool, as_json: bool) -> Iterator[str | bytes]:
    chunks = stream.published().chunks
    output.refuse_if(number >= chunks, "--chunk", f"no chunk {number}: {_published(chunks, 'chunk')}")
    with _deletion_reported(stream, number):
        values = _chunk_values(inspection.describe_chunk(stream, number))
        found = inspection.read_rows(stream, number, 0, rows)
        if as_json:
            yield f'{json.dumps(values)[:-1]}, "rows": [{", ".join(map(row_text, found))}]}}'
            return
        yield from _value_lines(values)
        if values["source"] is not None:
            yield from _titled("source position after it", output.pretty(values["source"], full=full))
        for row in found:
            yield from ("", *_row_lines(row, full))


def _row_page(stream: Stream, sample: int, rows: int, full: bool, as_json: bool) -> Iterator[str | bytes]:
    samples = stream.published().samples
    output.refuse_if(sample >= samples, "N", f"no sample {sample}: {_published(samples, 'sample')}")
    found = _rows_from(stream, sample, min(sample + rows, samples))
    if as_json:
        yield f'{{"rows": [{", ".join(map(row_text, found))}]}}'
        return
    for row in found:
        yield from ([""] if row.sample > sample else [])
        yield from _row_lines(row, full)


def _published(number: int, noun: str) -> str:
    return f"{output.count(number, noun)} published, from 0 to {number - 1:,}" if number else "none published"


def _rows_from(stream: Stream, sample: int, stop: int) -> Iterator[inspection.ShownRow]:
    while sample < stop:
        number, first = divmod(sample, stream.samples_per_chunk)
        with _deletion_reported(stream, number):
            yield from inspection.read_rows(stream, number, first, stop - sample)
        sample = (number + 1) * stream.samples_per_chunk


@contextlib.contextmanager
def _deletion_reported(stream: Stream, number: int) -> Iterator[None]:
    """Raises ChunkRetired if a published chunk is missing because the producer deleted it, else ChunkMissing."""
    try:
        yield
    except (ChunkMissing, ChunkRetired):
        raise
    except FileNotFoundError as error:
        place: dict[str, Any] = {"file": error.filename, "chunk": number}
        if number < (retired := stream.retired()):
            why = f"was deleted by the stream's producer, like all chunks below {retired}"
            raise ChunkRetired(f"{stream.directory}: chunk {number} {why}", **place, chunks_before=retired) from error
        why = "is published, but this file is missing; on a network filesystem it may not be visible yet"
        raise ChunkMissing(f"{error.filename}: chunk {number} {why}", **place) from error


def _row_lines(row: inspection.ShownRow, full: bool) -> Iterator[str | bytes]:
    """Yields a row as text, then its images."""
    arrays = "" if row.arrays is None else f" and {output.count(row.arrays, 'byte')} of arrays"
    tokens = "" if row.tokens is None else f", {output.count(row.tokens, 'token')}"
    where = f"sample {row.sample:,}: chunk {row.chunk:,}, row {row.row:,} (byte {row.byte:,})"
    yield f"{where}, {output.count(len(row.line), 'byte')}{arrays}{tokens}"
    yield from output.pretty(row.value, row.line, full=full)
    yield from images_in(row.value)


def show_image(console: Console, data: bytes) -> None:
    """Prints a thumbnail, or why there is none; nothing where colours or half blocks cannot be shown."""
    if console.color_system is None or console.no_color or console.options.ascii_only:
        return
    made = thumbnail(data, min(48, console.width))
    lines = [Text(output.one_line(made))] if isinstance(made, str) else half_blocks(made.tobytes(), made.width)
    console.print("", *lines, sep="\n", soft_wrap=True)


def half_blocks(pixels: bytes, width: int) -> Iterator[Text]:
    """Yields the lines of an image of 3 bytes per pixel: each character shows a pixel and the one below it."""
    colours = [f"#{pixel}" for pixel in pixels.hex(" ", 3).split()]
    rows = [colours[at : at + width] for at in range(0, len(colours), width)]
    for upper, lower in zip_longest(rows[::2], rows[1::2], fillvalue=["default"] * width):
        yield Text.assemble(*(("▀", f"{one} on {other}") for one, other in zip(upper, lower, strict=True)))


def _titled(title: str, lines: Sequence[str]) -> list[str]:
    """Returns lines under a heading, or nothing if there are no lines."""
    return ["", title, *lines] if lines else []


def _value_lines(values: dict[str, Any]) -> Iterator[str]:
    """Yields the values of --json for a stream or a chunk as text: first the plain values, then lengths and keys."""
    yield str(values.get("stream") or values["file"])
    apart = {*_LENGTHS, "stream", "file", "encoding", "keys", "source", "advice"}
    yield from output.facts({name: value for name, value in values.items() if name not in apart})
    encoding = values.get("encoding") or {}
    texts = {name: fact if type(fact) is str else json.dumps(fact) for name, fact in encoding.items()}
    # A system prompt may be pages long; --json shows all of it.
    cut = {name: text if len(text) <= 100 else f"{text[:97]}..." for name, text in texts.items()}
    yield from _titled("encoded with", output.table(cut))
    for name, title in _LENGTHS.items():
        yield from _titled(title, _distribution(values.get(name)))
    if keys := values.get("keys", {}).get("by_name"):
        shown = islice(keys.items(), output.MAX_KEYS)
        lines = output.table({key: f"{one['rows']:,}  {' or '.join(one['kinds'])}" for key, one in shown})
        more = len(keys) - output.MAX_KEYS
        lines += [f"  and {more:,} more; --json lists them all"] if more > 0 else []
        yield from _titled(f"keys at the top level, in the first {output.count(values['keys']['rows'], 'row')}", lines)


def _distribution(values: dict[str, Any] | None) -> list[str]:
    """Returns a line of statistics and a bar for each bin, or nothing without values."""
    if values is None:
        return []
    lines = ["  " + "  ".join(f"{name} {value:,.0f}" for name, value in values.items() if name != "bins")]
    bins = [(f"{low:,}" if high == low + 1 else f"{low:,} to {high - 1:,}", rows) for low, high, rows in values["bins"]]
    width, most = max(len(label) for label, _ in bins), max(rows for _, rows in bins)
    # Every nonempty bin has a bar of at least one character.
    lines += [f"  {label:>{width}}  {rows:>{len(f'{most:,}')},}  {'#' * -(-rows * 40 // most)}" for label, rows in bins]
    return [line.rstrip() for line in lines]


def _overview_values(found: inspection.Overview, advice: Sequence[inspection.Advice]) -> dict[str, Any]:
    manifest, head, rows, dealt, keys = found.manifest, found.published.head, found.source_rows, found.dealt, found.keys
    by_name = {key: {"rows": kinds.total(), "kinds": list(kinds)} for key, kinds in keys.kinds.items()}
    packs = {"tokens": rows and rows.pack, "looked_at": found.packs, "rows": found.packed} if found.packs else None
    encoding = None if manifest is None or manifest.encoding is None else dict(manifest.encoding)
    arrays = {"row_arrays_bytes": _length_values(found.arrays)} if found.arrays.count else {}
    return {
        "stream": str(found.directory),
        "stream_id": manifest and manifest.stream_id,
        "samples_per_chunk": found.samples_per_chunk,
        "retired": found.retired,
        "chunks": found.published.chunks,
        "samples": found.published.samples,
        "bytes": found.size,
        "bytes_exact": found.complete,
        "begun_at": manifest and manifest.created_at,
        "last_sealed_at": found.last_sealed_at,
        "ended": found.published.ended,
        "state": head and head.state,
        "looked_at": found.looked_at,
        "unread": found.unread,
        **_lengths(found.lengths, found.tokens),
        **({"patches": found.patches} if found.patches else {}),
        **arrays,
        "encoding": encoding,
        "packs": packs,
        "keys": {"rows": keys.rows, "by_name": by_name},
        "source_rows": rows and {"read": rows.read, "refused": rows.refused, "exact": rows.exact},
        "dealt": dealt and {"ranks": dealt.ranks, "micro_batch_size": dealt.micro_batch_size},
        "advice": [one._asdict() for one in advice],
    }


def _chunk_values(shown: inspection.ShownChunk) -> dict[str, Any]:
    lengths = Lengths(shown.lengths)
    values: dict[str, Any] = {"file": str(shown.file), "chunk": shown.number, "first_sample": shown.first}
    values |= {"samples": len(shown.lengths), "bytes": lengths.total}
    values |= {} if shown.arrays is None else {"arrays_bytes": shown.arrays}
    values |= {"sealed_at": shown.seal and shown.seal.sealed_at, "source": shown.seal and shown.seal.source}
    return values | _lengths(lengths, Lengths(shown.tokens))


def row_text(row: inspection.ShownRow, values: dict[str, Any] | None = None) -> str:
    """Returns a row after its place, or other `values`, as ASCII JSON.

    Copies the row's text unparsed, so numbers keep their digits.
    """
    where = values or {"sample": row.sample, "chunk": row.chunk, "row": row.row}
    where = {**where, "byte": row.byte, "bytes": len(row.line)}
    where |= {} if row.arrays is None else {"arrays_bytes": row.arrays}
    # Outside of strings these characters are white space, and strings cannot hold them.
    text = row.line.decode().strip().translate(dict.fromkeys(b"\t\r\n", " "))
    value = re.sub(r"[^\x20-\x7e]+", lambda found: json.dumps(found[0])[1:-1], text)
    return f'{json.dumps(where | {"tokens": row.tokens})[:-1]}, "value": {value}}}'


def _lengths(lengths: Lengths, tokens: Lengths) -> dict[str, Any]:
    most = {"sum": tokens.total, "p90": tokens.quantile(0.9), "p99": tokens.quantile(0.99)} if tokens.count else {}
    in_tokens = _length_values(tokens)
    return {"row_bytes": _length_values(lengths), "row_tokens": in_tokens and most | in_tokens}


def _length_values(lengths: Lengths) -> dict[str, Any] | None:
    if not lengths.count:
        return None
    figures = {name: lengths.quantile(share) for name, share in (("p5", 0.05), ("median", 0.5), ("p95", 0.95))}
    ends = {"max": lengths.largest, "mean": round(lengths.mean, 3)}
    bins = [[one.low, one.high, one.count] for one in lengths.histogram()]
    return {"rows": lengths.count, "min": lengths.smallest} | figures | ends | {"bins": bins}
