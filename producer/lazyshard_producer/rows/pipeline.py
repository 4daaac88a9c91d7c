"""From settings and a position to a reader: sources, mixing, recipe, shuffling and refusals put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import orjson

from lazyshard.plan.balance import Balance, Cost
from lazyshard.stream.watchdog import Watchdog
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.opening import open_source, source_kind, source_size
from lazyshard_producer.position import RunPosition, decode_position, plain_name, resume, source_names
from lazyshard_producer.rows.encoding import Form, form_of
from lazyshard_producer.rows.making import MakingReader
from lazyshard_producer.rows.mixing import Mixer
from lazyshard_producer.rows.reader import BegunUnit, PlainReader, Reader, RowStats
from lazyshard_producer.rows.recipe import Here, Maker, Workers, by_length, makes_rows
from lazyshard_producer.rows.refusals import Quarantine, Refusals
from lazyshard_producer.rows.sequences import Blocks, Splitter, Stripes, packing, shuffling
from lazyshard_producer.sources.source import Context, Source

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
        many = settings.workers > 0 and maker is not None
        self._workers = Workers(settings, settings.workers, form.carried) if many else None

        def open_at(index: int, entry: dict[str, Any] | None) -> Source:
            return open_source(settings.sources[index], entry, context)

        try:
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
        except BaseException:
            refusals.close()
            self._close_workers()
            raise
        if told is not None:
            # Behind the import of functions: where that fails, nothing goes on.
            warn(f"from here on rows are made or ordered in another way than before: {told}")
        self.names: Final = mixer.names
        self.stats: Final = RowStats(mixer, refusals, start, described, warn)
        begun = _begun_unit(start, settings, warn)
        self.reader: Reader = PlainReader(self.stats)
        if maker is not None:
            self.reader = MakingReader(
                self.stats,
                self._workers or Here(maker),
                begun=begun,
                blocks=blocks,
                measured=by_length(settings) or settings.pad > 0 or settings.measure is not None,
                stripes=_stripes(settings, self.stats, form, start, samples, begun),
                watchdog=watchdog,
            )

    def close(self) -> None:
        """Closes sources, workers and the quarantine. May be called twice."""
        self.stats.mixer.close()
        self.stats.refusals.close()
        self._close_workers()

    def _close_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None


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
