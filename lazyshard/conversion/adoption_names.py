"""What adoption checks by names and markers: are they those of a stream, does a marker or an end say otherwise.

Nothing is changed, and no data file is opened.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any, Final

import orjson

from lazyshard.errors import EndInvalid, SealInvalid, StreamInvalid
from lazyshard.format import End, Seal
from lazyshard.format.names import (
    END,
    HEAD,
    MANIFEST,
    OWNER,
    SEAL_SUFFIX,
    TEMPORARY,
    chunk_name,
    parse_arrays_name,
    parse_chunk_name,
    seal_name,
)
from lazyshard.memory import loads
from lazyshard.store.files import read_file
from lazyshard.stream.listing import Listing, list_chunks
from lazyshard.stream.lock import is_workplace

_CHUNK_LIKE: Final = re.compile(r"(?s:chunk_([0-9]{0,255}).*)")

_TEMPORARY_NAME: Final = re.compile(r"(.+)\.[0-9a-f]{16}")
"""A file that a writer of ours left in `.tmp`: what it was to become, and the writer's token."""


def check_names(directory: Path, listing: Listing, names: list[str]) -> None:
    """Refuses names of which nothing tells whether rows would be left out or something else lost.

    Args:
        directory: the directory.
        listing: its chunks and markers.
        names: all names in it.
    """
    if HEAD in names:
        raise refuse(
            directory,
            f"{directory}: there is {HEAD}, but no {MANIFEST}: a stream that has lost it? Restore {MANIFEST} from a "
            f"copy, or remove {HEAD} to make a new stream of what is there",
        )
    for name in sorted(names):
        if parse_arrays_name(name) is not None:
            raise refuse(
                directory,
                f"{directory / name}: holds the arrays of rows, which only a stream of ours has; restore its "
                f"{MANIFEST} from a copy. If the file is something else, move it out of the directory",
            )
        if _may_hold_rows(name, listing):
            raise refuse(
                directory,
                f"{directory / name}: not the name of a chunk, which is {chunk_name(0)} and so on; rename or unpack "
                f"it, or move it out of the directory if it is no part of the stream",
            )
    temporary = directory / TEMPORARY
    left = sorted(os.listdir(temporary)) if temporary.is_dir() else []
    for name in left:
        if not is_temporary(name) and not is_workplace(name):
            raise refuse(
                directory,
                f"{temporary / name}: made by another program, but a stream clears its {TEMPORARY}; stop that program "
                f"if it is running, and move the file elsewhere",
            )


def _may_hold_rows(name: str, listing: Listing) -> bool:
    """Whether adopting would leave out in silence what looks like a chunk: `chunk_a.jsonl`, `chunk_00007.jsonl.gz`."""
    found = _CHUNK_LIKE.fullmatch(name)
    if found is None or parse_chunk_name(name) is not None:
        return False
    return name.endswith(".jsonl") or (found[1] != "" and int(found[1]) not in listing.data)


def is_temporary(name: str) -> bool:
    """Whether a name in `.tmp` is one that a writer of an older version of ours gave."""
    found = _TEMPORARY_NAME.fullmatch(name)
    if found is None:
        return False
    ours = parse_chunk_name(found[1]) is not None or parse_arrays_name(found[1]) is not None
    return ours or found[1] in (MANIFEST, HEAD, END, OWNER)


