"""`streaming_shard`: one shard of any iterable, whose elements are selected before any expensive processing."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from inspect import iscoroutinefunction
from operator import methodcaller
from typing import Any, Final, NamedTuple

from torch import Generator
from torch.utils.data import IterableDataset, get_worker_info

from lazyshard.data.samples import FILL_ROWS, BadRowCount
from lazyshard.data.settings import BadRows
from lazyshard.errors import BadSample, SkipSample, StateInvalid, StateMismatch
from lazyshard.plan.deal import check_field

__all__ = ["StreamingShard", "streaming_shard"]

_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Sharding:
    """Deals a sequence to shards in global batches, in which each shard has fixed places.

    A last batch that is not full is completed from the first one (`even_batches`), as by accelerate's
    `IterableDatasetShard`, dropped (`drop_last`), or dealt as it is::

        batches of 2, two shards       | 0 1 2 3 | 4 5 6 7 | 8 0 1 2 |
        shard 0                          0 1       4 5       8 0
        shard 1, strided                   1   3     5   7     0   2

    `batch_size` is the batch of one shard, or with `split_batches` of all shards. Raises ValueError: a number is out
    of range, or a split batch cannot be divided evenly.
    """

    shards: int
    index: int
    batch_size: int = 1
    split_batches: bool = False
    drop_last: bool = False
    even_batches: bool = True
    strided: bool = False

    def __post_init__(self) -> None:
        check_field("num_shards", self.shards, 1)
        if not 0 <= self.index < self.shards:
            raise ValueError(f"index must be in [0, {self.shards}), got {self.index}")
        check_field("batch_size", self.batch_size, 1)
        if self.split_batches and self.batch_size % self.shards:
            why = "with split_batches, batch_size must be a multiple of num_shards"
            raise ValueError(f"{why}, got {self.batch_size} for {self.shards}")

    @property
    def batch(self) -> int:
        """Elements of a global batch."""
        return self.batch_size if self.split_batches else self.batch_size * self.shards

    @property
    def own(self) -> range:
        """Places of this shard in a global batch, ascending."""
        if self.strided:
            return range(self.index, self.batch, self.shards)
        return range(self.batch)[self.index * self.batch // self.shards :][: self.batch // self.shards]

    def count(self, total: int) -> int:
        """Returns how many elements this shard gets of `total`."""
        full, left = divmod(total, self.batch)
        return full * len(self.own) + len(self.last(left, left))

    def last(self, left: int, first: int) -> list[tuple[bool, int]]:
        """Returns what this shard gets of a last global batch of `left` elements that is not full.

        For each element: whether it is taken from the first global batch, of `first` elements, and its place there.
        """
        if not left or self.drop_last:
            return []
        if not self.even_batches:
            return [(False, place) for place in self.own if place < left]
        return [(False, place) if place < left else (True, (place - left) % first) for place in self.own]


def streaming_shard(
    iterable: Iterable[Any],
    num_shards: int,
    index: int,
    batch_size: int = 1,
    split_batches: bool = False,
    drop_last: bool = False,
    even_batches: bool = True,
    *,
    strided: bool = False,
    transform: Callable[[Any], Any] | None = None,
) -> StreamingShard:
    """Returns one shard of an iterable as a data set. Elements are selected before they are processed.

    Expensive work, such as decoding and tokenizing, is then done only for the shard's own elements::

        rows = load_dataset("json", data_files=files, streaming=True)["train"].shuffle(seed=0, buffer_size=10_000)
        shard = streaming_shard(rows, dp_size, dp_rank, batch_size=8, transform=tokenize)
        loader = DataLoader(shard, batch_size=8, num_workers=2)

    Every shard reads all elements, so use it for sources that cannot be split otherwise. The assignment of elements is
    that of accelerate's `IterableDatasetShard`, which has the same arguments, and ``even_batches`` is that of
    `BatchSamplerShard`.

    Args:
        iterable: read again for each pass. All shards must read it in the same order, which is not checked. It may be a
            Hugging Face `IterableDataset`, also shuffled, if all shards use the same seed.
        num_shards: number of shards, for instance of data-parallel ranks.
        index: number of this shard, in [0, num_shards).
        batch_size: number of consecutive elements of one shard; of all shards with `split_batches`.
        split_batches: `batch_size` is the size of a global batch, which is split evenly over the shards.
        drop_last: drop elements that do not fill a global batch.
        even_batches: complete the last global batch from the first one, which is kept in memory, so that all shards
            have the same length; otherwise each shard gets its part of the remaining elements.
        strided: a shard gets every num_shards-th element of a global batch instead of `batch_size` consecutive ones.
        transform: makes the returned value from an element of this shard. If it raises `SkipSample`, the result for
            this shard's next element is returned in that place as well, and after the last element the result for its
            first one, so that all shards keep the same length. The attribute `skipped` counts these places, and some
            are logged.

    Returns:
        A torch `IterableDataset` with `set_epoch`, `state_dict` and `load_state_dict`, and a length if `iterable` has
        one. Without `transform` it has `map`, `filter`, `shuffle` and `batch` if `iterable` has them; each returns
        a shard. DataLoader workers take its global batches in turn, so that a loader with the same `batch_size` returns
        the same order for any number of workers; a torch `IterableDataset`, including Hugging Face's, splits its
        elements over the workers itself.

    Raises ValueError: a number is out of range, or batches cannot be split evenly.
    """
    rules = Sharding(num_shards, index, batch_size, split_batches, drop_last, even_batches, strided)
    return StreamingShard(iterable, rules, transform)


class StreamingShard(IterableDataset[Any]):
    """One shard of an `iterable`, dealt by `sharding`; made by `streaming_shard`.

    Raises:
        BadSample: on reading: `transform` raised `SkipSample` for all elements, or for 10,000 in a row; or `iterable`
            itself raised it, which ends the iteration.
    """

    def __init__(
        self, iterable: Iterable[Any], sharding: Sharding, transform: Callable[[Any], Any] | None = None
    ) -> None:
        self.iterable, self.sharding, self._transform = iterable, sharding, transform
        self._left_out = BadRowCount(BadRows(limit=None), instead="the result for another element is used instead")
        self._epoch: int | None = None
        # The position of the current pass, or of the next one if a state was loaded.
        self._place, self._loaded, self._following = _PassPlace(), False, _PassPlace()
        # Steps for the rows of this shard. After a step for all rows, a state of Hugging Face's would lose some.
        self._steps: tuple[tuple[str, methodcaller], ...] = ()
        self._rereads = False

    def __getattr__(self, name: str) -> Callable[..., StreamingShard]:
        """Returns `map`, `filter`, `shuffle` or `batch`, if the iterable has it and no `transform` is given.

        Of a Hugging Face `IterableDataset` without a format, a `map` of single rows and `batch` apply to the rows of
        this shard. All else applies to all rows, so that all shards have the same length. If they may differ
        (`even_batches=False`), a `filter` after `map` applies to the rows of this shard.
        """
        own = name in ("map", "filter", "shuffle", "batch") and self._transform is None and hasattr(self.iterable, name)
        if not own or (name != "map" and "batch" in dict(self._steps)):
            raise AttributeError(f"{type(self).__name__} has no {name}: call it on the iterable before", name=name)
        return lambda *args, **options: self._chained(name, args, options)

    def _chained(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> StreamingShard:
        source, steps, applied = self.iterable, self._steps, methodcaller(name, *args, **options)
        kind, seedless = type(source).__module__, not args and options.get("seed") is options.get("generator") is None
        if name == "shuffle" and seedless and kind.startswith("datasets."):
            raise ValueError("shuffle without a seed gives each shard another order: give all shards the same seed")
        given = {option for option, value in options.items() if value}
        of_one = given <= {"function", "input_columns", "remove_columns", "fn_kwargs"} and len(args) < 2
        of_one = of_one and not iscoroutinefunction((*args, options.get("function"))[0])
        # A filter of the rows of one shard makes its length differ from those of the others.
        uneven = bool(steps) and not (self.sharding.even_batches or self.sharding.drop_last)
        own = name == "batch" or (of_one and (name == "map" or (name == "filter" and uneven)))
        if own and kind == "datasets.iterable_dataset" and getattr(source, "_formatting", None) is None:
            steps = (*steps, (name, applied))
        elif "batch" in dict(steps):
            raise ValueError("after batch, map takes a function of one batch, and no batched, with_indices or features")
        else:
            # Whether rows are shuffled before or after a step for one row makes no difference.
            for _, step in steps if name != "shuffle" else ():
                source = step(source)
            source, steps = applied(source), steps if name == "shuffle" else ()
        shard = StreamingShard(source, self.sharding)
        shard._steps, shard._rereads = steps, self._rereads or source is not self.iterable
        return shard

    def __len__(self) -> int:
        """Elements of this shard. Raises TypeError if the iterable has no length."""
        return self.sharding.count(len(self.iterable))  # type: ignore[arg-type]

    @property
    def skipped(self) -> int:
        """Number of places of this shard, in this process, filled with another element's result after `SkipSample`."""
        return self._left_out.skipped

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the following passes, and of the iterable if it has one, which changes its shuffle."""
        self._epoch = epoch
        if hasattr(self.iterable, "set_epoch"):
            self.iterable.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the current pass: after what it has returned, in this process."""
        settings = {"format": _FORMAT, **asdict(self.sharding), "turn": list(self._turn())}
        ended = self._place.handed_out == len(self.sharding.own) and self._following.batches == self._place.batches + 1
        place = self._following if ended else self._place
        return {**settings, **place._asdict(), "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next pass continue from a state.

        An iterable that has `state_dict` and `load_state_dict` is set to its position, unless the chain has a step for
        all rows; any other is read from the start. A state of another number of shards is that of each of them if all
        have returned the same whole global batches. Raises StateInvalid: not a state; StateMismatch: within a global
        batch of another number of shards, of another shard, other settings or another worker.
        """
        own = self.state_dict()
        state = {"start": 0, **state} if isinstance(state, dict) else state
        if not isinstance(state, dict) or set(state) != set(own) or state["format"] != _FORMAT:
            raise StateInvalid(f"expected a state of streaming_shard, format {_FORMAT}, found {state!r:.200}")
        free, place = {"epoch", *_PassPlace._fields}, _PassPlace(*(state[name] for name in _PassPlace._fields))
        if state["shards"] != self.sharding.shards:
            old = Sharding(**{name: state[name] for name in asdict(self.sharding)})
            last, rest = divmod(place.handed_out, len(old.own))
            if rest or self._turn()[1] > 1 or "filter" in dict(self._steps):
                where = "after whole global batches, without a filter after map, and if no workers take them in turn"
                raise StateMismatch(f"the state is of {old.shards} shards: {self.sharding.shards} can load it {where}")
            # After the last global batch, `inner` is the iterable's state before it.
            place = _PassPlace(0, 0, None if last else place.inner, place.start + (place.batches + last) * old.batch)
            free |= {"shards", "index", "batch_size", "split_batches"}
        for name, value in own.items():
            if name not in free and state[name] != value:
                mine = f"this shard has {name}={value!r}; use the settings with which the state was saved"
                raise StateMismatch(f"the state is of {name}={state[name]!r}, {mine}")
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self._place, self._loaded, self._following = place, True, place

    def __iter__(self) -> Iterator[Any]:
        """Begins a pass: from the start, or from the state that was just loaded."""
        self._place, self._loaded = self._place if self._loaded else _PassPlace(), False
        elements = self._filled(self._pass(self._place))
        return self._made_of(elements) if self._steps else elements

    def _made_of(self, rows: Iterator[Any]) -> Iterator[Any]:
        """Yields what Hugging Face makes of rows by `_steps`; the position moves when it is returned."""
        library = sys.modules[type(self.iterable).__module__]
        made: Any = library.IterableDataset(library.ExamplesIterable(lambda: enumerate(rows), {}))
        for _, step in self._steps:
            made = step(made)
        place = self._place
        try:
            # Unlike `__iter__`, `iter` does not split rows over workers.
            for result in made.iter(batch_size=1):
                place = self._place
                yield {name: value for name, (value,) in result.items()}
        except (Exception, KeyboardInterrupt, SystemExit):
            self._place = place
            raise

    def _filled(self, elements: Iterator[tuple[Any, _PassPlace]]) -> Iterator[Any]:
        """Yields the results of elements; a skipped element's place gets the result of the next one."""
        left_out: list[_PassPlace] = []
        for element, place in elements:
            if left_out:
                # Reading ahead returns nothing.
                self._place = left_out[0]._replace(handed_out=left_out[0].handed_out - 1)
            try:
                made = self._made(element)
            except SkipSample as cause:
                left_out.append(place)
                self._note(cause, place, len(left_out))
                continue
            yield from self._copies(left_out, made)
            left_out, self._place = [], place
            yield made
        if left_out:
            end = self._place
            yield from self._copies(left_out, self._first())
            if end.batches > left_out[-1].batches:
                self._place = end

    def _copies(self, places: list[_PassPlace], made: Any) -> Iterator[Any]:
        for place in places:
            self._place = place
            yield copy.deepcopy(made)

    def _first(self) -> Any:
        for element, _ in itertools.islice(self._pass(_PassPlace()), FILL_ROWS):
            with contextlib.suppress(SkipSample):
                return self._made(element)
        raise BadSample("transform raised SkipSample for all elements of this shard: check transform")

    def _made(self, element: Any) -> Any:
        return element if self._transform is None else self._transform(element)

    def _note(self, cause: SkipSample, place: _PassPlace, count: int) -> None:
        where = f"element {place.handed_out - 1} of this shard in global batch {place.batches}: SkipSample: {cause}"
        self._left_out.skip(lambda: BadSample(where))
        if count == FILL_ROWS:
            text = f"{where}; so did the {count - 1} elements of this shard before it: check transform"
            raise BadSample(text, count=count) from cause

    def _pass(self, place: _PassPlace) -> Iterator[tuple[Any, _PassPlace]]:
        """Yields the elements of this shard and their positions; the caller sets `_place` when it returns them."""
        rules, (turn, turns), (batches, handed_out, inner, start) = self.sharding, self._turn(), place
        completes = rules.even_batches and not rules.drop_last
        reading: Any = self.iterable
        generator = getattr(reading, "generator", None)
        if self._epoch is not None and not hasattr(reading, "set_epoch") and isinstance(generator, Generator):
            generator.manual_seed(self._epoch)
        elements = iter(reading)
        passed = start + batches * rules.batch
        first = _take(elements, rules.batch, range(rules.batch))[0] if passed and completes else {}
        if passed and inner is not None:
            # Use a copy if possible: Hugging Face's would restart there in each pass of the same epoch.
            with contextlib.suppress(Exception):
                reading = copy.deepcopy(reading)
            reading.load_state_dict(inner)
            elements = iter(reading)
        else:
            # With other shards before, it may begin within the first global batch.
            elements = itertools.islice(itertools.chain(list(first.values()), elements), passed, None)
        while True:
            mine = batches % turns == turn
            wanted = range(rules.batch) if completes and not first else rules.own if mine else range(0)
            batch, found = _take(elements, rules.batch, wanted)
            if completes and not first:
                first = batch
            resumable = not self._rereads and hasattr(reading, "state_dict") and hasattr(reading, "load_state_dict")
            following = _PassPlace(batches + 1, 0, reading.state_dict() if resumable else None, start)
            self._following = place if found < rules.batch else following
            if mine:
                places = [(False, at) for at in rules.own]
                if found < rules.batch:
                    places = rules.last(found, len(first))
                for begun, at in places[handed_out:]:
                    handed_out += 1
                    yield (first if begun else batch)[at], _PassPlace(batches, handed_out, inner, start)
            if found < rules.batch:
                return
            batches, handed_out, inner, _ = self._place = following

    def _turn(self) -> tuple[int, int]:
        """Returns the number of this worker, and how many workers take global batches in turn."""
        worker = get_worker_info()
        if worker is None or isinstance(self.iterable, IterableDataset):
            return 0, 1
        return worker.id, worker.num_workers


class _PassPlace(NamedTuple):
    """Position of a pass: completed global batches, elements returned of the next one, the iterable's own state."""

    batches: int = 0
    handed_out: int = 0
    inner: Any = None
    # Elements before the first of these global batches, which were dealt to another number of shards.
    start: int = 0


def _take(elements: Iterator[Any], size: int, wanted: range) -> tuple[dict[int, Any], int]:
    """Takes up to `size` elements; returns those at the wanted places, and the number of elements taken."""
    kept: dict[int, Any] = {}
    taken = 0
    try:
        for taken, element in enumerate(itertools.islice(elements, size), 1):
            if taken - 1 in wanted:
                kept[taken - 1] = element
    except SkipSample as cause:
        text = f"the iterable raised SkipSample ({cause}), which ends it for all shards"
        raise BadSample(f"{text}: make it skip such elements itself, or raise SkipSample in transform=") from cause
    return kept, taken
