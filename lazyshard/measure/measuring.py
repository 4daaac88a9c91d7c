"""Measures the chunks of a stream whose lengths are not known, and keeps what is found in a file beside each seal.

Each chunk's file is durable before the next one is begun to be written, so whoever kills this process loses the chunks
that are under way, and the same call goes on with them. A producer at work, readers and runs are not disturbed: sealed
files stay as they are, and what is published later is measured by a later call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from lazyshard.errors import ChunkMissing, MeasureRefused, StreamMismatch, TokensInvalid
from lazyshard.format import Seal, Tokens, seal_digest
from lazyshard.format.fields import printable
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.measure.measures import Measure
from lazyshard.measure.pool import Answer, Piece, Pool, pieces_of
from lazyshard.store.files import read_file
from lazyshard.store.urls import UrlPath
from lazyshard.stream.opening import open_now
from lazyshard.stream.stream import Stream
from lazyshard.stream.token_lengths import measured_tokens, measuring, write_tokens

PIECE_ROWS: Final = 500
"""Rows that a process is given at a time: some tenths of a second with a tokenizer, some seconds with images."""

Report = Callable[[str, int, int], None]
"""Called with what is done, how many chunks of it are done, and how many there are."""


@dataclass(slots=True)
class Measured:
    """What was done.

    Attributes:
        text: the measure, as it stands in the files; empty where nothing was to do.
        chunks: published chunks that are there.
        samples: rows in them.
        ended: whether the stream has ended.
        known: chunks whose lengths were known already.
        measured: chunks measured by this call.
        rows: rows in those.
        tokens: tokens in those.
        dropped: rows of which no sample is made; their length is 0.
        bad: rows that cannot be measured; their length is 0.
        why: why the first of those cannot.
    """

    text: str
    chunks: int
    samples: int
    ended: bool
    known: int = 0
    measured: int = 0
    rows: int = 0
    tokens: int = 0
    dropped: int = 0
    bad: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk, its rows, the digest of its seal, and how it was measured; None: not at all, "": the seal has it.

    `bad` are rows that could not be measured, and were counted as 0.
    """

    number: int
    rows: int
    digest: str
    measure: str | None
    bad: int


