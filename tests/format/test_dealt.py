"""What seals say of rows that were dealt by cost: read where it can be, and never an error."""

from typing import Any

import pytest

from lazyshard.format.source_facts import DealtByCost

RECIPE: dict[str, Any] = {
    "transform": "m:f",
    "balance": 64,
    "micro_batch_size": 2,
    "length_field": "tokens",
    "cost_per_token": 1.0,
    "cost_per_token_squared": 4e-05,
}


def test_what_was_dealt_is_told() -> None:
    source = {"version": 1, "sources": [], "recipe": RECIPE}
    assert DealtByCost.read(source) == DealtByCost(64, 2, "tokens", 1.0, 4e-05)


@pytest.mark.parametrize("source", [None, 3, [], {}, {"recipe": None}, {"recipe": {"shuffle": 4}}])
def test_other_streams_say_nothing_of_it(source: Any) -> None:
    assert DealtByCost.read(source) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("balance", value) for value in (0, -1, 1.5, "64", True, None, 2**70)],
        *[("micro_batch_size", value) for value in (0, None, 2.0)],
        *[("length_field", value) for value in (None, 3)],
        *[("cost_per_token", value) for value in (-1, "1", True, float("inf"), float("nan"))],
        ("cost_per_token_squared", [1]),
    ],
)
def test_what_cannot_be_says_nothing(name: str, value: Any) -> None:
    assert DealtByCost.read({"recipe": RECIPE | {name: value}}) is None


def test_rows_that_cost_nothing_say_nothing() -> None:
    assert DealtByCost.read({"recipe": RECIPE | {"cost_per_token": 0, "cost_per_token_squared": 0.0}}) is None
