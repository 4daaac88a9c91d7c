"""Settings of a data set: the groups `Order`, `BadRows` and `EncodeCache`, the order of a run, and the steps.

A step holds its function, or names it. Each process imports a named function (``"package.module:function"``) itself,
so it can be used in DataLoader workers however they are started.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing.context
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

from lazyshard.errors import ConfigInvalid, SkipSample
from lazyshard.format.arrays import LEAST_CACHE_BYTES
from lazyshard.format.records import Fact
from lazyshard.lazy import FunctionMissing, named_function
from lazyshard.part import SplitOf, parse_size
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Gaps, Rules, auto_unit, check_field, named_unit, window_positions
from lazyshard.stream import Published

LayoutName = Literal["block", "strided"]
BadRowAction = Literal["substitute", "raise"]

# A training machine can spare this much: 100 million tokens and their labels take 1 GB.
ENCODE_CACHE_BYTES: Final = 16 << 30
ENDLESS: Final = 1 << 60  # Number of samples for a stream that repeats from epoch to epoch

Row = dict[str, Any]
EncodeFn = Callable[..., Any]  # takes a row and, if accepted, ``return_length=True``; returns the sample

_named: Final = functools.cache(named_function)  # Each process imports a function once


@dataclass(frozen=True)
class Order:
    """The order in which samples are drawn.

    Attributes:
        unit: what is dealt to the ranks in turn: "chunk", "sample", "batch" (`batch_size` samples), a number of
            samples, or "auto": chunks if the stream, up to `max_total_samples`, has a full chunk for every rank, else
            batches; on a live stream the first use waits until that is decided. A resumed run keeps the unit of its
            state.
        layout: "block" for samplers that give each rank a contiguous block (`rank_indices`, ms-swift's
            ``data_sharding=True``), "strided" for samplers that give rank r the indices r, r + dp_size, ... (ms-swift's
            without shuffle, Hugging Face's).
        shuffle_window: number of chunks' worth of samples within which each rank shuffles, differently in each epoch; 0
            keeps the order, which is required if the rows were dealt by cost (docs/balance.md). If the window covers
            all samples of a rank, an ended stream is shuffled completely. `lazyshard.window_for_distance` computes the
            window that moves neighbours a given distance apart.
        seed: seed of the shuffle.
        micro_batches_per_step: micro batches of one rank per optimiser step. The state of the run then records its
            steps, for `lazyshard trace`, `audit` and `skip`. None if unknown; `batches` then assumes 1.
        split: "train", "validation" or "test": draws only the samples of this split. Which samples these are follows
            from their numbers, so it never changes as the stream grows. None draws all samples.
        splits: the shares of these three, or of the first two, such as ``(969, 30, 1)``, at most 100,000 together. Of
            as many consecutive samples as their sum, so many belong to each split, spread evenly. Chunks, windows and
            units are then counted in samples of the split, `max_total_samples` in samples of the stream.

    Raises ValueError: a field is invalid.
    """

    unit: Literal["chunk", "sample", "batch", "auto"] | int = "chunk"
    layout: LayoutName = "block"
    shuffle_window: int = 0
    seed: int = 0
    micro_batches_per_step: int | None = None
    split: Literal["train", "validation", "test"] | None = None
    splits: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, LayoutName)
        named_unit(self.unit, 1, 1)
        check_field("shuffle_window", self.shuffle_window, 0)
        check_given("micro_batches_per_step", self.micro_batches_per_step, 1)
        self.rules(1, 1)

    @property
    def gaps(self) -> Gaps:
        """The samples of other splits."""
        return Gaps(split=SplitOf.named(self.split, self.splits))

    def rules(self, samples_per_chunk: int, unit: int) -> Rules:
        """Returns the rules that deal units of `unit` samples, and shuffle, for chunks of `samples_per_chunk`."""
        window = window_positions(self.shuffle_window, samples_per_chunk, unit)
        return Rules(unit, window, self.seed, self.gaps.split)


@dataclass(frozen=True)
class BadRows:
    """How to handle rows that cannot be read, or on which a step or the encoder fails.

    Attributes:
        action: "substitute" trains another row of the same chunk, the same one on every rank and in every run, and logs
            a warning; "raise" raises the first error.
        limit: error budget: maximum number of distinct bad rows that one process (each DataLoader worker) replaces
            before it raises; None for no limit.

    Raises ValueError: a field is invalid.
    """

    action: BadRowAction = "substitute"
    limit: int | None = 100

    def __post_init__(self) -> None:
        check_choice("action of bad rows", self.action, BadRowAction)
        check_given("limit of bad rows", self.limit, 0)


@dataclass(frozen=True)
class EncodeCache:
    """Caches for encoded samples, so that each row is encoded once.

    Attributes:
        directory: a directory of this node, on its disk or in /dev/shm, shared by all processes that draw the same rows
            (docs/encode-cache.md). Not for an `encode_fn` whose result for a row varies from call to call.
        size: maximum size of the directory, as a number of at least 4,096 bytes or a text such as ``"20GB"`` or
            ``"512MiB"``; the least recently used chunks are evicted first. None means 16 GiB.
        fingerprint: plain values that change whenever a row would be encoded differently. Defaults to the attribute
            `fingerprint` of `encode_fn`; required if `encode_fn` has none, and with `steps`.
        memory_bytes: bytes of encoded samples that each process keeps in memory for later epochs.

    Raises ValueError: a field is invalid, or size or fingerprint is given without a directory.
    """

    directory: str | os.PathLike[str] | None = None
    size: int | str | None = None
    fingerprint: Mapping[str, Fact] | None = None
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        check_field("memory_bytes", self.memory_bytes, 0)
        for name in ("size", "fingerprint"):
            if getattr(self, name) is not None and self.directory is None:
                raise ValueError(f"{name} applies to an encode cache with a directory: pass both, or omit {name}")
        with contextlib.suppress(ValueError):
            if type(self.most_bytes) is int and self.most_bytes >= LEAST_CACHE_BYTES:
                return
        text = f"size of an encode cache must be {LEAST_CACHE_BYTES} bytes or more, such as '20GB'"
        raise ValueError(f"{text}, got {self.size!r}")

    @property
    def most_bytes(self) -> int:
        """Maximum size of the directory in bytes."""
        size = ENCODE_CACHE_BYTES if self.size is None else self.size
        return parse_size(size) if isinstance(size, str) else size


def check_group(name: str, given: object, kind: type[Order | BadRows | EncodeCache]) -> None:
    """Checks that a value is a group of settings. Raises TypeError."""
    if not isinstance(given, kind):
        group = f"lazyshard.{kind.__name__}"
        raise TypeError(f"{name} must be a {group}, got {given!r:.100}; write {name}={group}(...)")


def check_choice(name: str, value: object, choices: Any) -> None:
    """Checks that a value is one of a Literal's. Raises ValueError."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def check_given(name: str, value: object, low: int, stop: int | None = None) -> None:
    """Checks a setting as `check_field`, unless it is None."""
    if value is not None:
        check_field(name, value, low, stop)


@dataclass(frozen=True, kw_only=True)
class RunOrder(Order):
    """All settings that decide the order in which samples are drawn.

    `blended`: whether a blend draws from the stream, so that batches mix streams and epochs. The unit "batch" then has
    `unit_batch` samples.
    """

    batch_size: int
    max_total_samples: int | None
    num_samples: int | None = None
    blended: bool = False
    unit_batch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field("batch_size", self.batch_size, 1)
        check_given("max_total_samples", self.max_total_samples, 1)
        # `len` returns at most sys.maxsize.
        check_given("num_samples", self.num_samples, 1, sys.maxsize + 1)

    @property
    def draws_per_step(self) -> int:
        """Positions of each rank per optimiser step; 0 if unknown."""
        return self.batch_size * (self.micro_batches_per_step or 0)

    def in_blend(self) -> RunOrder:
        """Returns the order for a stream of a blend, which draws single samples, without an end, in the same order."""
        order = replace(self, layout="strided", num_samples=ENDLESS, micro_batches_per_step=None, blended=True)
        return replace(order, batch_size=1, unit_batch=self.batch_size)

    @property
    def by_epoch(self) -> bool:
        """Whether the run ends with its epoch and `set_epoch` begins the next one."""
        return self.num_samples in (None, ENDLESS) and not self.blended

    def unit_samples(self, samples_per_chunk: int) -> int | None:
        """Returns how many consecutive samples a rank is dealt; None for "auto"."""
        return named_unit(self.unit, samples_per_chunk, self.unit_batch or self.batch_size)

    def auto_unit(self, samples_per_chunk: int, dp: int, published: Published) -> int | None:
        """Returns the same for "auto", from what is published; None while undecided."""
        size, kept, limit = self.unit_batch or self.batch_size, self.gaps.kept, self.max_total_samples
        most = None if limit is None else kept(0, limit)
        return auto_unit(dp, samples_per_chunk, size, kept(0, published.samples), published.ended, most)

    def known_total(self, published: Published) -> int | None:
        """Returns how many samples there are to draw; None while unknown."""
        limit = self.max_total_samples
        if published.ended:
            return published.samples if limit is None else min(published.samples, limit)
        return limit if limit is not None and published.samples >= limit else None

    def block(self, course: Course, total: int | None) -> int | None:
        """Returns how many positions of the current part each rank has, up to the end of its epoch or `num_samples`.

        None while unknown. Raises ValueError: `num_samples` is less than one batch for every rank.
        """
        if self.num_samples is None:
            return None if total is None else course.epoch_stop(course.current.draws, total)
        step = course.dp * course.batch_size
        if self.num_samples < step and len(course.parts) == 1:
            product = f"{course.dp} * {course.batch_size} = {step}"
            raise ValueError(f"num_samples must be at least dp_size * batch_size = {product}, got {self.num_samples}")
        return max(0, self.num_samples - course.consumed_before) // step * course.batch_size


class Step:
    """A step of a pipeline: a `MessageTransform`, `Filter` or `Map`."""

    _KIND: str = ""
    _FIELD: str = ""  # the field that holds the function or its name

    def apply(self, row: Row, index: int, place: str) -> Row:
        """Returns the processed row; the given one may be modified. `place` names the step in messages.

        Raises SkipSample: the row is dropped; or any error of the step's function.
        """
        raise NotImplementedError

    def describe(self, *, whole: bool = False) -> str:
        """Returns kind and function, for messages; if `whole`, with all other fields of the step."""
        function = name = vars(self)[self._FIELD]
        if not isinstance(function, str):
            names = (getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__name__))
            name = ":".join(filter(None, map(str, names)))
        shown = {key: value for key, value in vars(self).items() if whole and key != self._FIELD}
        if not shown.get("kwargs"):
            shown.pop("kwargs", None)  # As earlier releases, which had none
        others = [f" {key}={value!r}" for key, value in shown.items()]
        return f"{self._KIND} {name}{''.join(others)}"

    def __post_init__(self) -> None:
        """Checks the function. Raises ConfigInvalid: it is not callable, or no function has this name."""
        function = vars(self)[self._FIELD]
        if isinstance(function, str):
            try:
                _named(function)
            except FunctionMissing as cause:
                raise ConfigInvalid(f"{self.describe()}: {cause}", step=self.describe()) from cause
        elif not callable(function):
            text = f'expected a function or its name, "package.module:function", got {function!r:.100}'
            raise ConfigInvalid(f"{self._KIND}: {text}", step=self._KIND)
        kwargs = vars(self)["kwargs"]
        if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
            text = f"kwargs must be keyword arguments by name, got {kwargs!r:.100}"
            raise ConfigInvalid(f"{self.describe()}: {text}", step=self.describe())

    def __getstate__(self) -> dict[str, Any]:
        """Rejects functions that cannot be pickled for a spawned process, with a message that says what to do."""
        inner = vars(self)[self._FIELD]
        while isinstance(inner, functools.partial):
            inner = inner.func
        spawns = multiprocessing.context.get_spawning_popen() is not None
        if spawns and isinstance(inner, types.FunctionType) and "<" in inner.__qualname__:
            text = f"{self.describe()}: a lambda, or an inner function, cannot be sent to spawned workers"
            raise ConfigInvalid(f"{text}; define it at the top level of a module, or name it", step=self.describe())
        return self.__dict__

    def _call(self, row: Row, index: int) -> Any:
        """Calls the function with the row, with its index if `with_indices` is set, and with `kwargs`."""
        function = vars(self)[self._FIELD]
        if isinstance(function, str):
            function = _named(function)
        given = (row, index) if vars(self).get("with_indices") else (row,)
        return function(*given, **vars(self)["kwargs"])


