"""The cache of encoded samples that all processes of a node share: how it is opened, asked, and given up.

Peers that draw the same rows at the same time share the work: who comes to a row that another one is encoding goes on
to the next one of its batch, and comes back. The cache is never needed: where it fails it is left alone from then on,
and rows are encoded as without it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import xxhash

from lazyshard.data.samples import SampleMaker
from lazyshard.data.settings import EncodeCache
from lazyshard.data.shared import Stats
from lazyshard.data.steps import EncodeFn, RowSteps, Step
from lazyshard.data.tensors import pack, unpack
from lazyshard.errors import ChunkCorrupt, RowInvalid, SkipSample, redact
from lazyshard.format.kept_sample import Kept, chunk_key, encode_dropped, encode_sample
from lazyshard.format.records import Encoding, Fact, check_encoding
from lazyshard.memory import raise_if_short
from lazyshard.store.kept_samples import KeptSamples
from lazyshard.store.urls import is_url
from lazyshard.stream import StreamReader

_log = logging.getLogger("lazyshard")

MISSING: Final = object()
"""Nothing is kept of a row, which is the caller's to encode."""

BUSY: Final = object()
"""Nothing is kept of a row yet, and another process is encoding it."""

_WAIT_S: Final = 60.0
"""How long to wait for another process to encode a row: one that takes longer was stopped, or has died of it."""

_FIRST_PAUSE_S: Final = 0.001
_LAST_PAUSE_S: Final = 0.02

_MOST_KEYS: Final = 4096
"""Chunks whose keys are remembered."""

_digest = xxhash.xxh3_64_intdigest


