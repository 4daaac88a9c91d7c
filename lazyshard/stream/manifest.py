"""The manifest of a directory, compared with what a caller asks for: one look for producers and readers."""

from __future__ import annotations

import shlex
from pathlib import Path

from lazyshard.errors import FileInvalid, StreamInvalid, StreamMismatch, StreamMissing
from lazyshard.format.names import MANIFEST
from lazyshard.format.records import Encoding, Manifest, check_samples_per_chunk, differences
from lazyshard.store.files import read_file


def read_manifest(directory: Path, samples_per_chunk: int | None) -> Manifest | None:
    """Returns a stream's manifest, None where there is none; the directory may not be there.

    Raises:
        StreamMismatch: the stream has another number of samples per chunk than the caller asks for, if not None.
        FileInvalid, VersionUnsupported, OSError: the manifest cannot be used or read.
        ValueError: samples_per_chunk is impossible.
    """
    if samples_per_chunk is not None:
        check_samples_per_chunk(samples_per_chunk)
    path = directory / MANIFEST
    try:
        manifest = Manifest.decode(read_file(path), str(path))
    except FileNotFoundError:
        return None
    except FileInvalid as error:
        error.args = (f"{error}; restore it from a copy",)
        raise
    if samples_per_chunk not in (None, manifest.samples_per_chunk):
        raise StreamMismatch(
            f"{directory}: the stream has {manifest.samples_per_chunk} samples per chunk, asked for "
            f"{samples_per_chunk}; that never changes. Use {manifest.samples_per_chunk}, or another directory",
            directory=str(directory),
            expected=str(samples_per_chunk),
            actual=str(manifest.samples_per_chunk),
        )
    return manifest


def stream_missing(directory: Path) -> StreamMissing:
    """Returns the error of a directory that is none of a stream, and none at all maybe."""
    return StreamMissing(
        f"{directory}: there is no stream: neither {MANIFEST} nor any chunk file; see whether the path is right, and "
        f"start its producer",
        directory=str(directory),
    )


def how_to_mark(directory: Path) -> str:
    """Returns in words what to do with chunk files that have no markers."""
    files = shlex.quote(f"{directory}/chunk_*.jsonl")
    return (
        f"a producer makes an empty marker when its chunk is complete (`touch chunk_00000.jsonl.completed`); if nobody "
        f"writes to them any more, make a stream of their rows: `lazyshard-producer run --source {files} --out NEW "
        f"--samples-per-chunk N`"
    )


def manifest_lost(directory: Path, beside: str) -> StreamInvalid:
    """Returns the error of a stream without its manifest; by the file `beside` it is known for one of ours."""
    return StreamInvalid(
        f"{directory}: there are chunks and {beside}, but {MANIFEST} is missing; restore it from a copy",
        directory=str(directory),
    )


def check_arrays(directory: Path, manifest: Manifest, arrays: bool) -> None:
    """Compares whether rows may hold arrays. Raises StreamMismatch: the stream was made otherwise."""
    if manifest.arrays == arrays:
        return
    made = "to hold arrays" if manifest.arrays else "without arrays"
    way = "open it with arrays=True" if manifest.arrays else "leave out arrays=True, or take another directory"
    raise StreamMismatch(
        f"{directory}: the stream was made {made}, and that never changes; {way}",
        directory=str(directory),
        expected=f"arrays={arrays}",
        actual=f"arrays={manifest.arrays}",
    )


def check_same_encoding(directory: Path, manifest: Manifest, encoding: Encoding | None) -> None:
    """Compares what rows are encoded with. Raises StreamMismatch, naming what differs."""
    was = manifest.encoding
    if was is not None and encoding is not None:
        found = differences(was, encoding)
        if not found:
            return
        what = "its rows are encoded otherwise: " + "; ".join(found)
    elif was is not None:
        what = "its rows are encoded, and those that are to come are not"
    elif encoding is not None:
        what = "its rows are not encoded, and those that are to come are"
    else:
        return
    raise StreamMismatch(
        f"{directory}: {what}. That never changes for a stream: go on with the encoding of before, or take another "
        f"directory",
        directory=str(directory),
        expected=_named(encoding),
        actual=_named(was),
    )


def _named(encoding: Encoding | None) -> str:
    return "none" if encoding is None else ", ".join(f"{name}={value}" for name, value in encoding.items())[:1000]
