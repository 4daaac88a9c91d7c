"""Encoded samples that all processes of a node share; and values of samples as JSON with arrays and back.

Who comes to a row that a peer is encoding goes on to the next one of its batch, and comes back. The cache is never
needed: where it fails it is left alone from then on, and rows are encoded as without it. What it keeps comes back as it
was, or is not kept::

    value     {"input_ids": [1, 2, ..., 9], "length": 9, "pixel_values": tensor(...), "ratio": np.float32(0.5)}
    packed    {"input_ids": array([1, 2, ..., 9]), "length": 9, "pixel_values": {"$tensor": array(...)},
               "ratio": {"$scalar": array(0.5)}}
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from lazyshard.data.rank import log
from lazyshard.data.samples import BUSY, SampleMaker
from lazyshard.data.settings import EncodeCache, EncodeFn, RowSteps
from lazyshard.errors import RowInvalid, SkipSample, redact
from lazyshard.format.arrays import BFLOAT16, Kept, chunk_key, encode_dropped, encode_sample
from lazyshard.format.records import check_encoding
from lazyshard.memory import raise_if_short
from lazyshard.store.files import is_url
from lazyshard.store.kept_samples import KeptSamples
from lazyshard.stream import StreamReader

# How long to wait for another process to encode a row: one that takes longer was stopped, or has died of it.
_WAIT_S: Final = 60.0
_SHORT: Final = 8  # Numbers up to which a list is shorter, and read sooner, as it is

_Place = tuple[bytes, int, int, int]  # Key and rows of a sample's chunk, its row there, and the digest of its line


class CachedSampleMaker(SampleMaker):
    """Makes samples of rows, and keeps them for all processes of the node, by all that decides about them.

    The arguments behind `encode_fn` are those of `SampleMaker`. Raises ValueError: nothing is encoded, it is not known
    by what, or it is no place for a cache.
    """

    def __init__(
        self, settings: EncodeCache, encode_fn: EncodeFn | None, reader: StreamReader, pipeline: RowSteps, *rest: Any
    ) -> None:
        super().__init__(reader, pipeline, *rest)
        if not pipeline:
            raise ValueError("an encode cache keeps what encode_fn or steps make of rows, and neither is given")
        place = cache_place(settings.directory, reader.directory)
        given, what = settings.fingerprint, "the fingerprint of an encode cache"
        steps = "; ".join(step.describe(whole=True) for step in pipeline.steps)
        told = {"lazyshard.steps": steps} if steps else {}
        if given is None:
            given, what = getattr(encode_fn, "fingerprint", None), "the attribute fingerprint of encode_fn"
            if given is None or steps:
                both = "encode_fn or steps" if steps else "encode_fn"
                text = f"facts that change whenever {both} would make another sample"
                raise ValueError(f"an encode cache needs EncodeCache(fingerprint={{...}}): {text}, as the tokenizer")
            name = getattr(encode_fn, "__qualname__", type(encode_fn).__qualname__)
            told = {"function": f"{getattr(encode_fn, '__module__', '')}:{name}"}
        facts = check_encoding(given, what)
        for name in told.keys() & facts:
            raise ValueError(f"a fingerprint has no fact {name!r}, which lazyshard tells itself: give another name")
        self._node, self._encoding = KeptSamples(place, settings.most_bytes), {**facts, **told}
        self._keys: dict[int, tuple[bytes, int]] = {}
        self._told = set[str]()
        # Given up, and only read.
        self._off = self._full = False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_keys": {}, "_told": set(), "_off": False, "_full": False}

    def _made(self, sample: int, line: bytes, *, wait: bool = True) -> tuple[Any, Exception | None]:
        """Returns what is kept of a line or made of it, or why it cannot be trained; `BUSY` as `_ask`."""
        place = self._place(sample, line)
        found = self._ask(place, wait)
        if found is BUSY:
            return BUSY, None
        if found is not None:
            self._counts["from_cache"] += 1
            return (unpack(found.sample), None) if found.dropped is None else (None, SkipSample(found.dropped))
        self._counts["encoded"] += 1
        try:
            made, failed = super()._made(sample, line)
            if failed is None or isinstance(failed, SkipSample):
                self._keep(place, made, failed)
            return made, failed
        finally:
            self._node.release(place[0], place[2])

    def _place(self, sample: int, line: bytes) -> _Place:
        size = self._reader.samples_per_chunk
        number, row = divmod(sample, size)
        # What was looked up is taken: another thread may clear them at any time.
        if (known := self._keys.get(number)) is None:
            chunk = self._reader.chunk(number)
            if len(self._keys) >= 4096:
                self._keys.clear()
            rows = len(chunk)
            known = self._keys[number] = chunk_key(self._encoding, number, size, rows, chunk.identity()), rows
        return *known, row, xxhash.xxh3_64_intdigest(line)

    def _ask(self, place: _Place, wait: bool) -> Any:
        """Returns what is kept, `BUSY`, or None where this process is to encode the row, and to release it then."""
        due, pause = time.monotonic() + _WAIT_S, 0.001
        try:
            # Nobody waits for what is not kept.
            while (found := None if self._off else self._find(place)) is None and not self._full:
                if self._node.claim(place[0], place[2]):
                    # Between the look and the claim another one may have come to its end.
                    if (found := self._find(place)) is not None:
                        self._node.release(place[0], place[2])
                    return found
                if not wait:
                    return BUSY
                if time.monotonic() >= due:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
            return found
        except OSError as error:
            self._off = self._full = True
            self._tell("off", f"the cache cannot be used, and all rows are encoded from here on: {error}")
            return None

    def _find(self, place: _Place) -> Kept | None:
        damaged, found = self._node.damaged, self._node.find(*place)
        if self._node.damaged > damaged:
            self._tell("damaged", "a cached sample has been changed or lost since it was written; it is encoded anew")
        return found

    def _keep(self, place: _Place, made: Any, dropped: SkipSample | None) -> None:
        """Keeps what was made of a sample, if that comes back as it is, or the reason for which it was dropped."""
        key, rows, row, digest = place
        if dropped is not None and (type(dropped) is not SkipSample or [*map(type, dropped.args)] != [str]):
            return  # More was said of it than a reason
        kind, why = "large", ""
        try:
            if dropped is not None:
                record = encode_dropped(dropped.args[0], key, row, digest)
            else:
                record = encode_sample(pack(made), key, row, digest)
            if not self._full and self._node.keep(*place, record):
                return
            if not self._node.can_fit(rows, len(record)):
                why = f"{len(record)} bytes, of {rows} rows of a chunk, are larger than the whole cache or a sample is"
        except OSError as error:
            self._full = True
            self._tell("full", f"nothing more is cached, what is there is still read: {error}")
        except Exception as cause:
            raise_if_short(cause)
            # Whatever a value of somebody else's class, or a tensor of a kind that we do not know, may raise.
            reason = cause.reason if isinstance(cause, RowInvalid) else str(cause)
            kind, why = "odd", f"it holds what would not come back as it is: {reason:.200}"
        if dropped is None:
            self._counts["not_cached"] += 1
            if why:
                self._tell(kind, f"a sample is not cached: {why}")

    def _tell(self, kind: str, what: str) -> None:
        """Says something, once in a process."""
        if kind not in self._told:
            self._told.add(kind)
            log.warning("%s: %s", self._node.folder, what)


def cache_place(directory: Any, stream: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a cache. Raises ValueError: it is none, in the stream, or a file is in its place."""
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(path, str) or not path or "\0" in path or is_url(path):
        got = f"the URL {redact(path)!r}" if isinstance(path, str) and is_url(path) else repr(directory)
        raise ValueError(f"an encode cache is the path of a directory of this node, got {got}")
    place = Path(os.path.abspath(os.path.expanduser(path)))
    if not is_url(stream) and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(stream)):
        raise ValueError(f"the encode cache {path!r} lies in the stream's own directory: name one outside of it")
    # A folder that is not there yet is made when something is kept.
    one = next(one for one in (place, *place.parents) if os.path.lexists(one))
    if not one.is_dir():
        what = f"a link to {os.readlink(one)}" if one.is_symlink() else "a file"
        raise ValueError(f"the encode cache {path!r} cannot be a directory: {one} is {what}; name another one")
    return place


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Returns a tensor of an array that came with a row, which shares its memory.

    Of an array that is read-only, as none is that a reader of ours returns, it is a copy: torch has no such tensors.

    Args:
        array: of any dtype that rows may hold; of `lazyshard.BFLOAT16` it gives a tensor of bfloat16.

    Raises TypeError: this release of torch has no such dtype, as those before 2.3 have no uint16, uint32 and uint64.
    """
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def pack(value: Any) -> Any:
    """Returns a value as one that `lazyshard.format.arrays.pack_row` takes.

    Raises TypeError where a value in it would not come back as it is: of another type than dict, list, tuple, str,
    bool, int, float, None, numpy's arrays and numbers, and tensors on the CPU that need no gradient; or a key that is
    no text, or one of ours.
    """
    kind = type(value)
    if value is None or kind in (str, bool, int):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": np.array(value)}
    if kind is list:
        array = array_of_list(value) if len(value) > _SHORT else None
        return [pack(one) for one in value] if array is None else array
    if kind is dict:
        for name in value:
            if type(name) is not str or name in MARKS:
                raise TypeError(f"the key {name!r:.80}")
        return {name: pack(one) for name, one in value.items()}
    if kind is tuple:
        return {"$tuple": [pack(one) for one in value]}
    if kind is torch.Tensor:
        # More than numbers in memory of the CPU would not come back.
        odd = value.requires_grad or value.device.type != "cpu" or value.layout is not torch.strided
        if not (odd or value.is_quantized or vars(value)):
            bits = value.contiguous()
            is_short = bits.dtype is torch.bfloat16
            return {"$tensor": bits.view(torch.int16).numpy().view(BFLOAT16) if is_short else bits.numpy()}
    if kind is np.ndarray and value.dtype.isnative:
        return {"$numpy": value}
    if isinstance(value, np.number | np.bool_):
        return {"$scalar": np.array(value)}
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")


def unpack(value: Any) -> Any:
    """Returns the value that was packed; arrays and tensors share the memory of what they were packed into."""
    kind = type(value)
    if kind is np.ndarray:
        return value.tolist()
    if kind is list:
        return [unpack(one) for one in value]
    if kind is not dict:
        return value
    if len(value) == 1:
        (mark, inner), *_ = value.items()
        if mark in MARKS:
            return MARKS[mark](inner)
    return {name: unpack(one) for name, one in value.items()}


# By keys that no value may have.
MARKS: dict[str, Callable[[Any], Any]] = {"$tensor": as_tensor, "$numpy": lambda array: array}
MARKS |= {"$scalar": lambda array: array[()], "$float": lambda array: array.item()}
MARKS |= {"$tuple": lambda values: tuple(map(unpack, values))}


def array_of_list(values: list[Any]) -> npt.NDArray[Any] | None:
    """Returns a list of numbers of one kind as an array that gives the same list again; None for any other list."""
    kinds = set(map(type, values))
    if kinds == {int}:
        low, high = min(values), max(values)
        if low >= -(2**31) and high < 2**31:
            return np.array(values, np.int32)
        return np.array(values, np.int64) if low >= -(2**63) and high < 2**63 else None
    if kinds == {float}:
        exact = np.array(values, np.float64)
        with np.errstate(over="ignore"):
            short = exact.astype(np.float32)
        return short if np.array_equal(short.astype(np.float64), exact, equal_nan=True) else exact
    return np.array(values, np.bool_) if kinds == {bool} else None
