"""From a row to a sample: through the steps, encoded, kept for later epochs; or another row in its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from lazyshard.data.bad_samples import BadSamples
from lazyshard.data.cache import SampleCache
from lazyshard.data.encode_cache import BUSY, MISSING, CacheCounts, EncodeCache
from lazyshard.data.steps import RowSteps
from lazyshard.data.substitutes import SubstituteSearch
from lazyshard.errors import ChunkCorrupt, RowInvalid, SkipSample
from lazyshard.memory import raise_if_short
from lazyshard.plan import Gaps
from lazyshard.stream import StreamReader

__all__ = ["Met", "SampleMaker"]


class Met(NamedTuple):
    """What a process has met.

    Attributes:
        bad: different bad samples.
        dropped: samples drawn whose rows were dropped.
        filled: samples drawn in whose places other rows stand.
        cache: rows encoded and not, where a cache keeps what is made of them.
    """

    bad: int
    dropped: int
    filled: int
    cache: CacheCounts = CacheCounts()


class SampleMaker:
    """Makes samples of rows.

    Args:
        reader: where substitutes are read.
        steps: what is done with a row; none leave rows as they are.
        bad: decides what happens to samples that cannot be read or encoded.
        cache: keeps encoded samples.
        limit: the stream is taken to end there at the latest; None for no bound.
        shared: keeps them for all processes of the node; None if nothing does.
    """

    def __init__(
        self,
        reader: StreamReader,
        steps: RowSteps,
        bad: BadSamples,
        cache: SampleCache,
        limit: int | None,
        shared: EncodeCache | None = None,
    ) -> None:
        self._reader = reader
        self._steps = steps
        self._cache = cache
        self._shared = shared
        self._substitutes = SubstituteSearch(reader, bad, limit)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what this process has kept."""
        return self.__dict__ | {"_cache": self._cache.fresh()}

    @property
    def encodes(self) -> bool:
        """Whether samples are made of rows; otherwise rows are samples."""
        return bool(self._steps)

    @property
    def takes_lines(self) -> bool:
        """Whether samples are made `of_lines`, which need not be parsed where what was made of them is kept."""
        return self._shared is not None

    @property
    def met(self) -> Met:
        """What this process has met."""
        counts = CacheCounts() if self._shared is None else self._shared.counts
        found = self._substitutes
        return Met(len(found.bad), found.bad.skipped, found.filled, counts)

    def forget_met(self) -> None:
        """Starts counting anew."""
        self._substitutes.forget_met()
        if self._shared is not None:
            self._shared.forget_counts()

    def leave_out(self, samples: Gaps) -> None:
        """Takes no substitute from among samples that are not to be drawn."""
        self._substitutes.left_out = samples

    def make(self, sample: int, row: dict[str, Any]) -> Any:
        """Makes a sample of a row unless that was done before; returns a substitute's if it fails or is dropped."""
        kept = self._cache.get(sample)
        if kept is not None:
            return kept
        try:
            encoded = self._steps(row, sample)
        except Exception as cause:
            raise_if_short(cause)
            return self.substitute(sample, cause)
        self._cache.put(sample, encoded)
        return encoded

    def of_lines(self, lines: list[bytes], samples: Iterable[int]) -> list[Any]:
        """Makes samples of checked lines, or takes what the shared cache has kept; substitutes as `make` does.

        Rows that another process is encoding are left for the end: peers that draw the same batch share the work.

        Raises: as `substitute`.
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
        assert shared is not None
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

    def _made(self, sample: int, row: dict[str, Any]) -> tuple[Any, Exception | None]:
        """Returns what is made of a row, or why it cannot be trained."""
        try:
            return self._steps(row, sample), None
        except Exception as cause:
            raise_if_short(cause)
            return None, cause

    def substitute(self, sample: int, cause: Exception) -> Any:
        """Returns what is trained in the place of a sample: another one of its chunk.

        Where no row of its chunk can be, and some are dropped, one of the chunks behind it, which are waited for if
        need be; at the end of the stream, of those before it.

        Raises:
            ChunkCorrupt, RowInvalid, BadSample, TooManyBadSamples: what `on_bad_sample` says; or the rows that were
                looked at are bad too.
            NothingKept: so many rows in a row were dropped.
            WaitTimeout: a later chunk was not published in time.
        """
        return self._substitutes.find(sample, cause, self._try)

    def _try(self, sample: int) -> tuple[Any, Exception | None]:
        """Returns what is made of a sample, or why it cannot be trained."""
        try:
            if self._shared is None:
                return self._made(sample, self._reader.read_published(sample, sample + 1)[0])
            line = self._reader.lines_published(sample, sample + 1)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        return self._through_cache(sample, line, wait=True)
