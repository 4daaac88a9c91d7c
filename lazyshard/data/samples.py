"""From a row to a sample: encoded, kept for later epochs, or replaced where that fails."""

from __future__ import annotations

from typing import Any

from lazyshard.data.bad_samples import BadSamples, substitutes
from lazyshard.data.cache import SampleCache
from lazyshard.data.encode import Encoder
from lazyshard.errors import BadSample, ChunkCorrupt, RowInvalid, SkipSample
from lazyshard.storage import StreamReader


class SampleMaker:
    """Makes samples of rows.

    Args:
        reader: where substitutes are read.
        encoder: makes a sample of a row; None leaves rows as they are.
        bad: decides what happens to samples that cannot be read or encoded.
        cache: keeps encoded samples.
    """

    def __init__(self, reader: StreamReader, encoder: Encoder | None, bad: BadSamples, cache: SampleCache) -> None:
        self._reader = reader
        self._encode = encoder
        self._bad = bad
        self._cache = cache

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what this process has met and kept."""
        return self.__dict__ | {"_bad": self._bad.fresh(), "_cache": self._cache.fresh()}

    @property
    def bad_samples(self) -> int:
        """Different bad samples met by this process."""
        return len(self._bad)

    def forget_bad(self) -> None:
        """Starts counting bad samples anew."""
        self._bad = self._bad.fresh()

    def make(self, sample: int, row: dict[str, Any]) -> Any:
        """Encodes a row unless that was done before; returns a substitute's sample if it fails."""
        assert self._encode is not None
        kept = self._cache.get(sample)
        if kept is not None:
            return kept
        try:
            encoded = self._encode(row)
        except MemoryError:
            raise
        except Exception as cause:
            return self.substitute(sample, cause)
        self._cache.put(sample, encoded)
        return encoded

    def substitute(self, sample: int, cause: Exception) -> Any:
        """Returns another sample of the chunk, or raises what `on_bad_sample` says."""
        self._meet(sample, cause)
        chunk = self._reader.chunk(sample // self._reader.samples_per_chunk)
        for other in substitutes(sample, len(chunk), self._reader.samples_per_chunk):
            try:
                row = self._reader.read_published(other, other + 1)[0]
            except (ChunkCorrupt, RowInvalid) as also:
                self._meet(other, also)
                continue
            if self._encode is None:
                return row
            try:
                return self._encode(row)
            except MemoryError:
                raise
            except Exception as also:
                self._meet(other, also)
        raise BadSample(
            f"{chunk.path}: no usable substitute for sample {sample}, all rows that were tried are bad too. It was "
            f"bad by {type(cause).__name__}: {cause}",
            file=str(chunk.path),
            sample=sample,
            chunk=chunk.number,
        ) from cause

    def _meet(self, sample: int, cause: Exception) -> None:
        """Returns if a substitute is to be tried. A chunk that is damaged as a whole has none."""
        if isinstance(cause, SkipSample):
            self._bad.skip(sample, self._where(sample, cause))
            return
        if isinstance(cause, ChunkCorrupt) and cause.row is None:
            raise cause
        self._bad.meet(sample, self._where(sample, cause), cause)

    def _where(self, sample: int, cause: Exception) -> BadSample:
        number, row = divmod(sample, self._reader.samples_per_chunk)
        chunk = self._reader.chunk(number)
        byte, line, reason = chunk.offset(row), row + 1, f"{type(cause).__name__}: {cause}"
        if isinstance(cause, RowInvalid):
            # It knows of blank lines in foreign files, and where in the row it was.
            byte, line, reason = cause.byte or byte, cause.line or line, cause.reason or reason
        return BadSample(
            f"{chunk.path}: row {row} (line {line}, byte {byte}, sample {sample}): {reason}",
            file=str(chunk.path),
            sample=sample,
            chunk=number,
            row=row,
            byte=byte,
        )
