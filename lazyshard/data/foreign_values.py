"""What was given in place of the state of a run: told by what it looks like, with the way to the state in it."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator
from typing import Any, Final

from lazyshard.data.stream_states import HANDED_OUT, OVER, WORKER
from lazyshard.format import RunState
from lazyshard.format.blend_state import BLEND
from lazyshard.format.sequence_state import KIND, SequenceState

__all__ = ["mistaken_for_sequences", "mistaken_for_state"]

_MAX_DEPTH: Final = 3
_MAX_VALUES: Final = 1000
"""A checkpoint holds thousands of tensors; a state lies near the top of it."""

_SHOWN_KEYS: Final = 6

_RUN: Final = frozenset(RunState.__slots__)
_SEQUENCES: Final = frozenset(SequenceState.__slots__)

_LOADERS: Final = ("_snapshot", "_num_yielded")
"""Fields of what torchdata's `StatefulDataLoader` returns, with workers and without (torchdata 0.11)."""


def mistaken_for_state(value: object) -> str | None:
    """Returns what a value is and what to give instead, in words; None where it may be meant as a state.

    >>> mistaken_for_state({"model": {}, "step": 3})[:58]
    "it holds no state of a run but 'model' and 'step': give wh"
    """
    return _mistaken(value, _RUN)


def mistaken_for_sequences(value: object) -> str | None:
    """Returns the same of what was given in place of the state of `LazyShardedSequences`.

    >>> mistaken_for_sequences({"format": 1, "stream_id": "a", "parts": [], "consumed": 8})[:40]
    'it is the state of a LazyShardedDataset '
    """
    if not isinstance(value, dict) or value.get("kind") in (BLEND, KIND):
        return _mistaken(value, _SEQUENCES)
    if any(name in value for name in _LOADERS):
        return (
            "it is the state of a StatefulDataLoader: give it to `loader.load_state_dict`, of a loader over these "
            "sequences with as many workers"
        )
    if len(value.keys() & _RUN) > 2:
        one = "a LazyShardedDataset or LazyShardedStream"
        if WORKER in value:
            one = "one DataLoader worker of a LazyShardedStream or LazyShardedIterable"
        elif HANDED_OUT in value or OVER in value:
            one = "a LazyShardedStream or LazyShardedIterable"
        return (
            f"it is the state of {one}, and goes on there alone: it counts samples, not sequences; give what "
            f"`state_dict` of LazyShardedSequences returned, or begin an epoch anew"
        )
    return _mistaken(value, _SEQUENCES)


def _mistaken(value: object, fields: frozenset[str]) -> str | None:
    if isinstance(value, (str, os.PathLike)):
        return "it is a path or a text: load the checkpoint, as with `torch.load`, and give what `state_dict` returned"
    if not isinstance(value, dict):
        return None
    if value.get("kind") == BLEND:
        return "it is the state of a blend: give it to a `BlendedDataset` of the same streams"
    if value.keys() & fields:
        return None
    # Nothing of a state in it: it is something that holds more, or something else.
    paths = [path for path, inner in _inner(value) if len(inner.keys() & fields) > 2]
    if paths:
        others = " or ".join(f"`checkpoint{path}`" for path in paths[:3])
        return f"it holds more than the state of a run, {_keys(value)}: give {others}, which looks like one"
    if not value:
        return "it is empty: give what `state_dict` returned"
    return f"it holds no state of a run but {_keys(value)}: give what `state_dict` returned, if it was saved"


def _inner(value: dict[Any, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yields the objects in an object, those near the top first, with the way to each."""
    level = [("", value)]
    seen = 0
    for _ in range(_MAX_DEPTH):
        below = []
        for path, holder in level:
            for key, inner in holder.items():
                seen += 1
                if seen > _MAX_VALUES:
                    return
                if isinstance(inner, dict):
                    below.append((f"{path}[{reprlib.repr(key)}]", inner))
        yield from below
        level = below


def _keys(value: dict[Any, Any]) -> str:
    shown = [reprlib.repr(key) for key in list(value)[:_SHOWN_KEYS]]
    if len(value) > _SHOWN_KEYS:
        return f"{', '.join(shown)} and {len(value) - _SHOWN_KEYS} more"
    return " and ".join(part for part in (", ".join(shown[:-1]), shown[-1]) if part)
