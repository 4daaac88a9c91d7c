"""Pipeline steps and the encoder: what is done with each row, in the order in which they are given.

A step names its function or holds it. By name (``"package.module:function"``) each process finds it for itself, so any
function can be used in DataLoader workers, however these are started.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing.context
import types
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Final

from lazyshard.config.named_function import FunctionMissing, named_function
from lazyshard.errors import SkipSample, StepInvalid

Row = dict[str, Any]


class StepFailed(Exception):
    """A step has failed. Its cause is what was raised; the step is named by its place, kind and function."""

    def __init__(self, step: str) -> None:
        super().__init__(step)
        self.step = step


class Step:
    """A step of a pipeline. `MessageTransform`, `Filter` and `Map` are the steps there are."""

    _KIND: str = ""

    def apply(self, row: Row, index: int, place: str) -> Row:
        """Returns what becomes of a row.

        Args:
            row: as the step before has left it; it may be changed.
            index: number of the sample in its stream.
            place: how messages call this step.

        Raises:
            SkipSample: it is dropped.
            Exception: whatever the step's function raises; or its answer is none.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Returns kind and function, for messages."""
        function = self._given()
        if isinstance(function, str):
            return f"{self._KIND} {function}"
        names = (getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__name__))
        return f"{self._KIND} {':'.join(filter(None, map(str, names)))}"

    def __post_init__(self) -> None:
        """Checks the function.

        Raises:
            StepInvalid: it is none, or there is none of this name.
        """
        function = self._given()
        if not isinstance(function, str) and not callable(function):
            raise StepInvalid(
                f"{self._KIND}: expected a function or the name of one, as in {type(self).__name__}"
                f'("package.module:function"), got {function!r:.100}',
                step=self._KIND,
            )
        self._function()

    def __getstate__(self) -> dict[str, Any]:
        """Refuses functions that a process which is started by spawn cannot be given, and says what to do instead."""
        if multiprocessing.context.get_spawning_popen() is not None:
            inner = self._given()
            while isinstance(inner, functools.partial):
                inner = inner.func
            if isinstance(inner, types.FunctionType) and "<" in inner.__qualname__:
                raise StepInvalid(
                    f"{self.describe()}: a lambda, or a function that is defined in another one, cannot be given to "
                    f"DataLoader workers that are started by spawn or forkserver. Define it at the top of a module; "
                    f'or give its name, as in {type(self).__name__}("package.module:function")',
                    step=self.describe(),
                )
        return self.__dict__

    def _given(self) -> Callable[..., Any] | str:
        raise NotImplementedError

    def _function(self) -> Callable[..., Any]:
        function = self._given()
        if not isinstance(function, str):
            return function
        try:
            return _named(function)
        except FunctionMissing as cause:
            raise StepInvalid(f"{self.describe()}: {cause}", step=self.describe()) from cause


# A process finds each function once.
_named: Final = functools.cache(named_function)


@dataclass(frozen=True)
class MessageTransform(Step):
    """Makes of each row another one, which has `messages`: a list of dicts with `role` and `content`.

    Attributes:
        message_transform: called with the row; returns the row that takes its place. Or its name,
            "package.module:function".

    Raises:
        StepInvalid: there is no such function.
    """

    message_transform: Callable[[Row], Mapping[str, Any]] | str

    _KIND = "message_transform"

    def apply(self, row: Row, index: int, place: str) -> Row:
        """See `Step`."""
        made = self._function()(row)
        if not isinstance(made, Mapping) or not isinstance(made.get("messages"), (list, tuple)):
            raise TypeError(f"expected a dict with a list of messages, it returned {made!r:.100}")
        return dict(made)

    def _given(self) -> Callable[..., Any] | str:
        return self.message_transform


@dataclass(frozen=True)
class Filter(Step):
    """Keeps a row or drops it. In the place of one that is dropped another row is trained.

    Attributes:
        filter_fn: called with the row, and with its index if so asked; true keeps it. It has to answer the same for the
            same row, whenever and wherever it is asked. Or its name, "package.module:function".
        with_indices: whether it is called with the index too: the number of the sample in its stream, counted from 0
            chunk after chunk; the same on any number of ranks and workers, and in every epoch.

    Raises:
        StepInvalid: there is no such function.
    """

    filter_fn: Callable[..., Any] | str
    with_indices: bool = False

    _KIND = "filter_fn"

    def apply(self, row: Row, index: int, place: str) -> Row:
        """See `Step`."""
        kept = self._function()(row, index) if self.with_indices else self._function()(row)
        if kept is None:
            raise TypeError("expected true or false, it returned None")
        if not kept:
            raise SkipSample(f"{place} drops it")
        return row

    def _given(self) -> Callable[..., Any] | str:
        return self.filter_fn


