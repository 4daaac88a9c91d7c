"""The model of a configuration, version 1. docs/pipeline.md has an example.

With the validation context ``{"imports": True}``, functions are looked up by name, which imports their modules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic.functional_validators import PlainValidator, model_validator

from lazyshard.lazy import FunctionMissing, named_function
from lazyshard.part import SplitOf

VERSION: Final = 1


def _function(value: Any, info: ValidationInfo) -> Any:
    if callable(value):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError('expected the name of a function, "package.module:function"')
    if info.context is not None and info.context["imports"]:
        try:
            named_function(value)
        except FunctionMissing as cause:
            raise ValueError(f"{value}: {cause}") from cause
    return value


def _by_name(value: Any) -> Any:
    return value if isinstance(value, dict) else {"function": value}


# In a dict, the function itself may be given.
_Function = Annotated[str | Callable[..., Any], PlainValidator(_function)]
_Text = Annotated[str, Field(strict=True, min_length=1)]
_Flag = Annotated[bool, Field(strict=True)]
_FromZero = Annotated[int, Field(strict=True, ge=0)]
_FromOne = Annotated[int, Field(strict=True, ge=1)]
_Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _is_there(path: str) -> str:
    if not os.path.isdir(path):
        raise ValueError(f"there is no directory {path!r}, seen from {os.getcwd()}")
    return path


class TokenizerConfig(_Section):
    """``tokenizer:``: its directory, the maximum tokens of a sample (None: no limit), what to do with longer ones."""

    path: Annotated[_Text, AfterValidator(_is_there)]
    max_length: _FromOne | None = None
    too_long: Literal["drop", "truncate"] = "drop"


class _CallSection(_Section):
    function: _Function
    kwargs: dict[str, Any] = {}


class _IndexedCall(_CallSection):
    with_indices: _Flag = False


class _MapCall(_IndexedCall):
    remove_columns: tuple[Annotated[str, Field(strict=True)], ...] = ()


# Keys of torchtune's data sets beside the function: arguments of it, or all of them
_TORCHTUNE: Final = {"message_transform": ("column_map", "masking_strategy"), "filter_fn": ("filter_kwargs",)}


class StepConfig(_Section):
    """An entry of ``steps:``, with exactly one of the three keys: a function name, or a mapping with ``function``.

    ``filter_kwargs`` beside ``filter_fn``, ``column_map`` and ``masking_strategy`` beside ``message_transform`` are its
    ``kwargs``.
    """

    # None means that the key is absent; a key that is given is validated, even if it is null.
    message_transform: Annotated[_CallSection | None, BeforeValidator(_by_name)] = None
    filter_fn: Annotated[_IndexedCall | None, BeforeValidator(_by_name)] = None
    map: Annotated[_MapCall | None, BeforeValidator(_by_name)] = None

    @model_validator(mode="before")
    @classmethod
    def _is_one(cls, step: Any) -> Any:
        if isinstance(step, dict):
            names = [name for name in cls.model_fields if name in step]
            # A single unknown key is reported as an unknown key.
            if len(names) > 1 or not step:
                found = " and ".join(names) or "nothing"
                raise ValueError(f"expected one of {', '.join(cls.model_fields)}, found {found}")
            for name in names:
                given = {key: step[key] for key in _TORCHTUNE.get(name, ()) if key in step}
                if given and isinstance(call := _by_name(step[name]), dict):
                    more = given.pop("filter_kwargs", given)
                    rest = {key: value for key, value in step.items() if key not in _TORCHTUNE[name]}
                    both = isinstance(more, dict) and isinstance(call.get("kwargs", {}), dict)
                    return rest | {name: call | {"kwargs": {**call.get("kwargs", {}), **more} if both else more}}
        return step


def _has_its_split(splits: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
    if "split" in info.data:
        SplitOf.named(info.data["split"], splits)
    return splits


class DatasetConfig(_Section):
    """An entry of ``datasets:``. Except `path` and `weight`, attributes are arguments of `LazyShardedDataset`."""

    path: _Text
    weight: _Positive = 1.0
    steps: tuple[StepConfig, ...] = ()
    max_error_count: _FromZero | None = 100
    unit: Literal["chunk", "sample", "batch", "auto"] | _FromOne = "chunk"
    shuffle_window: _FromZero = 0
    split: Literal["train", "validation", "test"] | None = None
    splits: Annotated[tuple[_FromZero, ...] | None, Field(validate_default=True), AfterValidator(_has_its_split)] = None
    max_total_samples: _FromOne | None = None
    samples_per_chunk: _FromOne | None = None
    cache_bytes: _FromZero = 0


def _has_an_end(at_end: str, info: ValidationInfo) -> str:
    if at_end != "drop" and info.data.get("form") == "map":
        raise ValueError(f"expected drop, found {at_end}: with `form: map` the samples left over are dropped")
    return at_end


def _has_workers(value: Any, info: ValidationInfo) -> Any:
    if value and info.data.get("num_workers") == 0:
        raise ValueError("applies to worker processes, but num_workers is 0")
    return value


_OfWorkers = AfterValidator(_has_workers)


class LoaderConfig(_Section):
    """``dataloader:``. Except `form`, attributes are arguments of torch's `DataLoader` and of `LazyShardedStream`.

    `form` is "stream" for an iterable, which needs no length, or "map" for a map-style data set.
    """

    form: Literal["stream", "map"] = "stream"
    at_end: Annotated[Literal["drop", "pad", "loop"], AfterValidator(_has_an_end)] = "drop"
    batch_size: _FromOne = 1
    num_workers: _FromZero = 0
    collate_fn: _Function | None = None
    pin_memory: _Flag = False
    prefetch_factor: Annotated[_FromOne | None, _OfWorkers] = None
    persistent_workers: Annotated[_Flag, _OfWorkers] = False
    multiprocessing_context: Annotated[Literal["fork", "spawn", "forkserver"] | None, _OfWorkers] = None


def _of_its_form(value: Any, info: ValidationInfo) -> Any:
    form, own = info.data.get("form"), "pad" if info.field_name == "token" else "split"
    if value and form not in (None, own):
        raise ValueError(f"is only valid with `form: {own}`, found `form: {form}`")
    return value


_Token = Annotated[_FromZero | None, AfterValidator(_of_its_form)]


class SequencesConfig(_Section):
    """``sequences:``. Attributes are the arguments of `LazyShardedSequences` and its form, and `max_error_count`."""

    form: Literal["pack", "split", "pad"]
    size: _FromOne
    bos: _Token = None
    eos: _Token = None
    every_bos: _Token = None
    every_eos: _Token = None
    overlap: Annotated[Literal[0, 1], AfterValidator(_of_its_form)] = 0
    token: Annotated[_FromZero, AfterValidator(_of_its_form)] = 0
    window: _FromOne | None = None
    seed: _FromZero | None = None
    at_end: Literal["drop", "complete"] = "drop"
    too_long: Literal["raise", "drop"] = "raise"
    max_error_count: _FromZero | None = 100


def _can_be_drawn(datasets: tuple[DatasetConfig, ...]) -> tuple[DatasetConfig, ...]:
    if not datasets:
        raise ValueError("expected at least one data set, found an empty list")
    first: dict[str, int] = {}
    for number, dataset in enumerate(datasets):
        before = first.setdefault(os.path.abspath(dataset.path), number)
        if before != number:
            again = f"[{number}] is the same stream as [{before}]"
            raise ValueError(f"{again}; list it once, with the sum of the weights")
    return datasets


def _ends_by_itself(loader: LoaderConfig, info: ValidationInfo) -> LoaderConfig:
    if info.data.get("sequences") is not None and (loader.form, loader.at_end) != ("stream", "drop"):
        raise ValueError("expected `form: stream`, and `at_end` under `sequences`: sequences have no index")
    if loader.at_end != "drop":
        expected = f"expected at_end: drop, found {loader.at_end}"
        if len(info.data.get("datasets", ())) > 1:
            raise ValueError(f"{expected}: several data sets end by `stopping` or `num_samples`")
        if info.data.get("num_samples") is not None:
            raise ValueError(f"{expected}: with `num_samples` nothing is left over")
    return loader


_NoneIsEmpty = BeforeValidator(lambda value: {} if value is None else value)


class Config(_Section):
    """The configuration. Except sections, attributes are arguments of `LazyShardedDataset` and `BlendedDataset`."""

    version: Annotated[int, Field(strict=True, ge=VERSION, le=VERSION)]
    tokenizer: TokenizerConfig | None = None
    datasets: Annotated[tuple[DatasetConfig, ...], AfterValidator(_can_be_drawn)]
    num_samples: _FromOne | None = None
    stopping: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    micro_batches_per_step: _FromOne | None = None
    seed: _FromZero = 0
    max_wait: _Positive = 600.0
    consumer: _Text | None = None
    sequences: SequencesConfig | None = None
    dataloader: Annotated[LoaderConfig, _NoneIsEmpty, AfterValidator(_ends_by_itself)] = LoaderConfig()


_SECTIONS: dict[str, type[_Section]] = {"tokenizer": TokenizerConfig, "datasets": DatasetConfig}
_SECTIONS |= {"dataloader": LoaderConfig, "sequences": SequencesConfig, "steps": StepConfig}
_SECTIONS |= {"message_transform": _CallSection, "filter_fn": _IndexedCall, "map": _MapCall}


def known_keys(section: Sequence[str | int]) -> list[str]:
    """Returns the keys of a section, given its location: ("datasets", 1, "steps", 0)."""
    names = [name for name in section if isinstance(name, str)]
    return list((_SECTIONS[names[-1]] if names else Config).model_fields)
