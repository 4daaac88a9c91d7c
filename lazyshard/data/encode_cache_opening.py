"""Opening the cache of encoded samples for a data set: its place, its size, and by what its samples are known."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lazyshard.data.encode import EncodeFn
from lazyshard.data.encode_cache import EncodeCache
from lazyshard.data.steps import RowSteps, Step
from lazyshard.errors import redact
from lazyshard.format.byte_size import parse_size
from lazyshard.format.encoding import Fact, check_encoding
from lazyshard.format.kept_sample import LEAST_CACHE_BYTES
from lazyshard.store.urls import is_url
from lazyshard.stream import StreamReader

__all__ = ["ENCODE_CACHE_BYTES", "cache_place", "open_encode_cache"]

ENCODE_CACHE_BYTES: Final = 16 << 30
"""What a machine can spare that trains; 100 million tokens and their labels take 1 GB."""


def open_encode_cache(
    reader: StreamReader,
    directory: str | os.PathLike[str] | None,
    most: int | str | None,
    fingerprint: Mapping[str, Fact] | None,
    encode_fn: EncodeFn | None,
    pipeline: RowSteps,
) -> EncodeCache | None:
    """Returns the cache that a data set is given, None where it is given none.

    Args:
        reader: of the stream.
        directory: `encode_cache`.
        most: `encode_cache_bytes`; None for `ENCODE_CACHE_BYTES`.
        fingerprint: `encode_fingerprint`.
        encode_fn: what encodes; its attribute `fingerprint`, if it has one, stands for a fingerprint that is not given.
        pipeline: steps and encoder.

    Raises:
        ValueError: nothing is encoded, it is not known by what, there is no room, or it is no place for a cache; or
            there is none, and the rest was given.
    """
    if directory is None:
        for name, value in (("encode_cache_bytes", most), ("encode_fingerprint", fingerprint)):
            if value is not None:
                raise ValueError(f"{name} is for encode_cache, which is not given: give both, or leave it out")
        return None
    if not pipeline:
        raise ValueError("encode_cache keeps what encode_fn or steps make of rows, and neither is given: leave it out")
    place = cache_place(directory, reader.directory)
    room = _room(most)
    steps = [_described(step) for step in pipeline.steps]
    if fingerprint is None:
        own = getattr(encode_fn, "fingerprint", None)
        if own is None or steps:
            raise ValueError(
                "encode_cache needs to know by what rows are encoded, so that nothing comes back that was encoded "
                "otherwise: give encode_fingerprint={...}, plain facts by name that change whenever "
                f"{'encode_fn or steps' if steps else 'encode_fn'} would make another sample of a row (tokenizer, "
                "template, greatest length, a version of your own)"
            )
        name = getattr(encode_fn, "__qualname__", type(encode_fn).__qualname__)
        own = check_encoding(own, "the attribute fingerprint of encode_fn")
        fingerprint = own | _own_fact("function", f"{getattr(encode_fn, '__module__', '')}:{name}", own)
    facts = check_encoding(fingerprint, "encode_fingerprint")
    if steps:
        facts |= _own_fact("lazyshard.steps", "; ".join(steps), facts)
    return EncodeCache(reader, place, room, facts)


def cache_place(directory: Any, stream: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of `encode_cache`.

    Args:
        directory: as it was given.
        stream: the stream's directory, or its URL.

    Raises:
        ValueError: it is no path, lies in the stream, or there is a file in its place.
    """
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(f"encode_cache is the path of a directory of this node, got {directory!r}")
    if is_url(path):
        raise ValueError(
            f"encode_cache is a directory of this node, in memory or on its own disk, got the URL {redact(path)!r}"
        )
    place = Path(os.path.abspath(os.path.expanduser(path)))
    if not is_url(stream) and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(stream)):
        raise ValueError(
            f"encode_cache {path!r} lies in the stream's own directory, {stream}, where only what is published "
            f"belongs, and which other machines see: name a directory of this node outside of it, "
            f"such as one in /dev/shm"
        )
    _check_place(path, place)
    return place


def _check_place(given: str, place: Path) -> None:
    """Refuses a place at which there can be no folder; one that is not there yet is made when something is kept.

    Raises:
        ValueError: a file, or a link that leads nowhere, is there or on the way.
    """
    for one in (place, *place.parents):
        if one.is_dir():
            return
        if os.path.lexists(one):
            what = f"a link to {os.readlink(one)}, which is not there" if one.is_symlink() else "a file"
            if one.exists() and one.is_symlink():
                what = f"a link to {os.readlink(one)}, which is a file"
            raise ValueError(
                f"encode_cache {given!r} cannot be a directory: {one} is {what}; remove it, or name another one"
            )


def _room(most: Any) -> int:
    """Returns the bytes of `encode_cache_bytes`. Raises ValueError: it is no number of bytes, or too small."""
    if most is None:
        return ENCODE_CACHE_BYTES
    try:
        size = parse_size(most) if type(most) is str else most
    except ValueError:
        size = None
    if type(size) is not int or size < LEAST_CACHE_BYTES:
        raise ValueError(
            f"encode_cache_bytes is a number of bytes from {LEAST_CACHE_BYTES} on, or a text such as '20GB' or "
            f"'512MiB', got {most!r}"
        )
    return size


def _own_fact(name: str, value: str, given: Mapping[str, Fact]) -> dict[str, Fact]:
    """Returns a fact that is told here. Raises ValueError: it was given one of this name, with another meaning."""
    if name in given:
        raise ValueError(f"a fingerprint has no fact {name!r}, which lazyshard tells itself: give yours another name")
    return {name: value}


def _described(step: Step) -> str:
    """Returns kind and function of a step, and what else it says."""
    others = [f"{one.name}={getattr(step, one.name)!r}" for one in dataclasses.fields(step)[1:]]  # type: ignore[arg-type]
    return " ".join([step.describe(), *others])
