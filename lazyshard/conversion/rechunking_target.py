"""Where a rechunked stream goes: what may be there already, and whether it is a copy of the same stream."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lazyshard.conversion.rechunking_rows import SourceRows
from lazyshard.errors import StreamMismatch
from lazyshard.format import Seal
from lazyshard.format.names import seal_name
from lazyshard.store.files import read_file
from lazyshard.stream.manifest import read_manifest
from lazyshard.stream.native_stream import NativeStream

KIND: Final = "rechunk"


@dataclass(frozen=True, slots=True)
class Target:
    """What is in the new directory.

    Attributes:
        chunks: chunks published.
        samples: rows in them.
        ended: nothing can be added.
    """

    chunks: int
    samples: int
    ended: bool


def position(stream_id: str | None, samples: int) -> dict[str, Any]:
    """Returns what a seal of the new stream says of how far the old one is copied."""
    return {"kind": KIND, "stream_id": stream_id, "samples": samples}


def check_directories(source: Path, target: Path) -> None:
    """Refuses to write into what is read.

    Raises:
        ValueError: the new directory is the old one or lies in it.
    """
    real, inner = (os.path.realpath(path) for path in (source, target))
    if os.path.commonpath((real, inner)) == real:
        raise ValueError(f"{target}: is the directory of the stream itself, or lies in it; choose another one")


def look_at_target(target: Path, samples_per_chunk: int, rows: SourceRows) -> Target:
    """Returns what is there, if it can be gone on with. Changes nothing.

    Raises:
        StreamMismatch: it is no copy of this stream, or has another samples_per_chunk.
        LazyShardError, OSError: a file of it cannot be used.
    """
    manifest = read_manifest(target, samples_per_chunk)
    if manifest is None:
        return Target(0, 0, ended=False)
    published = NativeStream(target, manifest).published()
    found = Target(published.chunks, published.samples, published.ended)
    if found.chunks:
        path = target / seal_name(found.chunks - 1)
        seal = Seal.decode(read_file(path), found.chunks - 1, str(path))
        check_position(target, seal.source, found.samples, rows)
        _check_last_row(target, found.samples - 1, int(seal.digests[-1]), rows)
    return found


def check_position(target: Path, source: Any, samples: int, rows: SourceRows) -> None:
    """Compares what the last seal says with what it must say.

    Raises:
        StreamMismatch: it says otherwise.
    """
    wanted = position(rows.reader.stream_id, samples)
    if source == wanted:
        return
    of_ours = isinstance(source, dict) and source.get("kind") == KIND
    what = f"a copy of stream {source.get('stream_id')}" if of_ours else "one not made by `lazyshard rechunk`"
    if of_ours and source.get("stream_id") == wanted["stream_id"]:
        what = f"a copy of {source.get('samples')} rows in {samples}"
    raise _mismatch(target, f"a copy of {_called(rows)}", what)


def _check_last_row(target: Path, sample: int, digest: int, rows: SourceRows) -> None:
    reader = rows.reader
    if sample >= reader.seen.samples:
        raise _mismatch(target, f"at most the {reader.seen.samples} rows of {_called(rows)}", f"{sample + 1} rows")
    if rows.is_deleted(sample):
        return
    found = rows.digest(sample)
    if found != digest:
        expected = f"row {sample} as in {_called(rows)} (XXH3 {found:016x})"
        raise _mismatch(target, expected, f"another row (XXH3 {digest:016x})")


def _called(rows: SourceRows) -> str:
    reader = rows.reader
    return str(reader.directory) if reader.stream_id is None else f"stream {reader.stream_id}"


def _mismatch(target: Path, expected: str, found: str) -> StreamMismatch:
    return StreamMismatch(
        f"{target}: expected {expected}, found {found}; choose another directory",
        directory=str(target),
        expected=expected,
        actual=found,
    )
