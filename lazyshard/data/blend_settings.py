"""What a blend is given, checked before anything is opened: its data sets and weights, and how those change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, get_args

from lazyshard.data.blend_space import Stopping
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.order import LayoutName
from lazyshard.errors import redact
from lazyshard.plan.blend import shares
from lazyshard.plan.blend_schedule import BlendSchedule, Ramp
from lazyshard.store.urls import stream_name

__all__ = ["blend_members", "blend_schedule", "check_settings", "stream_names"]

_PAIRS: Final = "a blend takes pairs of a data set and its weight, as in [(dataset, 0.8), (other, 0.2)]"
_POINTS: Final = "a schedule takes pairs of a step and the weights from there on, as in [(1000, [1, 3])]"


def blend_members(given: Iterable[tuple[LazyShardedDataset, float]]) -> tuple[list[LazyShardedDataset], list[float]]:
    """Returns the data sets and their weights.

    Raises:
        TypeError: these are no pairs of a data set and a weight.
        ValueError: there is none, or a weight is no number.
    """
    pairs = [_pair(one, _PAIRS) for one in _items(given, _PAIRS)]
    for dataset, _ in pairs:
        if not isinstance(dataset, LazyShardedDataset):
            raise TypeError(f"{_PAIRS}; {_shown(dataset)} is no LazyShardedDataset")
    if not pairs:
        raise ValueError("a blend is one of at least one data set, none was given")
    return [dataset for dataset, _ in pairs], [_number(weight) for _, weight in pairs]


def blend_schedule(weights: list[float], later: Any, ramp: Ramp) -> BlendSchedule:
    """Returns the weights over the steps of a run.

    Args:
        weights: of each data set from step 0 on.
        later: steps, and the weights of each data set from there on.
        ramp: as of `BlendSchedule`.

    Raises:
        TypeError: `later` is none of pairs.
        ValueError: as `BlendSchedule`; or a weight is 0 and never changes, so that its stream is never drawn from.
    """
    points: list[tuple[int, list[float]]] = [(0, weights)]
    for one in _items(later, _POINTS):
        step, changed = _pair(one, _POINTS)
        points.append((step, [_number(weight) for weight in _items(changed, _POINTS)]))
    if len(points) == 1:
        shares(weights)
    return BlendSchedule(points, ramp)


def check_settings(batch_size: Any, layout: str, num_samples: Any, stopping: str, micro_batches_per_step: Any) -> None:
    """Refuses settings that cannot be. Arguments as of `BlendedDataset`.

    Raises:
        ValueError: one is wrong.
    """
    _check_count("batch_size", batch_size)
    if micro_batches_per_step is not None:
        _check_count("micro_batches_per_step", micro_batches_per_step)
    if layout not in get_args(LayoutName):
        raise ValueError(f"layout is one of {', '.join(get_args(LayoutName))}, got {layout!r}")
    if stopping not in get_args(Stopping):
        raise ValueError(f"stopping is one of {', '.join(get_args(Stopping))}, got {stopping!r}")
    if num_samples is not None:
        _check_count("num_samples", num_samples)


def _check_count(name: str, value: Any) -> None:
    """Refuses what is no integer from 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is an integer from 1, got {value!r}")


def stream_names(datasets: list[LazyShardedDataset]) -> list[str]:
    """Returns how the state of a blend calls its streams: by their identities, or directories where they have none.

    Raises:
        ValueError: two are the same.
    """
    names = [dataset.stream_id or stream_name(dataset.directory) for dataset in datasets]
    for number, name in enumerate(names):
        first = names.index(name)
        if first < number:
            raise ValueError(
                f"two data sets of a blend are of the same stream, {datasets[first].directory} and "
                f"{datasets[number].directory}: give it once, with the sum of the weights"
            )
    return names


def _items(value: Any, expected: str) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        raise TypeError(f"{expected}; got {_shown(value)}") from None


def _pair(value: Any, expected: str) -> tuple[Any, Any]:
    pair = () if isinstance(value, (str, LazyShardedDataset)) else tuple(_items(value, expected))
    if len(pair) != 2:
        raise TypeError(f"{expected}; got {_shown(value)}")
    return pair


def _shown(value: Any) -> str:
    return redact(repr(value))[:100]


def _number(weight: Any) -> float:
    try:
        return float(weight)
    except (TypeError, ValueError):
        raise ValueError(f"a weight is a number, got {weight!r:.100}") from None
