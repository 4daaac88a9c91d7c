"""The seal, `chunk_NNNNN.jsonl.completed`: the commit record of a chunk.

Its presence says that the chunk is complete and immutable. It publishes the rows and moves the producer's source
positions in one atomic step, so no second file can disagree with it. Lifetime: that of its chunk.

Seals of `lazyshard-producer` also say how rows were read, mixed and dealt. It lies in the field `source`, beside the
positions: how many rows were read and drawn from each source, and, in `recipe`, the settings by which rows were made,
weighted and ordered. Nobody needs any of it to read the stream: it is for people, and for warnings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.errors import SealInvalid
from lazyshard.format import records
from lazyshard.format.records import FORMAT, FORMAT_WITH_ARRAYS, pack, seal_name, take, unpack
from lazyshard.part import MAX_SAMPLES, NUMBER, integer, refused

_Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class SealedArrays:
    """As a `Seal` of the side file of its chunk; the two offsets of a row without arrays are equal."""

    offsets: _Numbers
    digests: _Numbers

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return int(self.offsets[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Seal:
    """What is known of a complete chunk."""

    chunk: int  # the chunk's number
    # u64 of shape (samples + 1,): row i is the bytes of the half-open range [offsets[i], offsets[i + 1]) of the data
    # file, its newline included; the last entry is the file's size
    offsets: _Numbers
    digests: _Numbers  # u64 of shape (samples,): XXH3 (64 bits, seed 0) of each row's bytes, its newline included
    # u32 of shape (samples,): length of each sample in tokens, or None where not measured
    tokens: npt.NDArray[np.uint32] | None = None
    source: Any = None  # JSON value: the producer's position in every source after this chunk; None where it keeps none
    sealed_at: float = 0.0  # seconds since 1970, UTC
    arrays: SealedArrays | None = None  # of the chunk's side file; None in a stream whose rows hold no arrays

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
        values: dict[str, Any] = {"format": FORMAT + (self.arrays is not None), "chunk": self.chunk}
        values |= {"samples": self.samples, "bytes": self.size, "offsets": pack(self.offsets, "<u8")}
        values["xxh3"] = pack(self.digests, "<u8")
        values["tokens"] = None if self.tokens is None else pack(self.tokens, "<u4")
        if (side := self.arrays) is not None:
            values |= {"arrays_bytes": side.size, "arrays_offsets": pack(side.offsets, "<u8")}
            values["arrays_xxh3"] = pack(side.digests, "<u8")
        return records.encode(values | {"source": self.source, "sealed_at": self.sealed_at})

    @classmethod
    def decode(cls, data: bytes, chunk: int, file: str = "") -> Seal:
        """Reads the file's bytes; `chunk` is the number in its name, `file` how messages call it."""
        with records.in_file(file or seal_name(chunk), SealInvalid):
            values = records.parse_object(data, FORMAT_WITH_ARRAYS)
            if take(values, "chunk", integer(0, records.MAX_CHUNKS)) != chunk:
                raise refused("chunk", f"{chunk}, as in the file's name", values["chunk"])
            samples = take(values, "samples", records.PER_CHUNK)
            offsets = _read_offsets(values, "offsets", "bytes", samples, least=1)
            digests, arrays = unpack(values, "xxh3", "<u8", samples), None
            if values["format"] == FORMAT_WITH_ARRAYS:
                of_arrays = _read_offsets(values, "arrays_offsets", "arrays_bytes", samples, least=0)
                arrays = SealedArrays(of_arrays, unpack(values, "arrays_xxh3", "<u8", samples))
            tokens = None if values.get("tokens") is None else unpack(values, "tokens", "<u4", samples)
            return cls(chunk, offsets, digests, tokens, values.get("source"), take(values, "sealed_at", NUMBER), arrays)


def _read_offsets(values: dict[str, Any], field: str, size_field: str, samples: int, least: int) -> _Numbers:
    """Returns where each row begins, of at least so many bytes, and the last one ends; checks the file's size."""
    offsets = unpack(values, field, "<u8", samples + 1)
    size = take(values, size_field, integer(least, MAX_SAMPLES))
    if offsets[0] != 0:
        raise refused(field, "a first row at byte 0", None, f"byte {offsets[0]}")
    starts, ends = offsets[:-1], offsets[1:]
    if len(falls := np.flatnonzero(ends <= starts if least else ends < starts)):
        row, expected = falls[0], "rising row starts" if least else "row starts that do not fall"
        raise refused(field, expected, None, f"row {row} from byte {starts[row]} to byte {ends[row]}")
    if offsets[-1] != size:
        raise refused(size_field, f"{offsets[-1]}, where the last row ends", size)
    return offsets


