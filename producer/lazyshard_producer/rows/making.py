"""Rows made of rows: by a recipe, in this process or in workers, then shuffled, packed, cut or dealt if asked for.

A position is the place before a unit, a source row or a block of them, with how many of the rows made of it are
published. So nothing of what is held here has to be saved; what the next run makes of the unit is compared by digest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from lazyshard.stream.watchdog import Watchdog
from lazyshard_producer.position import RunPosition
from lazyshard_producer.rows.mixing import MixPosition, SourceSpan
from lazyshard_producer.rows.reader import Batch, BegunUnit, MadeRow, RowStats, Unit, line_size
from lazyshard_producer.rows.recipe import Here, MadeOfRow, Workers
from lazyshard_producer.rows.sequences import Blocks, Splitter, Stripes, made_rows

READY_S: Final = 0.1  # how long to wait for workers at a time: signals are looked at in between


class MakingReader:
    """Gives rows made of rows, and shuffled or packed in blocks if asked for."""

    def __init__(
        self,
        stats: RowStats,
        makers: Here | Workers,
        *,
        begun: BegunUnit | None,
        blocks: Blocks | None,
        measured: bool,
        stripes: Stripes | Splitter | None,
        watchdog: Watchdog,
    ) -> None:
        self._stats = stats
        self._makers = makers
        self._unit_begun = begun if stripes is None else None
        self._blocks = blocks
        self._measured = measured
        self._stripes = stripes
        self._watchdog = watchdog
        self._begun = stats.rows  # rows in work, and before them
        self._under_way: deque[tuple[SourceSpan, int, Any]] = deque()
        self._piece: SourceSpan | None = None
        self._next = 0
        self._finished = False
        self._all = self._batches()
        self._rows: list[MadeRow] = []
        self._unit: dict[int, int] = {}  # source rows of which `_rows` are made, by source
        self._held = 0  # of these
        self._bytes = 0  # of `_rows`
        self._before = self._last = stats.here()

    def read(self) -> Batch | None:
        """Returns what was made of the next source row, or the next block."""
        return next(self._all, None)

    def _batches(self) -> Iterator[Batch]:
        while True:
            found, nothing = self._take(), True
            if found is None and self._finished and not self._under_way:
                break
            for batch in () if found is None else self._made(*found):
                yield batch
                nothing = False
            if nothing:  # for now; signals are looked at in between
                yield self._batch(Unit(self._stats, (), self._before, {}), 0, self._before)
        if self._held or self._unit_begun is not None:
            yield from self._end_block()
        if self._stripes is not None and (rest := self._stripes.rest()) is not None:
            yield rest

    def _advance(self) -> SourceSpan | None:
        """Returns the piece in hand, of which there may be no row left at the moment; None when all is read."""
        if not self._finished and (self._piece is None or self._next == len(self._piece.lines)):
            self._piece, self._next = self._stats.mixer.read(), 0
            self._finished = self._piece is None
        return self._piece

    def _take(self) -> tuple[SourceSpan, int, list[MadeOfRow]] | None:
        """Sends rows to be made; returns what was made of those sent first, if it is ready, their piece and index."""
        while len(self._under_way) < self._makers.most and (piece := self._advance()) is not None:
            first = self._next
            stop = min(len(piece.lines), first + self._makers.rows)
            if first == stop:  # nothing at the moment
                break
            self._watchdog.ask(partial(_in_words, piece, first))
            try:
                work = self._makers.submit(piece.lines[first:stop], self._begun)
            finally:
                self._watchdog.answered()
            self._under_way.append((piece, first, work))
            self._begun += stop - first
            self._next = stop
        if not self._under_way:
            return None
        piece, first, work = self._under_way[0]
        made = self._makers.result(work, READY_S)
        if made is None:
            return None
        self._under_way.popleft()
        return piece, first, made

    def _made(self, piece: SourceSpan, first: int, made: list[MadeOfRow]) -> Iterator[Batch]:
        """Deals with source rows one by one, as the batches made of them are asked for."""
        for index, row in enumerate(made, first):
            place = piece.place(index)
            # Sources may have come back since the row before.
            before = self._last if index else replace(piece.before, counts=self._last.counts)
            if not self._held and not index:
                self._before = before
            self._stats.rows += 1
            if row.duplicate:
                self._stats.count_duplicate(place)
            if row.refused is not None:
                self._stats.refusals.take(row.refused, place, piece.lines[index])
            self._last = piece.after(index, self._stats.counts())
            rows = made_rows(row, place)
            if self._stripes is not None and self._blocks is None:
                yield from self._stripes.add(rows, {piece.source: 1}, before, self._last)
                continue
            self._rows += rows
            self._bytes += sum(line_size(one.line) for one in rows)
            self._held += 1
            self._unit[piece.source] = self._unit.get(piece.source, 0) + 1
            if self._is_full():
                yield from self._end_block()

    def _is_full(self) -> bool:
        if self._unit_begun is not None:
            return self._held >= self._unit_begun.rows
        if self._blocks is None:
            return True
        left = None if self._stripes is None else self._stripes.source_rows_left
        if self._held >= (self._blocks.rows if left is None else min(left, self._blocks.rows)):
            return True
        return self._blocks.most_bytes is not None and self._bytes >= self._blocks.most_bytes

    def _end_block(self) -> Iterator[Batch]:
        """Yields what is held, shuffled or packed if it is to be; or what is dealt now that this is there."""
        rows: Sequence[MadeRow] = self._rows
        if self._blocks is not None:
            rows = self._blocks.arrange(rows, self._stats.blocks)
            self._stats.blocks += 1
            self._last = replace(self._last, counts={**self._last.counts, "blocks": self._stats.blocks})
        before, after, unit = self._before, self._last, self._unit
        self._before = after
        self._rows, self._held, self._bytes, self._unit = [], 0, 0, {}
        if self._stripes is not None:
            yield from self._stripes.add(rows, unit, before, after)
            return
        begun, self._unit_begun = self._unit_begun, None
        skipped = begun.skip if begun is not None and begun.find(row.data for row in rows) else 0
        batch = self._batch(Unit(self._stats, rows, before, unit), skipped, after)
        if batch.lines:
            yield batch

    def _batch(self, unit: Unit, skipped: int, after: MixPosition) -> Batch:
        rows = unit.made[skipped:]

        def position(index: int) -> RunPosition:
            last = index == len(rows) - 1
            return self._stats.position(after) if last else unit.position(skipped + index + 1)

        tokens = [row.tokens for row in rows] if self._measured else None
        return Batch(self._stats, [row.line for row in rows], lambda index: rows[index].place, position, tokens=tokens)


def _in_words(piece: SourceSpan, index: int) -> str:
    place = piece.place(index)
    return f"the functions that make rows, at {place.file}:{place.line}"