class NodeCache:
    """The cache, for one data set.

    Args:
        reader: of the stream.
        directory: where it is.
        most: bytes.
        encoding: all that decides about what is made of a row.
    """

    def __init__(self, reader: StreamReader, directory: Path, most: int, encoding: Encoding) -> None:
        self._reader = reader
        self._kept = KeptSamples(directory, most)
        self._encoding = dict(encoding)
        self._keys: dict[int, tuple[bytes, int]] = {}
        self._off = self._full = False
        self._told: set[str] = set()
        self._encoded = self._found = self._not_kept = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what this process has met."""
        fresh = {"_keys": {}, "_off": False, "_full": False, "_told": set(), "_encoded": 0, "_found": 0, "_not_kept": 0}
        return self.__dict__ | fresh

    @property
    def counts(self) -> tuple[int, int, int]:
        """Rows that this process has encoded, has found, and has encoded but could not keep."""
        return self._encoded, self._found, self._not_kept

    def forget_counts(self) -> None:
        """Starts counting anew."""
        self._encoded = self._found = self._not_kept = 0

    def begin(self, sample: int, line: bytes, *, wait: bool) -> Any:
        """Returns what is kept of a sample, as new; `MISSING` where the caller is to encode it, and to `end` that.

        Args:
            sample: its number.
            line: its line, checked.
            wait: whether to wait for another process that is encoding it. Otherwise it is `BUSY` then.

        Raises:
            SkipSample: what is kept is that it was dropped, with this reason.
            ChunkRetired, ChunkMissing, LazyShardError, OSError: its chunk cannot be opened.
        """
        key, rows, row = self._place(sample)
        found = self._ask(key, rows, row, _digest(line), wait)
        if found is BUSY:
            return BUSY
        if found is MISSING:
            self._encoded += 1
            return MISSING
        self._found += 1
        if found.dropped is not None:
            raise SkipSample(found.dropped)
        return unpack(found.sample)

    def end(self, sample: int) -> None:
        """Lets others encode a sample that this process has begun."""
        key, _, row = self._place(sample)
        self._kept.release(key, row)

    def keep(self, sample: int, line: bytes, made: Any) -> None:
        """Keeps what was made of a sample, if it can be kept as it is."""
        key, rows, row = self._place(sample)
        digest = _digest(line)
        try:
            record = encode_sample(pack(made), key, row, digest)
        except Exception as cause:
            raise_if_short(cause)
            # Whatever a value of somebody else's class, or a tensor of a kind that we do not know, may raise.
            self._not_kept += 1
            reason = cause.reason if isinstance(cause, RowInvalid) else str(cause)
            self._tell("odd", f"a sample holds what would not come back as it is, and is not cached: {reason:.200}")
            return
        if self._write(lambda: self._kept.keep(key, rows, row, digest, record)):
            return
        self._not_kept += 1
        if not self._kept.can_fit(rows, len(record)):
            self._tell(
                "large",
                f"a sample of {len(record)} bytes in a chunk of {rows} rows is larger than the whole cache, or than a "
                f"sample may be, and is not cached; give it a larger size",
            )

    def drop(self, sample: int, line: bytes, cause: SkipSample) -> None:
        """Keeps that a sample was dropped, unless more was said of it than a reason."""
        if type(cause) is not SkipSample or len(cause.args) != 1 or type(cause.args[0]) is not str:
            return
        key, rows, row = self._place(sample)
        digest = _digest(line)
        try:
            record = encode_dropped(cause.args[0], key, row, digest)
        except RowInvalid:
            return
        self._write(lambda: self._kept.keep(key, rows, row, digest, record))

    def _begun(self, key: bytes, rows: int, row: int, line: int, wait: bool) -> Any:
        """Takes the right to encode a row of which nothing is kept, waiting for it if asked to."""
        due, pause = time.monotonic() + _WAIT_S, _FIRST_PAUSE_S
        while True:
            if self._full:
                # Nobody waits for what is not kept.
                return MISSING
            if self._kept.claim(key, row):
                # Between the look and the claim another one may have come to its end.
                found = self._find(key, rows, row, line)
                if found is None:
                    return MISSING
                self._kept.release(key, row)
                return found
            if not wait:
                return BUSY
            if time.monotonic() >= due:
                return MISSING
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)
            found = self._find(key, rows, row, line)
            if found is not None:
                return found

    def _find(self, key: bytes, rows: int, row: int, line: int) -> Kept | None:
        damaged = self._kept.damaged
        found = self._kept.find(key, rows, row, line)
        if self._kept.damaged > damaged:
            self._tell("damaged", "a cached sample has been changed or lost since it was written; it is encoded anew")
        return found

    def _place(self, sample: int) -> tuple[bytes, int, int]:
        """Returns key and rows of a sample's chunk, and its row there."""
        size = self._reader.samples_per_chunk
        number, row = divmod(sample, size)
        known = self._keys.get(number)
        if known is None:
            chunk = self._reader.chunk(number)
            rows = len(chunk)
            if len(self._keys) >= _MOST_KEYS:
                self._keys.clear()
            known = self._keys[number] = chunk_key(self._encoding, number, size, rows, chunk.identity()), rows
        return *known, row

    def _ask(self, key: bytes, rows: int, row: int, line: int, wait: bool) -> Any:
        """Looks into the cache; gives it up where the filesystem does not do what is asked for."""
        if self._off:
            return MISSING
        try:
            found = self._find(key, rows, row, line)
            return self._begun(key, rows, row, line, wait) if found is None else found
        except OSError as error:
            self._off = self._full = True
            self._tell("off", f"the cache cannot be used, and all rows are encoded from here on: {error}")
            return MISSING

    def _write(self, call: Callable[[], bool]) -> bool:
        """Adds to the cache; only reads it from then on where the filesystem refuses."""
        if self._full:
            return False
        try:
            return call()
        except OSError as error:
            self._full = True
            self._tell("full", f"nothing more is cached, what is there is still read: {error}")
            return False

    def _tell(self, kind: str, what: str) -> None:
        """Says something, once in a process."""
        if kind not in self._told:
            self._told.add(kind)
            _log.warning("%s: %s", self._kept.folder, what)


