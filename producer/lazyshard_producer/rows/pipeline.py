"""From settings and a position to a reader: sources, mixing, recipe, shuffling and refusals put together.

A position is the place before a unit, a source row or a block of them, with how many of the rows made of it are
published. So nothing of what is held here has to be saved; what the next run makes of the unit is compared by digest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson

from lazyshard.plan.balance import Balance, Cost
from lazyshard.stream.waiting import Watchdog
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.opening import open_source, source_kind
from lazyshard_producer.position import RunPosition, decode_position, plain_name, resume, source_names
from lazyshard_producer.rows.encoding import Form, form_of
from lazyshard_producer.rows.mixing import Mixer
from lazyshard_producer.rows.reader import BegunUnit, Reader, RowStats
from lazyshard_producer.rows.recipe import Maker, Workers, by_length
from lazyshard_producer.rows.refusals import Quarantine, Refusals
from lazyshard_producer.rows.sequences import Blocks, MakingReader, Splitter, Stripes, Units, pack, shuffle
from lazyshard_producer.sources.source import Context

_KINDS: Final = {"pack": "packs", "split": "sequences", "pad": "padded rows", "": "rows"}
"""What a stream can hold, by the option that makes it."""


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
        out, sources = Path(settings.out), settings.sources
        context = Context(out, settings.max_row_bytes, settings.samples_per_chunk, check_owner or (lambda: None))
        start, names = RunPosition(sources=()), []
        if committed is not None:
            start, names = decode_position(committed, settings.out), source_names(committed)
        start = resume(start, names, [source.path for source in sources])
        form, described, told = form_of(settings), describe(settings), None
        if committed is not None:
            start, told = _same_recipe(start, described)
        blocks: Blocks | None = None
        if settings.pack:
            blocks = Blocks(settings.pack_buffer, settings.pack_buffer_bytes, partial(pack, settings.pack))
        elif settings.shuffle:
            blocks = Blocks(settings.shuffle, None, partial(shuffle, settings.seed))
        makers: Maker | Workers | None = None
        made = (settings.columns, settings.where, settings.transform, settings.encode, settings.measure)
        if blocks is not None or by_length(settings) or settings.split or settings.pad or any(made):
            makers = Maker(settings, form.carried)
        if refusals is None:
            quarantine = None
            if settings.on_bad_row == "quarantine":
                assert check_owner is not None
                quarantine = Quarantine(out, start.quarantine_bytes, check_owner=check_owner)
            policy, most = settings.on_bad_row, settings.max_bad_rows
            refusals = Refusals(policy, most, quarantine, start.refused, start.quarantine_bytes)
        with contextlib.ExitStack() as stack:
            stack.callback(refusals.close)
            if settings.workers and makers is not None:
                makers = Workers(settings, settings.workers, form.carried)
                stack.callback(makers.close)
            mixer = Mixer(
                settings,
                start,
                lambda index, entry: open_source(sources[index], entry, context),
                # How many source rows a stripe or a pack buffer takes shows only as they are made.
                block=1 << 62 if by_length(settings) else settings.shuffle,
                ahead=makers is not None,
                watchdog=watchdog,
                warn=warn,
            )
            stack.callback(mixer.close)
            self._open = stack.pop_all()
        if told is not None:
            # Behind the import of functions: where that fails, nothing goes on.
            warn(f"from here on rows are made or ordered in another way than before: {told}")
        self.names: Final = mixer.names
        self.stats: Final = RowStats(mixer, refusals, start, described, warn)
        self.reader = Reader(self.stats)
        if makers is not None:
            units = _units(settings, self.stats, form, start, samples)
            self.reader = MakingReader(self.stats, makers, units, blocks, watchdog)

    def close(self) -> None:
        """Closes sources, workers and the quarantine. May be called twice."""
        self._open.close()


def _units(settings: Settings, stats: RowStats, form: Form, start: RunPosition, samples: int) -> Units:
    begun: BegunUnit | None = None
    if start.skip:
        sources = [source for source, rows in zip(settings.sources, start.unit, strict=True) if rows]
        names = ", ".join(plain_name(source.path) for source in sources)
        new = all(source.resume == "append" and source_kind(source) == "stdin" for source in sources)
        begun = BegunUnit(names, sum(start.unit), start.skip, start.skipped, new, stats.warn)
    if settings.balance is not None:
        balance = Balance(settings.balance, settings.samples_per_chunk, settings.micro_batch_size, settings.seed)
        cost = Cost(settings.cost_per_token, settings.cost_per_token_squared)
        return Stripes(stats, begun, balance, cost, samples=samples, lead=start.lead)
    if settings.splitting is not None:
        follows = samples > 0
        return Splitter(stats, begun, settings.splitting, arrays=form.arrays, follows=follows, cut=start.cut)
    measured = settings.pack > 0 or settings.pad > 0 or settings.measure is not None
    return Units(stats, begun, measured=measured)


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