@dataclass(frozen=True)
class Map(Step):
    """Adds columns to a row, or changes them, as `map` of Hugging Face's data sets does.

    Attributes:
        function: called with the row, and with its index if so asked; what it returns is added to the row, in the place
            of columns of the same names. Or its name, "package.module:function".
        with_indices: as of `Filter`.
        remove_columns: names of columns to take out of the row; those that the function returns stay.

    Raises:
        StepInvalid: there is no such function.
    """

    function: Callable[..., Mapping[str, Any]] | str
    with_indices: bool = False
    remove_columns: tuple[str, ...] | list[str] = ()

    _KIND = "map"

    def apply(self, row: Row, index: int, place: str) -> Row:
        """See `Step`."""
        made = self._function()(row, index) if self.with_indices else self._function()(row)
        if not isinstance(made, Mapping):
            raise TypeError(f"expected a dict of columns, it returned {made!r:.100}")
        found = {**row, **made}
        for name in self.remove_columns:
            if name not in made:
                found.pop(name, None)
        return found

    def _given(self) -> Callable[..., Any] | str:
        return self.function

    def __post_init__(self) -> None:
        """Checks the fields."""
        if isinstance(self.remove_columns, str) or not all(isinstance(name, str) for name in self.remove_columns):
            raise StepInvalid(
                f"map: remove_columns is a list of names, got {self.remove_columns!r:.100}", step=self._KIND
            )
        super().__post_init__()


class RowSteps:
    """Steps, and the encoder behind them.

    Args:
        steps: in order; or one.
        encoder: makes a sample of what comes out; None where that is the sample.

    Raises:
        StepInvalid: one of them is none.
    """

    def __init__(self, steps: Iterable[Step] | Step, encoder: Encoder | None) -> None:
        given = [steps] if isinstance(steps, Step) else list(steps)
        for number, step in enumerate(given):
            if not isinstance(step, Step):
                raise StepInvalid(
                    f"steps[{number}]: expected a MessageTransform, Filter or Map, got {step!r:.100}",
                    step=f"steps[{number}]",
                )
        self._steps = [(step, f"steps[{number}], {step.describe()},") for number, step in enumerate(given)]
        self._encode = encoder

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps, in order."""
        return tuple(step for step, _ in self._steps)

    def __bool__(self) -> bool:
        """Returns whether anything is done with rows."""
        return bool(self._steps) or self._encode is not None

    def __call__(self, row: Row, index: int) -> Any:
        """Returns the sample of a row.

        Raises:
            SkipSample: a filter drops it, or one of the functions says so.
            StepFailed: a step has raised something else.
            MemoryError: there is not enough memory.
            Exception: whatever the encoder raises.
        """
        for step, place in self._steps:
            try:
                row = step.apply(row, index, place)
            except (MemoryError, SkipSample):
                raise
            except Exception as cause:
                raise StepFailed(place.rstrip(",")) from cause
        return row if self._encode is None else self._encode(row)


EncodeFn = Callable[..., Any]
"""Takes a row and, if it can, ``return_length=True``; returns the sample."""


class Encoder:
    """An encoder with a known way to be called.

    Args:
        encode_fn: called with the row; with ``return_length=True`` too if it takes that, as ms-swift's
            `template.encode` does.
    """

    def __init__(self, encode_fn: EncodeFn) -> None:
        if not callable(encode_fn):
            raise TypeError(f"encode_fn is a function of a row, got {type(encode_fn).__name__}")
        self._encode = encode_fn
        self._options: dict[str, bool] = {"return_length": True} if _takes_return_length(encode_fn) else {}

    def __call__(self, row: dict[str, Any]) -> Any:
        """Returns the encoded sample; a dict with `input_ids` gets a `length` unless it has `length` or `lengths`.

        Raises:
            ValueError: the encoder returned nothing.
            Exception: whatever the encoder raises.
        """
        sample = self._encode(row, **self._options)
        if sample is None:
            raise ValueError("the encoder returned None")
        if type(sample) is dict and "length" not in sample and "lengths" not in sample:
            tokens = sample.get("input_ids")
            if isinstance(tokens, Sized):
                sample["length"] = len(tokens)
        return sample


def _takes_return_length(function: EncodeFn) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        p.kind is inspect.Parameter.VAR_KEYWORD
        or (p.name == "return_length" and p.kind is not inspect.Parameter.POSITIONAL_ONLY)
        for p in parameters
    )
