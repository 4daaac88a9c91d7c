"""Pipeline steps and the encoder: what is done with each row, in the order in which they are given.

A step names its function or holds it. By name (``"package.module:function"``) each process finds it for itself, so any
function can be used in DataLoader workers, however these are started.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing.context
import types
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Final

from lazyshard.errors import ConfigInvalid, SkipSample
from lazyshard.lazy import FunctionMissing, named_function

Row = dict[str, Any]
EncodeFn = Callable[..., Any]  # takes a row and, if it can, ``return_length=True``; returns the sample

_named: Final = functools.cache(named_function)  # A process finds each function once


class Step:
    """A step of a pipeline. `MessageTransform`, `Filter` and `Map` are the steps there are."""

    _KIND: str = ""
    _FIELD: str = ""  # of its function, or of the name of that

    def apply(self, row: Row, index: int, place: str) -> Row:
        """Returns what becomes of a row, the sample of this index, which may be changed; messages call it by its place.

        Raises SkipSample: it is dropped; or whatever the step's function raises.
        """
        raise NotImplementedError

    def describe(self, *, whole: bool = False) -> str:
        """Returns kind and function, for messages; if `whole` with all else that the step says."""
        function = name = vars(self)[self._FIELD]
        if not isinstance(function, str):
            names = (getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__name__))
            name = ":".join(filter(None, map(str, names)))
        others = [f" {key}={value!r}" for key, value in vars(self).items() if whole and key != self._FIELD]
        return f"{self._KIND} {name}{''.join(others)}"

    def __post_init__(self) -> None:
        """Checks the function. Raises ConfigInvalid: it is none, or there is none of this name."""
        function = vars(self)[self._FIELD]
        if isinstance(function, str):
            try:
                _named(function)
            except FunctionMissing as cause:
                raise ConfigInvalid(f"{self.describe()}: {cause}", step=self.describe()) from cause
        elif not callable(function):
            named = f'{type(self).__name__}("package.module:function")'
            text = f"expected a function or the name of one, as in {named}, got {function!r:.100}"
            raise ConfigInvalid(f"{self._KIND}: {text}", step=self._KIND)

    def __getstate__(self) -> dict[str, Any]:
        """Refuses functions that a process which is started by spawn cannot be given, and says what to do instead."""
        inner = vars(self)[self._FIELD]
        while isinstance(inner, functools.partial):
            inner = inner.func
        spawns = multiprocessing.context.get_spawning_popen() is not None
        if spawns and isinstance(inner, types.FunctionType) and "<" in inner.__qualname__:
            text = f"{self.describe()}: a lambda, or an inner function, cannot be given to workers that are spawned"
            way = f'define it at the top of a module, or name it: {type(self).__name__}("package.module:function")'
            raise ConfigInvalid(f"{text}; {way}", step=self.describe())
        return self.__dict__

    def _call(self, row: Row, index: int) -> Any:
        """Calls the function with the row, and with its index if so asked."""
        function = vars(self)[self._FIELD]
        if isinstance(function, str):
            function = _named(function)
        return function(row, index) if vars(self).get("with_indices") else function(row)


@dataclass(frozen=True)
class MessageTransform(Step):
    """Makes of each row another one, which has `messages`: a list of dicts with `role` and `content`.

    Attributes:
        message_transform: called with the row; returns the row that takes its place. Or its name,
            "package.module:function".

    Raises ConfigInvalid: there is no such function.
    """

    message_transform: Callable[[Row], Mapping[str, Any]] | str

    _KIND = _FIELD = "message_transform"

    def apply(self, row: Row, index: int, place: str) -> Row:
        """See `Step`."""
        made = self._call(row, index)
        if not isinstance(made, Mapping) or not isinstance(made.get("messages"), (list, tuple)):
            raise TypeError(f"expected a dict with a list of messages, it returned {made!r:.100}")
        return dict(made)


@dataclass(frozen=True)
class Filter(Step):
    """Keeps a row or drops it. In the place of one that is dropped another row is trained.

    Attributes:
        filter_fn: called with the row, and with its index if so asked; true keeps it. It has to answer the same for the
            same row, whenever and wherever it is asked. Or its name, "package.module:function".
        with_indices: whether it is called with the index too: the number of the sample in its stream, counted from 0
            chunk after chunk; the same on any number of ranks and workers, and in every epoch.

    Raises ConfigInvalid: there is no such function.
    """

    filter_fn: Callable[..., Any] | str
    with_indices: bool = False

    _KIND = _FIELD = "filter_fn"

    def apply(self, row: Row, index: int, place: str) -> Row:
        """See `Step`."""
        kept = self._call(row, index)
        if kept is None:
            raise TypeError("expected true or false, it returned None")
        if not kept:
            raise SkipSample(f"{place} drops it")
        return row


@dataclass(frozen=True)
class Map(Step):
    """Adds columns to a row, or changes them, as `map` of Hugging Face's data sets does.

    Attributes:
        function: called with the row, and with its index if so asked; what it returns is added to the row, in the place
            of columns of the same names. Or its name, "package.module:function".
        with_indices: as of `Filter`.
        remove_columns: names of columns to take out of the row; those that the function returns stay.

    Raises ConfigInvalid: there is no such function.
    """

    function: Callable[..., Mapping[str, Any]] | str
    with_indices: bool = False
    remove_columns: tuple[str, ...] | list[str] = ()

    _KIND, _FIELD = "map", "function"

    def apply(self, row: Row, index: int, place: str) -> Row:
        """See `Step`."""
        made = self._call(row, index)
        if not isinstance(made, Mapping):
            raise TypeError(f"expected a dict of columns, it returned {made!r:.100}")
        return {name: value for name, value in row.items() if name not in self.remove_columns} | dict(made)

    def __post_init__(self) -> None:
        names = self.remove_columns
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ConfigInvalid(f"map: remove_columns is a list of names, got {names!r:.100}", step=self._KIND)
        super().__post_init__()


class RowSteps:
    """Steps, in order, and the encoder behind them, which makes a sample of what comes out; None where that is it.

    The encoder is called with ``return_length=True`` too if it takes that, as ms-swift's `template.encode` does.
    """

    def __init__(self, steps: Iterable[Step] | Step, encode_fn: EncodeFn | None) -> None:
        if encode_fn is not None and not callable(encode_fn):
            raise TypeError(f"encode_fn is a function of a row, got {type(encode_fn).__name__}")
        self.steps = (steps,) if isinstance(steps, Step) else tuple(steps)
        for number, step in enumerate(self.steps):
            if not isinstance(step, Step):
                name = f"steps[{number}]"
                raise ConfigInvalid(f"{name}: expected a MessageTransform, Filter or Map, got {step!r:.100}", step=name)
        self._steps = [(step, f"steps[{number}], {step.describe()},") for number, step in enumerate(self.steps)]
        self._encode = encode_fn
        self._options: dict[str, bool] = {}
        with contextlib.suppress(TypeError, ValueError):
            parameters = {} if encode_fn is None else inspect.signature(encode_fn).parameters
            kinds = {name: one.kind for name, one in parameters.items()}
            named = kinds.get("return_length", inspect.Parameter.POSITIONAL_ONLY)
            if named is not inspect.Parameter.POSITIONAL_ONLY or inspect.Parameter.VAR_KEYWORD in kinds.values():
                self._options = {"return_length": True}

    def __bool__(self) -> bool:
        return bool(self._steps) or self._encode is not None

    def __call__(self, row: Row, index: int) -> Any:
        """Returns the sample of a row; of a dict with `input_ids` with a `length`, unless it has that or `lengths`.

        Raises what a step, which is noted in `_lazyshard_step`, or the encoder raises.
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