@dataclass(frozen=True)
class MessageTransform(Step):
    """Converts each row to a row with `messages`: a list of dicts with `role` and `content`.

    Attributes:
        message_transform: a function that takes the row and returns the row that replaces it, or the name of the
            function, "package.module:function".
        kwargs: its keyword arguments, the same for each row.

    Raises ConfigInvalid: there is no such function.
    """

    message_transform: Callable[..., Mapping[str, Any]] | str
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    _KIND = _FIELD = "message_transform"

    def apply(self, row: Row, index: int, place: str) -> Row:
        """Applies the step, as described in `Step.apply`."""
        made = self._call(row, index)
        if not isinstance(made, Mapping) or not isinstance(made.get("messages"), (list, tuple)):
            raise TypeError(f"expected a dict with a list of messages, the function returned {made!r:.100}")
        return dict(made)


@dataclass(frozen=True)
class Filter(Step):
    """Keeps or drops each row. A dropped row is replaced by another row.

    Attributes:
        filter_fn: a function that takes the row, and its index if `with_indices` is set, and returns true to keep
            it; or its name, "package.module:function". It must be deterministic: the same result for the same row, in
            every process and at any time.
        with_indices: whether to pass the index too: the number of the sample in its stream, counted from 0 chunk after
            chunk; the same for any number of ranks and workers, and in every epoch.
        kwargs: as for `MessageTransform`.

    Raises ConfigInvalid: there is no such function.
    """

    filter_fn: Callable[..., Any] | str
    with_indices: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    _KIND = _FIELD = "filter_fn"

    def apply(self, row: Row, index: int, place: str) -> Row:
        """Applies the step, as described in `Step.apply`."""
        kept = self._call(row, index)
        if kept is None:
            raise TypeError("expected true or false, the function returned None")
        if not kept:
            raise SkipSample(f"{place} drops it")
        return row


