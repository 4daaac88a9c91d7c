"""The seal, `chunk_NNNNN.jsonl.completed`: the commit record of a chunk.

Its existence means that the chunk is complete and immutable. It publishes the rows and advances the producer's source
positions in one atomic step, so no second file can disagree with it. Lifetime: until its chunk is deleted.

Seals of `lazyshard-producer` also record how rows were read, mixed and dealt, in the field `source` with the positions:
how many rows were read and drawn from each source, and, in `recipe`, the settings with which rows were made, weighted
and ordered. None of this is needed to read the stream: it is for display and for warnings. If several writers write the
stream, the field holds these positions of the writers (`lazyshard.format.writers`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Final, NamedTuple

import numpy as np

from lazyshard.errors import ChunkCorrupt
from lazyshard.format import records
from lazyshard.format.records import FORMAT, FORMAT_WITH_ARRAYS, FORMAT_WITH_BLOBS, pack, seal_name, take, unpack
from lazyshard.part import MAX_SAMPLES, NUMBER, TEXT, UInt32Array, UInt64Array, integer, refused

_COUNT: Final = integer(0, MAX_SAMPLES)
_SIZE: Final = integer(1, MAX_SAMPLES)


@dataclass(frozen=True, slots=True, eq=False)
class SealedArrays:
    """The seal of a chunk's side file, as `Seal`; a row without arrays has two equal offsets."""

    offsets: UInt64Array
    digests: UInt64Array
    blobs: bool = False  # whether a row holds bytes: earlier releases read arrays only, and refuse format 3

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return int(self.offsets[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Seal:
    """The content of a seal: the index and digests of a complete chunk."""

    chunk: int  # the chunk's number
    # u64 of shape (samples + 1,): row i is the bytes of the half-open range [offsets[i], offsets[i + 1]) of the data
    # file, with its newline; the last entry is the file's size
    offsets: UInt64Array
    digests: UInt64Array  # u64 of shape (samples,): XXH3 (64 bits, seed 0) of each row's bytes, with its newline
    # u32 of shape (samples,): length of each sample in tokens, or None if not measured
    tokens: UInt32Array | None = None
    source: Any = None  # JSON value: the producer's position in every source after this chunk; None if it has none
    sealed_at: float = 0.0  # seconds since 1970, UTC
    arrays: SealedArrays | None = None  # of the chunk's side file; None in a stream without arrays
    patches: UInt32Array | None = None  # u32 of shape (samples,): patches of each sample's images; None if all have 0

    @property
    def samples(self) -> int:
        """Rows in the chunk."""
        return len(self.digests)

    @property
    def size(self) -> int:
        """Bytes in the data file."""
        return int(self.offsets[-1])

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        newest = FORMAT if self.arrays is None else FORMAT_WITH_BLOBS if self.arrays.blobs else FORMAT_WITH_ARRAYS
        values: dict[str, Any] = {"format": newest, "chunk": self.chunk}
        values |= {"samples": self.samples, "bytes": self.size, "offsets": pack(self.offsets, "<u8")}
        values["xxh3"] = pack(self.digests, "<u8")
        values["tokens"] = None if self.tokens is None else pack(self.tokens, "<u4")
        if self.patches is not None and self.patches.any():
            values["patches"] = pack(self.patches, "<u4")
        if (side := self.arrays) is not None:
            values |= {"arrays_bytes": side.size, "arrays_offsets": pack(side.offsets, "<u8")}
            values["arrays_xxh3"] = pack(side.digests, "<u8")
        return records.encode(values | {"source": self.source, "sealed_at": self.sealed_at})

    @classmethod
    def decode(cls, data: bytes, chunk: int, file: str = "") -> Seal:
        """Decodes the file's bytes; `chunk` is the number in its name, messages use `file` as its name."""
        with records.in_file(file or seal_name(chunk), ChunkCorrupt, "; restore the file from a copy"):
            values, samples = _parse(data, chunk)
            offsets = _read_offsets(values, "offsets", "bytes", samples, least=1)
            digests, arrays = unpack(values, "xxh3", "<u8", samples), None
            if values["format"] >= FORMAT_WITH_ARRAYS:
                of_arrays = _read_offsets(values, "arrays_offsets", "arrays_bytes", samples, least=0)
                blobs = values["format"] == FORMAT_WITH_BLOBS
                arrays = SealedArrays(of_arrays, unpack(values, "arrays_xxh3", "<u8", samples), blobs)
            tokens = None if values.get("tokens") is None else unpack(values, "tokens", "<u4", samples)
            patches = None if values.get("patches") is None else unpack(values, "patches", "<u4", samples)
            at = take(values, "sealed_at", NUMBER)
            return cls(chunk, offsets, digests, tokens, values.get("source"), at, arrays, patches)


def _parse(data: bytes, chunk: int) -> tuple[dict[str, Any], int]:
    """Returns the object of a seal, and its samples."""
    values = records.parse_object(data, FORMAT_WITH_BLOBS)
    if take(values, "chunk", integer(0, records.MAX_CHUNKS)) != chunk:
        raise refused("chunk", f"{chunk}, as in the file's name", values["chunk"])
    return values, take(values, "samples", records.PER_CHUNK)


@dataclass(frozen=True, slots=True, eq=False)
class SealBytes:
    """A seal whose rows are not decoded: to be written again for another chunk, at a cost that hardly grows with it."""

    chunk: int
    samples: int
    size: int  # bytes in the data file
    arrays_size: int | None  # bytes in the side file; None without one
    source: Any
    _values: dict[str, Any]

    @classmethod
    def decode(cls, data: bytes, chunk: int, file: str = "") -> SealBytes:
        """As `Seal.decode`; of offsets and digests only their lengths are checked."""
        with records.in_file(file or seal_name(chunk), ChunkCorrupt, "; restore the file from a copy"):
            values, samples = _parse(data, chunk)
            arrays = values["format"] >= FORMAT_WITH_ARRAYS
            for prefix in ("", "arrays_")[: 1 + arrays]:
                for field, count in (("offsets", samples + 1), ("xxh3", samples)):
                    length = len(take(values, prefix + field, TEXT))
                    if length != (expected := -(-8 * count // 3) * 4):
                        raise refused(prefix + field, f"{expected} characters", None, f"{length}")
            side = take(values, "arrays_bytes", _COUNT) if arrays else None
            return cls(chunk, samples, take(values, "bytes", _SIZE), side, values.get("source"), values)

    def encode(self, chunk: int, source: Any, now: float) -> bytes:
        """Returns the bytes of the seal of these rows as another chunk."""
        return records.encode(self._values | {"chunk": chunk, "source": source, "sealed_at": now})


def _read_offsets(values: dict[str, Any], field: str, size_field: str, samples: int, least: int) -> UInt64Array:
    """Returns the start of each row, of `least` or more bytes, and the end of the last; checks the file's size."""
    offsets = unpack(values, field, "<u8", samples + 1)
    size = take(values, size_field, integer(least, MAX_SAMPLES))
    if offsets[0] != 0:
        raise refused(field, "a first row at byte 0", None, f"byte {offsets[0]}")
    starts, ends = offsets[:-1], offsets[1:]
    if len(falls := np.flatnonzero(ends <= starts if least else ends < starts)):
        row, expected = falls[0], "strictly increasing row starts" if least else "non-decreasing row starts"
        raise refused(field, expected, None, f"row {row} from byte {starts[row]} to byte {ends[row]}")
    if offsets[-1] != size:
        raise refused(size_field, f"{offsets[-1]}, where the last row ends", size)
    return offsets


def _recipe(source: Any) -> dict[str, Any]:
    recipe = source.get("recipe") if isinstance(source, dict) else None
    return recipe if isinstance(recipe, dict) else {}


def _is_number(value: Any, high: float) -> bool:
    return type(value) in (int, float) and 0 <= value < high


def producer_source(source: Any) -> Any:
    """Returns the position of the one producer of a chunk's rows, from the field `source` of its seal.

    In a stream with several writers it is that of the writer; None if the rows are of several.

    >>> producer_source({"writers": {"a": [8, 5]}, "rows": [["a", 4, 4, {"page": 2}]]})
    {'page': 2}
    """
    if not isinstance(source, dict) or not (isinstance(source.get("writers"), dict) and "rows" in source):
        return source
    rows = source["rows"]
    one = rows[0] if isinstance(rows, list) and len(rows) == 1 else None
    return one[3] if isinstance(one, list) and len(one) == 4 else None


class SourceRows(NamedTuple):
    """The source rows read up to the end of a chunk."""

    read: int  # rows read, including refused ones
    refused: int  # rows that were left out as bad rows
    # whether the chunk ends with a source row or a buffer of them; otherwise a few more rows were read, and only a part
    # of them is published
    exact: bool
    pack: int | None = None  # maximum tokens of a pack; None if rows are not packed

    @classmethod
    def read_source(cls, source: Any) -> SourceRows | None:
        """Reads it from the field `source` of a seal; None if it is absent or invalid."""
        source = producer_source(source)
        if not isinstance(source, dict) or not isinstance(source.get("sources"), list):
            return None
        read, refused, skip = (source.get(name, -1) for name in ("rows", "refused", "skip"))
        if not all(map(_COUNT.fits, (read, refused, skip))) or refused > read:
            return None
        pack = _recipe(source).get("pack")
        return cls(read, refused, not skip, pack if _SIZE.fits(pack) else None)

    @classmethod
    def sum(cls, rows: Iterable[SourceRows | None]) -> SourceRows | None:
        """Returns the rows that several writers have read; None if none of them is known."""
        known = [one for one in rows if one is not None]
        if not known:
            return None
        read, refused = sum(one.read for one in known), sum(one.refused for one in known)
        return cls(read, refused, all(one.exact for one in known), known[-1].pack)


class Made(NamedTuple):
    """How rows were made: "pack", "split" or "pad", with at most `size` tokens; None if unchanged or unknown.

    `patches`: maximum patches of a pack; None if not limited.
    """

    form: str | None = None
    size: int | None = None
    shuffled: bool = False
    patches: int | None = None

    @classmethod
    def read_source(cls, source: Any) -> Made:
        """Reads it from the field `source` of a seal.

        >>> Made.read_source({"recipe": {"pad": {"size": 512}, "shuffle": 1000}})
        Made(form='pad', size=512, shuffled=True, patches=None)
        """
        recipe = _recipe(producer_source(source))
        form = next((form for form in ("pack", "split", "pad") if recipe.get(form)), None)
        setting = recipe.get(form or "")
        sizes = (setting.get("size") if isinstance(setting, dict) else setting, recipe.get("pack_patches"))
        size, patches = (one if type(one) is int and 0 < one < 2**32 else None for one in sizes)
        return cls(form, size, bool(recipe.get("shuffle")), patches)


MAX_SOURCES: Final = 100  # Larger mixtures are not reported: too long to read


class MixedSource(NamedTuple):
    """One source of a mixture."""

    name: str  # as given, usually a path
    weight: float  # its share of the next rows, from 0 to 1; 0 if it is finished
    share: float | None  # its share of the rows drawn since the mixture began or changed; None if none was drawn
    rows: int  # the number of these rows
    finished: bool  # whether its end was reached


def mixed_sources(source: Any) -> tuple[MixedSource, ...]:
    """Reads the sources of the mixture from the field `source` of a seal, in order.

    Returns an empty tuple if sources are not mixed by weights, are more than `MAX_SOURCES`, or are invalid.
    """
    source = producer_source(source)
    if (weights := _recipe(source).get("weights")) is None:
        return ()
    columns: list[Any] = [weights, *(source.get(name) for name in ("sources", "drawn", "finished"))]
    if not all(isinstance(one, list) and len(one) == len(weights) for one in columns):
        return ()
    rows = list(zip(*columns, strict=True))
    if not 2 <= len(rows) <= MAX_SOURCES or not all(starmap(_can_be_mixed, rows)):
        return ()
    shared = math.fsum(weight for weight, _, _, ended in rows if not ended)
    drawn = sum(count for _, _, count, _ in rows)
    return tuple(
        MixedSource(entry["path"], 0.0 if ended else weight / shared, count / drawn if drawn else None, count, ended)
        for weight, entry, count, ended in rows
    )


def _can_be_mixed(weight: Any, entry: Any, count: Any, ended: Any) -> bool:
    named = isinstance(entry, dict) and isinstance(entry.get("path"), str) and type(ended) is bool
    return named and _is_number(weight, 1e100) and weight > 0 and _COUNT.fits(count)  # their sum cannot overflow


class DealtByCost(NamedTuple):
    """How rows were dealt to the data-parallel ranks, by their length in tokens, given in a field of the row.

    A micro batch has `micro_batch_size` rows of one rank; costs are per token, per pair of tokens, and per patch.
    """

    ranks: int
    micro_batch_size: int
    length_field: str
    cost_per_token: float
    cost_per_token_squared: float
    cost_per_patch: float = 0.0

    @classmethod
    def read(cls, source: Any) -> DealtByCost | None:
        """Reads it from the field `source` of a seal; None if it is absent or invalid."""
        recipe = _recipe(producer_source(source))
        ranks, size, name = (recipe.get(key) for key in ("balance", "micro_batch_size", "length_field"))
        costs = [recipe.get(key, 0.0) for key in ("cost_per_token", "cost_per_token_squared", "cost_per_patch")]
        if not (_SIZE.fits(ranks) and _SIZE.fits(size) and isinstance(name, str)):
            return None
        if not all(_is_number(cost, math.inf) for cost in costs) or not any(costs):
            return None
        return cls(ranks, size, name, *map(float, costs))  # type: ignore[arg-type]