class CachedSampleMaker(SampleMaker):
    """Makes samples of rows, and keeps them for all processes of the node.

    Args:
        shared: keeps them; other arguments as of `SampleMaker`.
    """

    takes_lines = True

    def __init__(self, shared: NodeCache, *given: Any) -> None:
        super().__init__(*given)
        self._shared = shared

    @property
    def stats(self) -> Stats:
        """What this process has met."""
        encoded, from_cache, not_cached = self._shared.counts
        return super().stats._replace(encoded=encoded, from_cache=from_cache, not_cached=not_cached)

    def forget_met(self) -> None:
        """Starts counting anew."""
        super().forget_met()
        self._shared.forget_counts()

    def of_lines(self, lines: list[bytes], samples: Iterable[int]) -> list[Any]:
        """Makes samples of checked lines, or takes what is kept; substitutes as `make` does. Raises as `substitute`.

        Rows that another process is encoding are left for the end: peers that draw the same batch share the work.
        """
        numbers = [int(sample) for _, sample in zip(lines, samples, strict=False)]
        made = [self._of_line(sample, line, wait=False) for sample, line in zip(numbers, lines, strict=True)]
        for at, one in enumerate(made):
            if one is BUSY:
                made[at] = self._of_line(numbers[at], lines[at], wait=True)
        return made

    def _of_line(self, sample: int, line: bytes, *, wait: bool) -> Any:
        kept = self._cache.get(sample)
        if kept is not None:
            return kept
        made, failed = self._through_cache(sample, line, wait=wait)
        if failed is not None:
            return self.substitute(sample, failed)
        if made is not BUSY:
            self._cache.put(sample, made)
        return made

    def _through_cache(self, sample: int, line: bytes, *, wait: bool) -> tuple[Any, Exception | None]:
        """Returns what is kept of a sample or made of its line, or why it cannot be trained; `BUSY` as `begin`."""
        shared = self._shared
        try:
            found = shared.begin(sample, line, wait=wait)
        except SkipSample as cause:
            return None, cause
        if found is not MISSING:
            return found, None
        try:
            made, failed = self._made_of(sample, line)
            if failed is None:
                shared.keep(sample, line, made)
            elif isinstance(failed, SkipSample):
                shared.drop(sample, line, failed)
        finally:
            shared.end(sample)
        return made, failed

    def _made_of(self, sample: int, line: bytes) -> tuple[Any, Exception | None]:
        """Returns what is made of a checked line, or why it cannot be trained."""
        try:
            row = self._reader.parse([line], sample)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        return self._made(sample, row)

    def _try(self, sample: int) -> tuple[Any, Exception | None]:
        try:
            line = self._reader.lines_published(sample, sample + 1)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        return self._through_cache(sample, line, wait=True)


def open_node_cache(
    reader: StreamReader, settings: EncodeCache, encode_fn: EncodeFn | None, pipeline: RowSteps
) -> NodeCache:
    """Returns the cache in a directory.

    Args:
        reader: of the stream.
        settings: of the cache, with its directory.
        encode_fn: what encodes; its attribute `fingerprint`, if it has one, stands for a fingerprint that is not given.
        pipeline: steps and encoder.

    Raises:
        ValueError: nothing is encoded, it is not known by what, or it is no place for a cache.
    """
    if not pipeline:
        raise ValueError("an encode cache keeps what encode_fn or steps make of rows, and neither is given")
    place = cache_place(settings.directory, reader.directory)
    steps = [_described(step) for step in pipeline.steps]
    fingerprint = settings.fingerprint
    if fingerprint is None:
        own = getattr(encode_fn, "fingerprint", None)
        if own is None or steps:
            raise ValueError(
                "an encode cache needs to know by what rows are encoded, so that nothing comes back that was encoded "
                "otherwise: give EncodeCache(fingerprint={...}), plain facts by name that change whenever "
                f"{'encode_fn or steps' if steps else 'encode_fn'} would make another sample of a row (tokenizer, "
                "template, greatest length, a version of your own)"
            )
        name = getattr(encode_fn, "__qualname__", type(encode_fn).__qualname__)
        own = check_encoding(own, "the attribute fingerprint of encode_fn")
        fingerprint = own | _own_fact("function", f"{getattr(encode_fn, '__module__', '')}:{name}", own)
    facts = check_encoding(fingerprint, "the fingerprint of an encode cache")
    if steps:
        facts |= _own_fact("lazyshard.steps", "; ".join(steps), facts)
    return NodeCache(reader, place, settings.most_bytes, facts)


def cache_place(directory: Any, stream: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of the directory of a cache.

    Raises:
        ValueError: it is no path, lies in the stream, or there is a file in its place.
    """
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(f"an encode cache is the path of a directory of this node, got {directory!r}")
    if is_url(path):
        raise ValueError(
            f"an encode cache is a directory of this node, in memory or on its own disk, got the URL {redact(path)!r}"
        )
    place = Path(os.path.abspath(os.path.expanduser(path)))
    if not is_url(stream) and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(stream)):
        raise ValueError(
            f"the encode cache {path!r} lies in the stream's own directory, {stream}, where only what is published "
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
                f"the encode cache {given!r} cannot be a directory: {one} is {what}; remove it, or name another one"
            )


def _own_fact(name: str, value: str, given: Mapping[str, Fact]) -> dict[str, Fact]:
    """Returns a fact that is told here. Raises ValueError: it was given one of this name, with another meaning."""
    if name in given:
        raise ValueError(f"a fingerprint has no fact {name!r}, which lazyshard tells itself: give yours another name")
    return {name: value}


def _described(step: Step) -> str:
    """Returns kind and function of a step, and what else it says."""
    others = [f"{one.name}={getattr(step, one.name)!r}" for one in dataclasses.fields(step)[1:]]  # type: ignore[arg-type]
    return " ".join([step.describe(), *others])