@dataclass(frozen=True)
class Map(Step):
    """Adds columns to each row, or changes them, as `map` of Hugging Face's data sets does.

    Attributes:
        function: a function that takes the row, and its index if `with_indices` is set, and returns columns, which are
            added to the row and replace columns of the same names; or its name, "package.module:function".
        with_indices: as for `Filter`.
        remove_columns: names of columns to remove from the row; columns that the function returns stay.
        kwargs: as for `MessageTransform`.

    Raises ConfigInvalid: there is no such function.
    """

    function: Callable[..., Mapping[str, Any]] | str
    with_indices: bool = False
    remove_columns: tuple[str, ...] | list[str] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    _KIND, _FIELD = "map", "function"

    def apply(self, row: Row, index: int, place: str) -> Row:
        """Applies the step, as described in `Step.apply`."""
        made = self._call(row, index)
        if not isinstance(made, Mapping):
            raise TypeError(f"expected a dict of columns, the function returned {made!r:.100}")
        return {name: value for name, value in row.items() if name not in self.remove_columns} | dict(made)

    def __post_init__(self) -> None:
        names = self.remove_columns
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ConfigInvalid(f"map: remove_columns must be a list of names, got {names!r:.100}", step=self._KIND)
        super().__post_init__()


class RowSteps:
    """Steps, in order, followed by the encoder, which makes a sample of the resulting row; None returns the row itself.

    The encoder is also passed ``return_length=True`` if it accepts that, as ms-swift's `template.encode` does.
    """

    def __init__(self, steps: Iterable[Step] | Step, encode_fn: EncodeFn | None) -> None:
        if encode_fn is not None and not callable(encode_fn):
            raise TypeError(f"encode_fn must be a function of a row, got {type(encode_fn).__name__}")
        self.steps = (steps,) if isinstance(steps, Step) else tuple(steps)
        for number, step in enumerate(self.steps):
            if not isinstance(step, Step):
                name = f"steps[{number}]"
                raise ConfigInvalid(f"{name}: expected a MessageTransform, Filter or Map, got {step!r:.100}", step=name)
        self._steps = [(step, f"steps[{number}], {step.describe()},") for number, step in enumerate(self.steps)]
        self._encode = encode_fn
        self._options: dict[str, bool] = {}
        with contextlib.suppress(TypeError, ValueError):
            if encode_fn is not None:
                inspect.signature(encode_fn).bind({}, return_length=True)
                self._options = {"return_length": True}

    def __bool__(self) -> bool:
        return bool(self._steps) or self._encode is not None

    def __call__(self, row: Row, index: int) -> Any:
        """Returns the sample of a row. Adds `length` to a dict with `input_ids`, unless it has that or `lengths`.

        Raises the error of a step, with the step in its attribute `_lazyshard_step`, or of the encoder.
        """
        for step, place in self._steps:
            try:
                row = step.apply(row, index, place)
            except Exception as error:
                vars(error)["_lazyshard_step"] = place.rstrip(",")
                raise
        if self._encode is None:
            return row
        sample = self._encode(row, **self._options)
        if sample is None:
            raise ValueError("the encoder returned None")
        if type(sample) is dict and "length" not in sample and "lengths" not in sample:
            tokens = sample.get("input_ids")
            if isinstance(tokens, Sized):
                sample["length"] = len(tokens)
        return sample