def check_numbers(directory: Path, listing: Listing) -> None:
    """Refuses chunks that are not numbered from 0 on without a gap, or are named otherwise than a stream names them."""
    if not listing.data:
        raise refuse(directory, f"{directory}: no {chunk_name(0)} or any other chunk_*.jsonl in it, nothing to adopt")
    others = [(name, chunk_name(chunk)) for chunk, name in listing.data.items()]
    others += [(name, seal_name(chunk)) for chunk, name in listing.seals.items()]
    others = sorted((name, canonical) for name, canonical in others if name != canonical)
    if others:
        name, canonical = others[0]
        source, target = (shlex.quote(str(directory / part)) for part in (name, canonical))
        more = f", and the same for {len(others) - 1} more" if len(others) > 1 else ""
        raise refuse(
            directory,
            f"{directory / name}: chunk numbers have five digits or more; rename it: `mv {source} {target}`{more}",
        )
    chunks = len(listing.data)
    missing = next((chunk for chunk in range(chunks) if chunk not in listing.data), None)
    if missing is not None:
        later = min(chunk for chunk in listing.data if chunk > missing)
        way = "restore it" if missing else "number the chunks from 0 on, or restore it"
        raise refuse(
            directory,
            f"{directory / chunk_name(missing)}: missing although {chunk_name(later)} is there; {way}",
            missing,
        )
    alone = min((chunk for chunk in listing.seals if chunk not in listing.data), default=None)
    if alone is not None:
        raise refuse(
            directory,
            f"{directory / seal_name(alone)}: a marker without {chunk_name(alone)}; restore the data file, or remove "
            f"the marker",
            alone,
        )


def check_markers(directory: Path, listing: Listing) -> None:
    """Refuses a directory in which some chunks are marked complete and others are not.

    A run that was killed leaves such a one too, but then all the markers are seals, of the first chunks.
    """
    unmarked = min((chunk for chunk in listing.data if chunk not in listing.seals), default=None)
    if unmarked is None or not listing.seals:
        return
    if listing.sealed == len(listing.seals) and all(read_seal(directory, chunk) for chunk in listing.seals):
        return
    path = directory / chunk_name(unmarked)
    marker = shlex.quote(str(directory / seal_name(unmarked)))
    raise refuse(
        directory,
        f"{path}: has no {SEAL_SUFFIX} marker although other chunks have: is it still being written? When it is "
        f"complete, mark it: `touch {marker}`; or move it out of the directory",
        unmarked,
    )


def check_names_unchanged(directory: Path, before: Listing) -> None:
    """Refuses a directory in which chunks or markers are others than before."""
    now = list_chunks(directory)
    if (now.data, now.seals) == (before.data, before.seals):
        return
    changed = dict(before.data.items() ^ now.data.items()) | dict(before.seals.items() ^ now.seals.items())
    chunk = min(changed)
    raise refuse(
        directory,
        f"{directory / changed[chunk]}: appeared or went while the directory was being adopted; stop the program that "
        f"writes to it, and run the same command again",
        chunk,
    )


def read_end(directory: Path, end: bool) -> End | None:
    """Returns the end that a run before this one has written, None where there is none of ours."""
    path = directory / END
    try:
        data = read_file(path)
    except FileNotFoundError:
        return None
    if not end:
        raise refuse(
            directory,
            f"{path}: says that the stream has ended, so it cannot stay open; remove the file if rows are to follow, "
            f"or leave out --no-end",
        )
    try:
        return End.decode(data, str(path))
    except EndInvalid:
        if _is_ours(data):
            raise
        return None


def read_seal(directory: Path, chunk: int) -> Seal | None:
    """Returns a chunk's seal, None where it has no marker or another program's."""
    path = directory / seal_name(chunk)
    try:
        data = read_file(path)
    except FileNotFoundError:
        return None
    try:
        return Seal.decode(data, chunk, str(path))
    except SealInvalid:
        if _is_ours(data):
            raise
        return None


def _is_ours(data: bytes) -> bool:
    """Whether a file that cannot be decoded is at least meant to be in our format: never to be overwritten."""
    try:
        values: Any = loads(data)
    except orjson.JSONDecodeError:
        return False
    return isinstance(values, dict) and "format" in values


def refuse(directory: Path, message: str, chunk: int | None = None) -> StreamInvalid:
    """Returns the error that refuses a directory."""
    return StreamInvalid(message, directory=str(directory), chunk=chunk)
