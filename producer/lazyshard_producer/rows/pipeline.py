"""The pipeline of a run: connects sources, recipe, shuffling and refusals, from settings and a position to batches.

A position is the place before a unit, and the number of published rows that were made of the unit. So no rows held in
memory have to be saved; a restart makes the rows of the unit again and compares them by digest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson

from lazyshard.format.records import QUARANTINE
from lazyshard.stream.waiting import Watchdog
from lazyshard_producer.configuration.settings import OPTIONS, SWIFT, Settings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.position import RunPosition, decode_position, resume, source_names
from lazyshard_producer.rows.encoding import form_of
from lazyshard_producer.rows.reader import Batch, Mixer
from lazyshard_producer.rows.recipe import Maker, Workers
from lazyshard_producer.rows.refusals import Quarantine, Refusals, warn_of_refused
from lazyshard_producer.rows.sequences import Splitter, Stripes, Units, make_batches
from lazyshard_producer.sources.source import Context

_MADE: Final = ("columns", "where", "transform", "embed", "shuffle", "seed", "weights", "pack", "length_field")
_LENGTHS: Final = ("measure", "pack_patches", "pack_buffer", "pack_buffer_bytes", "split", "pad")
# `lazyshard.format.seal` reads these.
_DEALT: Final = ("balance", "micro_batch_size", "cost_per_token", "cost_per_token_squared", "cost_per_patch")
_KINDS: Final = {"pack": "packs", "split": "sequences", "pad": "padded rows", "": "rows"}
"""The kind of items in a stream, by the option that makes them."""


class Pipeline:
    """Reads the rows of a run, starting at the source position of the last seal (None: there is no chunk).

    `samples` are published. Either `refusals` or `check_owner` is given. `close` may be called twice.
    """

    def __init__(
        self,
        settings: Settings,
        committed: Any,
        *,
        samples: int = 0,
        warn: Callable[[str], None],
        check_owner: Callable[[], Path] | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        # Warns, once it is started, if the filesystem, a source or a function does not respond.
        watchdog = self.watchdog = Watchdog(warn)
        out, sources, policy = Path(settings.out), settings.sources, settings.on_bad_row
        form = form_of(settings)
        check: Callable[[], object] = check_owner or (lambda: None)
        context = Context(out, settings.max_row_bytes, settings.samples_per_chunk, check, form.carried)
        described = describe(settings)
        start, names = RunPosition(sources=(), recipe=described), []
        if committed is not None:
            start, names = decode_position(committed, settings.out), source_names(committed)
        start = resume(start, names, [source.path for source in sources])
        start, changed = _same_recipe(start, described)
        makers: Maker | Workers | None = None
        # Weights alone only choose between rows.
        if settings.encode or described.keys() - {"weights"}:
            makers = Maker(settings, form.carried)
        if refusals is None:
            quarantine = None
            if policy == "quarantine":
                assert check_owner is not None
                quarantine = Quarantine(out, start.quarantine_bytes, check_owner=check_owner)
            refusals = Refusals(policy, settings.max_bad_rows, quarantine, start.refused, start.quarantine_bytes)
            refusals.tell = warn_of_refused(warn, "skipped" if quarantine is None else f"kept in {QUARANTINE}")
        with contextlib.ExitStack() as stack:
            stack.callback(refusals.close)
            if settings.workers and makers is not None:
                makers = Workers(settings, settings.workers, form.carried)
                stack.callback(makers.close)
            mixer = Mixer(settings, start, context, makers is not None, watchdog, warn, refusals, described)
            stack.callback(mixer.close)
            self.close: Final = stack.pop_all().close
        if changed is not None:
            # After importing the functions: if that fails, the run does not continue.
            warn(f"from here on rows are made or ordered differently: {changed}")
        self.mixer: Final = mixer
        self.read: Callable[[], Batch | None] = partial(_read_batch, mixer)
        """Returns the next rows, None at the end; raises as `Mixer.read` and `Refusals.take` do."""
        if makers is not None:
            kind = Stripes if settings.balance is not None else Splitter if settings.split else Units
            units = kind(mixer, settings, samples, arrays=form.arrays)
            self.read = partial(next, make_batches(mixer, makers, units), None)


def _read_batch(mixer: Mixer) -> Batch | None:
    """Returns the next rows of the sources unchanged, None at the end. Raises as `Mixer.read` does."""
    if (span := mixer.read()) is None:
        return None
    before = mixer.rows
    mixer.rows += len(span.lines)

    def after(index: int) -> RunPosition:
        return mixer.position(span.after(index, {**mixer.counts(), "rows": before + index + 1}))

    return Batch(mixer, span.lines, span.place, after, checked=False)


def describe(settings: Settings) -> dict[str, Any]:
    """Returns the settings that select, make and order rows, if set, in the form that positions keep."""
    found: dict[str, Any] = {name: getattr(settings, name, None) for name in (*_MADE, *_LENGTHS, *_DEALT)}
    found["columns"], found["embed"] = [list(pair) for pair in settings.columns], list(settings.embed)
    found["weights"] = [source.weight for source in settings.sources if source.weight is not None]
    if settings.measure:
        swift = {"encode": SWIFT, **settings.swift, "form": settings.form} if settings.measure == SWIFT else None
        measuring = {"measure": settings.measure, "field": settings.measure_field, "encoding": swift}
        # As it is read back from JSON, where pairs are lists.
        found["measure"] = orjson.loads(orjson.dumps(measuring))
    split = asdict(settings.splitting) if settings.splitting else {}
    found["split"] = {name: value for name, value in split.items() if value is not None}  # a token may be 0
    found["pad"] = settings.padding and asdict(settings.padding)
    if not settings.shuffle and settings.balance is None:
        del found["seed"]
    without_effect = {one.name for one in OPTIONS if one.needs and not any(map(found.get, one.needs.split()))}
    return {name: value for name, value in found.items() if value and name not in without_effect}


def changes(before: dict[str, Any], described: dict[str, Any]) -> dict[str, str]:
    """Returns the changed settings of the recipe, in words, by name.

    >>> changes({"pack": 10, "seed": 3}, {"pack": 20, "seed": 3})
    {'pack': 'pack (was 10, now 20)'}
    """
    each = ((name, before.get(name), described.get(name)) for name in {**before, **described})
    return {name: f"{name} (was {was!r}, now {now!r})" for name, was, now in each if was != now}


def _same_recipe(start: RunPosition, described: dict[str, Any]) -> tuple[RunPosition, str | None]:
    """Returns the start, and the changed settings of the recipe in words, None if unchanged. Raises SettingInvalid."""
    before = start.recipe
    if not (changed := changes(before, described)):
        return start, None
    names = ", ".join(changed.values())
    # If a source row makes several rows, or a buffer several packs, stripes may share a source row or buffer.
    goes_over = "balance" in before and bool({"transform", "pack"} & before.keys())
    if start.skip and (changed.keys() != {"weights"} or goes_over):
        why = f"the last chunk ends within rows that were made with other settings: {names}"
        option = f"--{next(iter(changed)).replace('_', '-')}"
        raise SettingInvalid(f"{why}; use the previous settings, or choose another --out", option=option)
    was, now = (next((kind for kind in _KINDS if kind in recipe), "") for recipe in (before, described))
    if was != now:
        option = f"--{was or now}"
        why = f"the stream holds {_KINDS[was]} and cannot continue with {_KINDS[now]}"
        raise SettingInvalid(f"{option}: {why}; use the previous settings, or choose another --out", option=option)
    if "weights" in changed and not start.skip:
        start = replace(start, drawn=(0,) * len(start.drawn))
    return start, names
