"""Time to the first sample of a resumed run, the cost of its arithmetic, and how other loaders resume.

- A fresh process constructs the data set, loads the state and reads one sample, in a stream of a million chunks of
  which only those are there that are read. The clock, from the constructor on; imports are not counted. Memory is the
  peak above that of an interpreter which has imported torch and numpy and nothing of ours.
- Which sample a position draws, one call for each and for arrays, and after a rescale of 1,024 ranks: processor time.
- Construction and resume to the first batch of 8, beside other loaders on the same rows: `bench_resume_loaders`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from lazyshard import LazyShardedDataset, Order
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from scripts.benchmarks.bench_data import BATCH, SAMPLES_PER_CHUNK, SparseStream, make_stream, write_offsets
from scripts.benchmarks.bench_harness import Benchmark, Failed, Figures, Missing, Row, Setting, Side, bound, child
from scripts.benchmarks.bench_process import timed

WINDOW: Final = 4
_HISTORY: Final = (8, 6, 7, 5)
"""Numbers of ranks that take turns in a long history."""

_LATE: Final = 12_501_250
"""Draws of 8 ranks: 10^8 samples, in the middle of a chunk and of a window of 4."""

_SCALAR: Final = 20_000
_VECTOR: Final = 240_000
"""About so many samples a round."""


@dataclass(frozen=True)
class Stop:
    """A run that continues with another number of ranks.

    Attributes:
        draws: samples that each of the ranks before has drawn.
        saved: ranks before.
        ranks: ranks from here on.
        window: chunks shuffled together.
        live: whether the stream is still being produced.
        rescales: times that the ranks had changed before.
    """

    draws: int = _LATE
    saved: int = 8
    ranks: int = 6
    window: int = WINDOW
    live: bool = False
    rescales: int = 0

    def settings(self, stream: SparseStream) -> tuple[dict[str, Any], int]:
        """Makes the chunk that will be read; returns the arguments of `first_sample`, and the row that it reads."""
        window = self.window * SAMPLES_PER_CHUNK and self.window
        order = Order(shuffle_window=window)
        # A chunk that should not be read fails at once.
        arguments: dict[str, Any] = {"max_total_samples": stream.total if self.live else None, "max_wait": 1}
        state: dict[str, Any] | None = None
        consumed = 0
        before = [_HISTORY[number % len(_HISTORY)] for number in range(self.rescales)]
        for ranks in (*before, self.saved):
            dataset = LazyShardedDataset(stream.directory, dp_rank=0, dp_size=ranks, order=order, **arguments)
            if state:
                dataset.load_state_dict(state)
            consumed += ranks * (self.draws // (self.rescales + 1))
            state = dataset.state_dict(consumed)
        arguments |= {"dp_rank": self.ranks // 2, "dp_size": self.ranks}
        goes_on = LazyShardedDataset(stream.directory, order=order, **arguments)
        goes_on.load_state_dict(state or {})
        row = stream.add(goes_on.draw(goes_on.rank_indices[0]).sample)
        return {"directory": str(stream.directory), "window": window, "arguments": arguments, "state": state}, row


def variants() -> dict[str, tuple[Rules, tuple[Part, ...], int]]:
    """Returns what is measured of the arithmetic: a course, and how many positions of its last part are drawn."""
    rules = Rules(SAMPLES_PER_CHUNK, WINDOW * SAMPLES_PER_CHUNK)
    left = (rules.span - _LATE % rules.span) * 8
    rescaled = (Part(8, draws=_LATE), Part(6))
    often = (Part(8, draws=_LATE), Part(6, draws=100), Part(7, draws=100), Part(5))
    return {
        "in order": (Rules(SAMPLES_PER_CHUNK, 0), (Part(8),), _VECTOR // 8),
        "windows": (rules, (Part(8),), _VECTOR // 8),
        "windows, carried over": (rules, rescaled, left // 6),
        "windows, carried over four times": (rules, often, (left - 6 * 100 - 7 * 100) // 5),
    }


def arithmetic(rules: Rules, parts: tuple[Part, ...], count: int, total: int, seeds: itertools.count[int]) -> Figures:
    """Returns what a sample takes: one rank's positions, a call each, and all ranks' in one call."""
    # Another seed each time: else permutations would be known from the time before.
    course = Course(Rules(rules.unit, rules.window, next(seeds)), parts)
    first = _LATE if len(parts) == 1 else 0
    lane, draw = course.dp // 2, course.draw

    def one_by_one() -> None:
        for position in range(first, first + min(count, _SCALAR)):
            draw(lane, position, total)

    def at_once() -> None:
        course.draws(np.arange(course.dp)[:, None], np.arange(first, first + count), total)

    one = timed(one_by_one, min(count, _SCALAR))["processor us"]
    many = timed(at_once, count * course.dp)["processor us"]
    return {"processor us": one, "processor ns in arrays": many * 1e3}


def rescale(before: int, after: int, total: int, seeds: itertools.count[int]) -> Figures:
    """Returns what all ranks' first 4,000 samples take when nearly a whole window is carried over to them."""
    parts = (Part(before, draws=97_650 // (WINDOW * SAMPLES_PER_CHUNK) * WINDOW * SAMPLES_PER_CHUNK + 345), Part(after))
    course = Course(Rules(SAMPLES_PER_CHUNK, WINDOW * SAMPLES_PER_CHUNK, next(seeds)), parts)
    work = functools.partial(course.draws, np.arange(after)[:, None], np.arange(WINDOW * SAMPLES_PER_CHUNK), total)
    return {"processor ms": timed(work)["processor us"] / 1e3}


class Resumes:
    """lazyshard and other loaders that resume after the same number of the same rows."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._rows = setting.size(200_000, 2_000)
        self.consumed = setting.size(150_000, 1_500)

    def side(self, loader: str, package: str = "", saved: int = 1, resumed: int = 1) -> Side:
        """Returns a side: the first turn leaves the state."""
        place = self._setting.place

        @functools.cache
        def stopped() -> dict[str, Any]:
            data = make_stream(place / "rows", self._rows)
            step = saved * BATCH
            settings = {
                "loader": loader,
                "data": str(data),
                "offsets": str(write_offsets(data, place / "offsets")),
                "state": str(place / f"{loader}_{saved}.state"),
                "consumed": self.consumed // step * step,
                "saved": saved,
                "rank": resumed // 2,
                "ranks": resumed,
            }
            self._child(settings | {"save": True}, package)
            return settings | {"save": False}

        def turn() -> Figures:
            settings = stopped()
            found = self._child(settings, package)
            expected = self._expected(settings)
            if found["ids"] != expected:
                raise (Missing if package else Failed)(f"{loader} continued with {found['ids']}, expected {expected}")
            return {unit: found[unit] for unit in ("ms", "processor ms")}

        return turn

    def _child(self, settings: dict[str, Any], package: str) -> dict[str, Any]:
        python = self._setting.python(package) if package else ""
        return child("bench_resume_loaders.resume", {"settings": settings}, self._setting.place, python)

    def _expected(self, settings: dict[str, Any]) -> list[int]:
        """Returns the ids of the rows that are next; where ranks change, by what the data set itself says."""
        if settings["ranks"] == 1:
            return list(range(settings["consumed"], settings["consumed"] + BATCH))
        from scripts.benchmarks.bench_resume_loaders import opened, saved_state

        dataset = opened(settings, settings["rank"], settings["ranks"])
        dataset.load_state_dict(saved_state(settings))
        return [dataset.draw(index).sample for index in dataset.rank_indices[:BATCH]]


def prepare(setting: Setting) -> Mapping[str, Side]:
    """Returns the sides."""
    chunks = setting.size(1_000_000, 200_000)
    seeds = itertools.count()

    @functools.cache
    def stream(live: bool) -> SparseStream:
        return SparseStream(Path(setting.place, f"live_{live}"), chunks, ended=not live)

    def first(stop: Stop) -> Side:
        @functools.cache
        def settings() -> tuple[dict[str, Any], int]:
            return stop.settings(stream(stop.live))

        def turn() -> Figures:
            arguments, row = settings()
            found = child("bench_resume_loaders.first_sample", arguments, setting.place)
            if found["id"] != row:
                raise Failed(f"{stop}: expected row {row} of a chunk, read row {found['id']}")
            return found

        return turn

    def drawing(name: str) -> Side:
        return lambda: arithmetic(*variants()[name], chunks * SAMPLES_PER_CHUNK, seeds)

    def rescaling(before: int, after: int) -> Callable[[], Figures]:
        return lambda: rescale(before, after, chunks * SAMPLES_PER_CHUNK, seeds)

    beside = Resumes(setting)
    return {
        "8 to 6 ranks after 0 samples": first(Stop(0)),
        "8 to 6 ranks after 10^8": first(Stop()),
        "8 to 6 ranks after 10^8, live": first(Stop(live=True)),
        "8 to 6 ranks after 100 rescales": first(Stop(rescales=100)),
        "1,024 to 768 ranks": first(Stop(97_650, 1024, 768)),
        **{name: drawing(name) for name in variants()},
        "rescale, 1,024 to 768": rescaling(1024, 768),
        "rescale, 768 to 1,024": rescaling(768, 1024),
        "LazyShardedDataset": beside.side("ours"),
        "LazyShardedDataset, 4 to 3 ranks": beside.side("ours", saved=4, resumed=3),
        "torchdata, map-style": beside.side("stateful_map", "torchdata"),
        "torchdata, iterable with a state": beside.side("stateful_stateful", "torchdata"),
        "torchdata, iterable without": beside.side("stateful_iterable", "torchdata"),
        "datasets": beside.side("hugging_face", "datasets"),
        "MosaicML streaming": beside.side("mosaicml", "mosaicml-streaming"),
    }


_MS: Final = 20.0
_MB: Final = 50.0
_US: Final = 2.0
_NS: Final = 50.0
_RESCALE_MS: Final = 1000.0

_LATEST: Final = "8 to 6 ranks after 10^8"
_OURS: Final = "LazyShardedDataset"

RESUME: Final = Benchmark(
    "resume",
    "the first sample of a resumed run in 10^9 samples; a sample by arithmetic; a rescale; beside other loaders",
    (
        bound("first", _LATEST, _MS, "ms"),
        Row("position", _LATEST, "8 to 6 ranks after 0 samples", "processor ms", 0.7),
        bound("live", f"{_LATEST}, live", _MS, "ms"),
        bound("rescales", "8 to 6 ranks after 100 rescales", _MS, "ms"),
        bound("many-ranks", "1,024 to 768 ranks", _MS, "ms"),
        bound("memory", _LATEST, _MB, "MB"),
        *(bound(f"call.{name.replace(' ', '-').replace(',', '')}", name, _US, "processor us") for name in variants()),
        *(
            bound(f"arrays.{name.replace(' ', '-').replace(',', '')}", name, _NS, "processor ns in arrays")
            for name in variants()
        ),
        bound("fewer-ranks", "rescale, 1,024 to 768", _RESCALE_MS, "processor ms"),
        bound("more-ranks", "rescale, 768 to 1,024", _RESCALE_MS, "processor ms"),
        Row("other-ranks", "LazyShardedDataset, 4 to 3 ranks", _OURS, "processor ms", 0.7),
        Row("torchdata-map", _OURS, "torchdata, map-style", "ms", 1.0),
        Row("torchdata-with-state", _OURS, "torchdata, iterable with a state", "ms"),
        Row("torchdata-without", _OURS, "torchdata, iterable without", "ms", 1.0),
        Row("datasets", _OURS, "datasets", "ms", 1.0),
        Row("mosaicml-streaming", _OURS, "MosaicML streaming", "ms", 1.0),
    ),
    prepare,
)