_COUNT: Final = integer(0, MAX_SAMPLES)
_SIZE: Final = integer(1, MAX_SAMPLES)


def _recipe(source: Any) -> dict[str, Any]:
    recipe = source.get("recipe") if isinstance(source, dict) else None
    return recipe if isinstance(recipe, dict) else {}


def _is_number(value: Any, high: float) -> bool:
    return type(value) in (int, float) and 0 <= value < high


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The source rows up to a chunk's end."""

    read: int  # rows read, refused ones included
    refused: int  # those among them that were left out as bad rows
    # whether the chunk ends where a source row does, or a buffer of them; otherwise a few more were read, of which a
    # part is published
    exact: bool
    pack: int | None = None  # most tokens of a pack; None where rows are not packed

    @classmethod
    def read_source(cls, source: Any) -> SourceRows | None:
        """Returns what the field `source` of a seal says; None where it says nothing of it, or nothing that can be."""
        if not isinstance(source, dict) or not isinstance(source.get("sources"), list):
            return None
        read, refused, skip = (source.get(name, -1) for name in ("rows", "refused", "skip"))
        if not all(map(_COUNT.fits, (read, refused, skip))) or refused > read:
            return None
        pack = _recipe(source).get("pack")
        return cls(read, refused, not skip, pack if _SIZE.fits(pack) else None)


@dataclass(frozen=True, slots=True)
class Made:
    """How rows were made: "pack", "split" or "pad", of at most `size` tokens; None for rows as they are or not said."""

    form: str | None = None
    size: int | None = None
    shuffled: bool = False

    @classmethod
    def read_source(cls, source: Any) -> Made:
        """Returns what the field `source` of a seal says.

        >>> Made.read_source({"recipe": {"pad": {"size": 512}, "shuffle": 1000}})
        Made(form='pad', size=512, shuffled=True)
        """
        recipe = _recipe(source)
        form = next((form for form in ("pack", "split", "pad") if recipe.get(form)), None)
        told = recipe.get(form or "")
        size = told.get("size") if isinstance(told, dict) else told
        return cls(form, size if type(size) is int and 0 < size < 2**32 else None, bool(recipe.get("shuffle")))


MAX_SOURCES: Final = 100  # As many as people look at; the mixture of more is not told


@dataclass(frozen=True, slots=True)
class MixedSource:
    """One of the sources that are mixed."""

    name: str  # as it was given, a path mostly
    weight: float  # its share of the rows that come next, from 0 to 1; 0 where it is finished
    share: float | None  # its share of the rows drawn since the mixture began or changed; None where none was drawn
    rows: int  # how many rows these are
    finished: bool  # whether its end was met


def mixed_sources(source: Any) -> tuple[MixedSource, ...]:
    """Returns what the field `source` of a seal says of the mixture: a source each, in order.

    None where sources are not mixed by weights, where there are more than `MAX_SOURCES`, or where it cannot be.
    """
    if (weights := _recipe(source).get("weights")) is None:
        return ()
    told: list[Any] = [weights, *(source.get(name) for name in ("sources", "drawn", "finished"))]
    if not all(isinstance(one, list) and len(one) == len(weights) for one in told):
        return ()
    rows = list(zip(*told, strict=True))
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
    return named and _is_number(weight, 1e100) and weight > 0 and _COUNT.fits(count)  # no sum of so many overflows


@dataclass(frozen=True, slots=True)
class DealtByCost:
    """How rows were dealt to the data-parallel ranks: by the length in tokens that a field of theirs has.

    A micro batch has `micro_batch_size` rows of one rank; a token costs so much by itself, and so much a pair of them.
    """

    ranks: int
    micro_batch_size: int
    length_field: str
    cost_per_token: float
    cost_per_token_squared: float

    @classmethod
    def read(cls, source: Any) -> DealtByCost | None:
        """Returns what the field `source` of a seal says; None where it says nothing of it, or nothing that can be."""
        recipe = _recipe(source)
        ranks, size, name = (recipe.get(key) for key in ("balance", "micro_batch_size", "length_field"))
        costs = [recipe.get(key, 0.0) for key in ("cost_per_token", "cost_per_token_squared")]
        if not (_SIZE.fits(ranks) and _SIZE.fits(size) and isinstance(name, str)):
            return None
        if not all(_is_number(cost, math.inf) for cost in costs) or not any(costs):
            return None
        return cls(ranks, size, name, *map(float, costs))  # type: ignore[arg-type]
