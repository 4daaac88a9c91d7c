"""From settings and a position to a reader: sources, mixing, recipe, shuffling and refusals put together.

A position is the place before a unit, a source row or a block of them, with how many of the rows made of it are
published. So nothing of what is held here has to be saved; what the next run makes of the unit is compared by digest.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson

from lazyshard.plan.balance import Balance, Cost
from lazyshard.stream.waiting import Watchdog
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.opening import open_source, source_kind, source_size
from lazyshard_producer.position import RunPosition, decode_position, plain_name, resume, source_names
from lazyshard_producer.rows.encoding import Form, form_of
from lazyshard_producer.rows.mixing import Mixer, MixPosition, SourceSpan
from lazyshard_producer.rows.reader import Batch, BegunUnit, MadeRow, PlainReader, Reader, RowStats, Unit, line_size
from lazyshard_producer.rows.recipe import MadeOfRow, Maker, Workers, by_length, makes_rows
from lazyshard_producer.rows.refusals import Quarantine, Refusals
from lazyshard_producer.rows.sequences import Blocks, Splitter, Stripes, made_rows, packing, shuffling
from lazyshard_producer.sources.source import Context, Source

READY_S: Final = 0.1  # how long to wait for workers at a time: signals are looked at in between


class MakingReader:
    """Gives rows made of rows, and shuffled or packed in blocks if asked for."""

    def __init__(
        self,
        stats: RowStats,
        makers: Maker | Workers,
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


_KINDS: Final = {"pack": "packs", "split": "sequences", "pad": "padded rows", "": "rows"}
"""What a stream can hold, by the option that makes it."""

_NO_END: Final = 1 << 62
"""Rows of a unit that never ends: how many source rows a stripe or a pack buffer takes shows only as they are made."""


class Pipeline:
    """What gives the rows of a run, from the source position of the last seal on (None: there is no chunk).

    `samples` are published. Who gives no `refusals` gives `check_owner`; see `Quarantine`.
    """

    def __init__(
        self,
        settings: Settings,
        committed: Any,
        *,
        samples: int = 0,
        warn: Callable[[str], None],
        check_owner: Callable[[], Path] | None = None,
        watchdog: Watchdog | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        watchdog = watchdog or Watchdog()
        context = Context(
            Path(settings.out), settings.max_row_bytes, settings.samples_per_chunk, check_owner or (lambda: None)
        )
        paths = [source.path for source in settings.sources]
        start, names = RunPosition(sources=()), []
        if committed is not None:
            start, names = decode_position(committed, settings.out), source_names(committed)
        start = resume(start, names, paths)
        form = form_of(settings)
        blocks, described = _blocks(settings), describe(settings)
        told = None
        if committed is not None:
            start, told = _same_recipe(start, described)
        maker = Maker(settings, form.carried) if makes_rows(settings) or blocks is not None else None
        if refusals is None:
            quarantine = None
            if settings.on_bad_row == "quarantine":
                assert check_owner is not None
                quarantine = Quarantine(Path(settings.out), start.quarantine_bytes, check_owner=check_owner)
            policy, most = settings.on_bad_row, settings.max_bad_rows
            refusals = Refusals(policy, most, quarantine, start.refused, start.quarantine_bytes)

        def open_at(index: int, entry: dict[str, Any] | None) -> Source:
            return open_source(settings.sources[index], entry, context)

        with contextlib.ExitStack() as stack:
            stack.callback(refusals.close)
            makers: Maker | Workers | None = maker
            if settings.workers and maker is not None:
                makers = Workers(settings, settings.workers, form.carried)
                stack.callback(makers.close)
            mixer = Mixer(
                open_at,
                paths,
                [source.weight for source in settings.sources if source.weight is not None] or None,
                start,
                weights_before=start.recipe.get("weights"),
                block=_NO_END if by_length(settings) else settings.shuffle,
                sizes=[source_size(source) for source in settings.sources],
                ahead=maker is not None,
                watchdog=watchdog,
                most=None if settings.rate is None else max(1, int(settings.rate)),
                empty=lambda name: warn(f"{name}: holds no rows"),
            )
            stack.callback(mixer.close)
            self._open = stack.pop_all()
        if told is not None:
            # Behind the import of functions: where that fails, nothing goes on.
            warn(f"from here on rows are made or ordered in another way than before: {told}")
        self.names: Final = mixer.names
        self.stats: Final = RowStats(mixer, refusals, start, described, warn)
        begun = _begun_unit(start, settings, warn)
        self.reader: Reader = PlainReader(self.stats)
        if makers is not None:
            self.reader = MakingReader(
                self.stats,
                makers,
                begun=begun,
                blocks=blocks,
                measured=by_length(settings) or settings.pad > 0 or settings.measure is not None,
                stripes=_stripes(settings, self.stats, form, start, samples, begun),
                watchdog=watchdog,
            )

    def close(self) -> None:
        """Closes sources, workers and the quarantine. May be called twice."""
        self._open.close()


def _blocks(settings: Settings) -> Blocks | None:
    if settings.pack:
        return packing(settings.pack_buffer, settings.pack_buffer_bytes, settings.pack)
    return shuffling(settings.shuffle, settings.seed) if settings.shuffle else None


def _stripes(
    settings: Settings, stats: RowStats, form: Form, start: RunPosition, samples: int, begun: BegunUnit | None
) -> Stripes | Splitter | None:
    if settings.balance is not None:
        balance = Balance(settings.balance, settings.samples_per_chunk, settings.micro_batch_size, settings.seed)
        cost = Cost(settings.cost_per_token, settings.cost_per_token_squared)
        return Stripes(stats, balance, cost, samples=samples, begun=begun, lead=start.lead)
    if settings.splitting is not None:
        follows = samples > 0
        return Splitter(stats, settings.splitting, arrays=form.arrays, follows=follows, begun=begun, cut=start.cut)
    return None


def _begun_unit(start: RunPosition, settings: Settings, warn: Callable[[str], None]) -> BegunUnit | None:
    if not start.skip:
        return None
    sources = [source for source, rows in zip(settings.sources, start.unit, strict=True) if rows]
    return BegunUnit(
        names=[plain_name(source.path) for source in sources],
        rows=sum(start.unit),
        skip=start.skip,
        digest=start.skipped,
        new=all(source.resume == "append" and source_kind(source) == "stdin" for source in sources),
        warn=warn,
    )


def describe(settings: Settings) -> dict[str, Any]:
    """Returns the settings by which rows are chosen, made and ordered, as positions keep them: those that are set."""
    packed = bool(settings.pack)
    found: dict[str, Any] = {
        "columns": [list(pair) for pair in settings.columns],
        "where": settings.where,
        "transform": settings.transform,
        "shuffle": settings.shuffle,
        "seed": settings.seed if settings.shuffle or settings.balance else None,
        "weights": [source.weight for source in settings.sources if source.weight is not None],
        "pack": settings.pack,
        "length_field": packed and settings.length_field,
        # As JSON gives it back: pairs are lists there.
        "measure": settings.measuring and orjson.loads(orjson.dumps(asdict(settings.measuring))),
        "pack_buffer": packed and settings.pack_buffer,
        "pack_buffer_bytes": packed and settings.pack_buffer_bytes,
        # A token may have the number 0.
        "split": settings.splitting
        and {name: value for name, value in asdict(settings.splitting).items() if value is not None},
        "pad": settings.padding and asdict(settings.padding),
    }
    if settings.balance is not None:
        # As `lazyshard.format.seal` reads it.
        for name in ("balance", "micro_batch_size", "length_field", "cost_per_token", "cost_per_token_squared"):
            found[name] = getattr(settings, name)
    return {name: value for name, value in found.items() if value}


def changes(before: dict[str, Any], described: dict[str, Any]) -> dict[str, str]:
    """Returns in words, by name, each setting in which rows are made otherwise than before.

    >>> changes({"pack": 10, "seed": 3}, {"pack": 20, "seed": 3})
    {'pack': 'pack (was 10, now 20)'}
    """
    return {
        name: f"{name} (was {before.get(name)!r}, now {described.get(name)!r})"
        for name in {**before, **described}
        if before.get(name) != described.get(name)
    }


def _same_recipe(start: RunPosition, described: dict[str, Any]) -> tuple[RunPosition, str | None]:
    """Returns the start, and in which settings rows are made otherwise than before; None where in none."""
    before = start.recipe
    told = changes(before, described)
    if not told:
        return start, None
    changed, names = list(told), ", ".join(told.values())
    # Stripes of which several rows are made of one source row, or packs of one buffer, go over into each other.
    goes_over = "balance" in before and bool({"transform", "pack"} & before.keys())
    if start.skip and (set(changed) != {"weights"} or goes_over):
        raise SettingInvalid(
            f"rows are to be made in another way than those of which the last chunk holds a part: {names}; go on with "
            f"the settings of before, or choose another --out",
            option=f"--{changed[0].replace('_', '-')}",
        )
    was, now = (next((kind for kind in _KINDS if kind in recipe), "") for recipe in (before, described))
    if was != now:
        option = f"--{was or now}"
        raise SettingInvalid(
            f"{option}: the stream holds {_KINDS[was]}, and would hold {_KINDS[now]} from here on, and it is all of "
            f"one kind; go on as before, or choose another --out",
            option=option,
        )
    if "weights" in changed and not start.skip:
        start = replace(start, drawn=(0,) * len(start.drawn))
    return start, names
