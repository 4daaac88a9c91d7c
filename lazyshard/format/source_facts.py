"""What the seals of `lazyshard-producer` say of a stream's sources: the rows read, their mixture, how they were dealt.

It lies in the field `source` of a seal, beside the positions: how many rows were read and drawn from each source, and,
in `recipe`, the settings by which rows were made, weighted and ordered::

    {"sources": [{"path": "web.jsonl", ...}, {"path": "code.jsonl", ...}], "drawn": [701, 299],
     "finished": [false, false], "recipe": {"weights": [0.7, 0.3], "balance": 64, "micro_batch_size": 1,
      "length_field": "length", "cost_per_token": 1.0, "cost_per_token_squared": 4e-05, "seed": 7}, ...}

Counting of the mixture begins anew whenever a source is finished, since the others then share what it had, and whenever
the weights change. Nobody needs any of it to read the stream: it is for people, and for warnings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from lazyshard.part import MAX_SAMPLES

__all__ = [
    "MAX_SOURCES",
    "DealtByCost",
    "Made",
    "MixedSource",
    "SourceRows",
    "form_made",
    "mixed_sources",
]


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The source rows up to a chunk's end.

    Attributes:
        read: rows read, refused ones included.
        refused: those among them that were left out as bad rows.
        exact: whether the chunk ends where a source row does, or a buffer of them; otherwise a few more were read, of
            which a part is published.
        pack: most tokens of a pack; None where rows are not packed.
    """

    read: int
    refused: int
    exact: bool
    pack: int | None = None

    @classmethod
    def read_source(cls, source: Any) -> SourceRows | None:
        """Returns what the field `source` of a seal says; None where it says nothing of it, or nothing that can be."""
        if not isinstance(source, dict) or not isinstance(source.get("sources"), list):
            return None
        read, refused, skip = (source.get(name, -1) for name in ("rows", "refused", "skip"))
        if not all(map(_is_count, (read, refused, skip))) or refused > read:
            return None
        recipe = source.get("recipe")
        pack = recipe.get("pack") if isinstance(recipe, dict) else None
        return cls(read, refused, not skip, pack if _is_count(pack) and pack else None)


@dataclass(frozen=True, slots=True)
class Made:
    """How rows were made.

    Attributes:
        form: "pack", "split" or "pad"; None for rows as they are.
        size: most tokens of a pack or sequence; None where rows are as they are, or nothing tells it.
        shuffled: whether the producer has shuffled the rows.
    """

    form: str | None = None
    size: int | None = None
    shuffled: bool = False

    @classmethod
    def read_source(cls, source: Any) -> Made:
        """Returns what the field `source` of a seal says.

        >>> Made.read_source({"recipe": {"pad": {"size": 512}, "shuffle": 1000}})
        Made(form='pad', size=512, shuffled=True)
        """
        form = form_made(source)
        recipe = source.get("recipe") if isinstance(source, dict) else None
        if not isinstance(recipe, dict):
            return cls()
        told = recipe[form] if form is not None else None
        size = told.get("size") if isinstance(told, dict) else told
        return cls(form, size if type(size) is int and 0 < size < 2**32 else None, bool(recipe.get("shuffle")))


def form_made(source: Any) -> str | None:
    """Returns into what rows were made, as the field `source` of their chunk's seal says; None for rows as they are.

    Returns:
        "pack", "split" or "pad", as the option of `lazyshard-producer run`.
    """
    recipe = source.get("recipe") if isinstance(source, dict) else None
    if not isinstance(recipe, dict):
        return None
    return next((form for form in ("pack", "split", "pad") if recipe.get(form)), None)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SAMPLES


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


@dataclass(frozen=True, slots=True)
class DealtByCost:
    """How rows were dealt.

    Attributes:
        ranks: the data-parallel ranks for which it was done.
        micro_batch_size: rows of one rank in a micro batch.
        length_field: the field with a row's length in tokens.
        cost_per_token: what a token costs by itself.
        cost_per_token_squared: what a pair of tokens costs.
    """

    ranks: int
    micro_batch_size: int
    length_field: str
    cost_per_token: float
    cost_per_token_squared: float

    @classmethod
    def read(cls, source: Any) -> DealtByCost | None:
        """Returns what the field `source` of a seal says; None where it says nothing of it, or nothing that can be."""
        recipe = source.get("recipe") if isinstance(source, dict) else None
        if not isinstance(recipe, dict) or "balance" not in recipe:
            return None
        counts = [recipe["balance"], recipe.get("micro_batch_size")]
        costs = [recipe.get("cost_per_token", 0.0), recipe.get("cost_per_token_squared", 0.0)]
        name = recipe.get("length_field")
        if any(type(count) is not int or not 1 <= count <= MAX_SAMPLES for count in counts):
            return None
        if any(type(cost) not in (int, float) or not 0 <= cost < math.inf for cost in costs) or not any(costs):
            return None
        if not isinstance(name, str):
            return None
        return cls(counts[0], counts[1], name, float(costs[0]), float(costs[1]))
