"""What the seals of `lazyshard-producer` say of a stream whose sources are mixed by weights.

Its positions, in the field `source` of a seal, keep how many rows were drawn from each source, and, among the settings
by which rows were made, the weights::

    {"sources": [{"path": "web.jsonl", ...}, {"path": "code.jsonl", ...}], "drawn": [701, 299],
     "finished": [false, false], "recipe": {"weights": [0.7, 0.3]}, ...}

Counting begins anew whenever a source is finished, since the others then share what it had, and whenever the weights
change. Nobody needs it to read the stream: it tells people what the mixture has come to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from lazyshard.format.fields import MAX_SAMPLES

__all__ = ["MAX_SOURCES", "MixedSource", "mixed_sources"]

MAX_SOURCES: Final = 100
"""As many as people look at; the mixture of more is not told."""

_MAX_WEIGHT: Final = 1e100
"""No sum of so many overflows."""


@dataclass(frozen=True, slots=True)
class MixedSource:
    """One of the sources that are mixed.

    Attributes:
        name: as it was given, a path mostly.
        weight: its share of the rows that come next, from 0 to 1; 0 where it is finished.
        share: its share of the rows drawn since the mixture began or changed; None where none was drawn.
        rows: how many rows these are.
        finished: whether its end was met.
    """

    name: str
    weight: float
    share: float | None
    rows: int
    finished: bool


def mixed_sources(source: Any) -> tuple[MixedSource, ...]:
    """Returns what the field `source` of a seal says of the mixture.

    Returns:
        A source each, in order; none where sources are not mixed by weights, where there are more than `MAX_SOURCES`,
        or where what it says cannot be.
    """
    if not isinstance(source, dict) or not isinstance(source.get("recipe"), dict):
        return ()
    entries, drawn, finished = (source.get(name) for name in ("sources", "drawn", "finished"))
    weights = source["recipe"].get("weights")
    if not all(isinstance(found, list) for found in (entries, drawn, finished, weights)):
        return ()
    assert isinstance(entries, list) and isinstance(drawn, list)
    assert isinstance(finished, list) and isinstance(weights, list)
    if not 2 <= len(entries) <= MAX_SOURCES or not len(entries) == len(drawn) == len(finished) == len(weights):
        return ()
    names = [entry.get("path") if isinstance(entry, dict) else None for entry in entries]
    if (
        any(not isinstance(name, str) for name in names)
        or any(type(count) is not int or not 0 <= count <= MAX_SAMPLES for count in drawn)
        or any(type(flag) is not bool for flag in finished)
        or any(type(weight) not in (int, float) or not 0 < weight < _MAX_WEIGHT for weight in weights)
    ):
        return ()
    shared = math.fsum(weight for weight, flag in zip(weights, finished, strict=True) if not flag)
    rows = sum(drawn)
    return tuple(
        MixedSource(str(name), 0.0 if flag else weight / shared, count / rows if rows else None, count, flag)
        for name, weight, count, flag in zip(names, weights, drawn, finished, strict=True)
    )
