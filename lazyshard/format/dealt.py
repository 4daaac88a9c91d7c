"""What the seals of `lazyshard-producer` say of a stream whose rows were dealt by cost.

Its positions, in the field `source` of a seal, keep the settings by which rows were made and ordered. Those of
``--balance`` are, in the object `recipe`::

    {"balance": 64, "micro_batch_size": 1, "length_field": "length", "cost_per_token": 1.0,
     "cost_per_token_squared": 4e-05, "seed": 7}

Nobody needs it to read the stream: it tells `lazyshard inspect` what to count with, and a data set what to warn of. A
stream that was copied into other chunks says nothing of it, rightly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lazyshard.format.fields import MAX_SAMPLES

__all__ = ["DealtByCost"]


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