def measure_stream(
    directory: Path,
    measure: Measure,
    *,
    workers: int = 1,
    replace: bool = False,
    zero: bool = False,
    report: Report = lambda phase, done, total: None,
    clock: Callable[[], float] = time.time,
) -> Measured:
    """Measures the rows of every published chunk whose lengths are not known.

    Args:
        directory: the stream's directory.
        measure: how a row is measured.
        workers: how many processes measure.
        replace: whether chunks that were measured in another way, or sealed with lengths, are measured too.
        zero: whether a row that cannot be measured counts as 0 tokens; otherwise it ends the call, in a chunk too of
            which another call has counted some as 0.
        report: is told how far it is.
        clock: returns seconds since 1970.

    Raises:
        MeasureRefused: it is no stream of ours in a directory; some chunks were measured in another way; the measure
            cannot be used; or a row cannot be measured. What was measured before stays.
        MeasureLocked: another process on this machine is measuring it.
        StreamMissing, StreamMismatch: there is no stream; another one took its place.
        ChunkCorrupt, SealInvalid, FormatInvalid: the stream is damaged.
        ChildProcessError: a process has ended.
        OSError: the filesystem refused.
    """
    if isinstance(directory, UrlPath):
        raise MeasureRefused(
            f"{directory}: lengths are measured in a directory alone, not in an object store; give them to the "
            f"producer, with `ChunkWriter.write(row, tokens=N)`",
            directory=str(directory),
        )
    stream = open_now(directory)
    if stream.stream_id is None:
        raise MeasureRefused(
            f"{directory}: another program fills it, so there are no seals by which lengths could be told to be those "
            f"of its chunks; make a stream of it with `lazyshard adopt`, or a copy with `lazyshard rechunk`",
            directory=str(directory),
        )
    with measuring(directory), Pool(stream, measure, zero=zero) as pool:
        done, chunks = _find(stream, report)
        if replace or any(chunk.measure != "" for chunk in chunks):
            pool.grow(1)
            done.text = pool.text
        _check_alike(directory, chunks, pool.text, replace)
        left = [
            chunk
            for chunk in chunks
            # Rows that another call has counted as 0 are looked at again: they may end this one.
            if chunk.measure is None or (chunk.bad and not zero) or (replace and chunk.measure != pool.text)
        ]
        done.known = len(chunks) - len(left)
        if left:
            pool.grow(min(workers, sum(-(-chunk.rows // PIECE_ROWS) for chunk in left)))
            report("measuring", 0, len(left))
            for number, (chunk, lengths, bad) in enumerate(_measured(stream, pool, left, done), 1):
                _keep(stream, Tokens(chunk.number, chunk.digest, lengths, pool.text, clock(), bad), done)
                report("measuring", number, len(left))
    return done


def _find(stream: Stream, report: Report) -> tuple[Measured, list[_Chunk]]:
    """Looks which chunks are there, and which of them are measured."""
    published = stream.published()
    retired = min(stream.retired(), published.chunks)
    done = Measured("", published.chunks - retired, 0, published.ended)
    chunks = []
    for number in range(retired, published.chunks):
        report("looking", number - retired, done.chunks)
        path = stream.directory / seal_name(number)
        try:
            data = read_file(path)
        except FileNotFoundError:
            if number < stream.retired():
                # Deleted since.
                continue
            raise
        seal = Seal.decode(data, number, str(path))
        digest = seal_digest(data)
        measure, bad = None if seal.tokens is None else "", 0
        # One that cannot be used is measured anew.
        with contextlib.suppress(TokensInvalid):
            tokens = measured_tokens(stream.directory, number, digest, seal.samples)
            if tokens is not None:
                measure, bad = tokens.measure, tokens.bad
        chunks.append(_Chunk(number, seal.samples, digest, measure, bad))
        done.samples += seal.samples
    done.chunks = len(chunks)
    return done, chunks


def _check_alike(directory: Path, chunks: list[_Chunk], text: str, replace: bool) -> None:
    others = (
        {} if replace else {chunk.measure: chunk.number for chunk in chunks if chunk.measure not in (None, "", text)}
    )
    for other, number in others.items():
        raise MeasureRefused(
            f"{directory}: chunk {number} was measured by {printable(other)}, this is {text}; measure by that again, "
            f"or all of them by this with --replace",
            directory=str(directory),
            chunk=number,
        )


def _measured(
    stream: Stream, pool: Pool, chunks: list[_Chunk], done: Measured
) -> Iterator[tuple[_Chunk, npt.NDArray[np.uint32], int]]:
    """Yields the lengths of each chunk's rows, and how many of them are bad, in the order in which they are found."""
    by_number = {chunk.number: chunk for chunk in chunks}
    under_way: dict[int, tuple[npt.NDArray[np.uint32], int, int]] = {}

    def pieces() -> Iterator[Piece]:
        for chunk in chunks:
            under_way[chunk.number] = np.zeros(chunk.rows, np.uint32), 0, 0
            yield from pieces_of(chunk.number, chunk.rows, PIECE_ROWS)

    for answer in pool.measure(pieces()):
        piece = answer.piece
        if answer.lengths is None:
            if piece.chunk >= stream.retired():
                path = stream.directory / chunk_name(piece.chunk)
                raise ChunkMissing(
                    f"{path}: published, but this file, or its seal, is not there; `lazyshard verify` looks for more",
                    file=str(path),
                    chunk=piece.chunk,
                )
            continue
        lengths, rows, bad = under_way[piece.chunk]
        lengths[piece.first : piece.stop] = answer.lengths
        rows, bad = rows + piece.stop - piece.first, bad + answer.bad
        under_way[piece.chunk] = lengths, rows, bad
        _count(done, answer)
        if rows == len(lengths):
            del under_way[piece.chunk]
            yield by_number[piece.chunk], lengths, bad


def _count(done: Measured, answer: Answer) -> None:
    done.dropped += answer.dropped
    done.bad += answer.bad
    done.why = done.why or answer.why


def _keep(stream: Stream, tokens: Tokens, done: Measured) -> None:
    """Writes the lengths of a chunk, if it is still the one that was measured."""
    stream.check_identity()
    try:
        digest = seal_digest(read_file(stream.directory / seal_name(tokens.chunk)))
    except FileNotFoundError:
        if tokens.chunk < stream.retired():
            return
        raise
    if digest != tokens.seal:
        raise StreamMismatch(
            f"{stream.directory}: chunk {tokens.chunk} was made anew while it was measured; run the same command again",
            directory=str(stream.directory),
            expected=tokens.seal,
            actual=digest,
        )
    assert stream.stream_id is not None
    if write_tokens(stream.directory, tokens, stream.stream_id):
        done.measured += 1
        done.rows += len(tokens.lengths)
        done.tokens += int(tokens.lengths.sum(dtype=np.uint64))
