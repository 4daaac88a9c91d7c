"""What seals say of the sources of their rows: read where it can be, and never an error."""

from typing import Any

import pytest

from lazyshard.format.seal import MAX_SOURCES, DealtByCost, MixedSource, SourceRows, mixed_sources

SOURCE: dict[str, Any] = {"version": 1, "sources": [], "rows": 24, "refused": 3, "skip": 0, "recipe": {}}


def test_what_was_read_is_told() -> None:
    assert SourceRows.read_source(SOURCE) == SourceRows(24, 3, True)
    assert SourceRows.read_source(SOURCE | {"skip": 2, "recipe": {"pack": 8192}}) == SourceRows(24, 3, False, 8192)


@pytest.mark.parametrize("source", [None, 3, [], {}, {"sources": 3}, {"in.jsonl": 5}])
def test_other_streams_say_nothing_of_source_rows(source: Any) -> None:
    assert SourceRows.read_source(source) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("rows", "refused", "skip") for value in (None, -1, 1.5, "3", True, 2**70)]
    + [("refused", 25)],
)
def test_counts_of_source_rows_that_cannot_be_say_nothing(name: str, value: Any) -> None:
    assert SourceRows.read_source(SOURCE | {name: value}) is None


@pytest.mark.parametrize("recipe", [None, [], {"pack": "8192"}, {"pack": -1}, {"pack": True}, {"pack": 2**70}])
def test_pack_that_cannot_be_is_none(recipe: Any) -> None:
    assert SourceRows.read_source(SOURCE | {"recipe": recipe}) == SourceRows(24, 3, True, None)


def seal_source(**values: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "sources": [{"path": "web.jsonl"}, {"path": "code.jsonl"}, {"path": "books.jsonl"}],
        "drawn": [6, 2, 0],
        "finished": [False, False, False],
        "recipe": {"weights": [2, 1.0, 1]},
    } | values


def test_shares_so_far_and_of_what_comes() -> None:
    assert mixed_sources(seal_source()) == (
        MixedSource("web.jsonl", 0.5, 0.75, 6, False),
        MixedSource("code.jsonl", 0.25, 0.25, 2, False),
        MixedSource("books.jsonl", 0.25, 0.0, 0, False),
    )


def test_what_a_finished_source_had_goes_to_the_others() -> None:
    found = mixed_sources(seal_source(drawn=[0, 0, 0], finished=[True, False, False]))
    assert [(one.weight, one.share) for one in found] == [(0.0, None), (0.5, None), (0.5, None)]


def test_when_all_are_finished_nothing_comes() -> None:
    found = mixed_sources(seal_source(finished=[True, True, True]))
    assert [one.weight for one in found] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "source",
    [
        None,
        [],
        {},
        seal_source(recipe={}),
        seal_source(recipe=None),
        seal_source(recipe={"weights": [1, 1]}),
        seal_source(recipe={"weights": [1, 1, 0]}),
        seal_source(recipe={"weights": [1, 1, -1]}),
        seal_source(recipe={"weights": [1, 1, True]}),
        seal_source(recipe={"weights": [1, 1, float("inf")]}),
        seal_source(recipe={"weights": [1, 1, float("nan")]}),
        seal_source(recipe={"weights": [1, 1, 10**400]}),
        seal_source(drawn=[1, 2]),
        seal_source(drawn=[1, 2, -1]),
        seal_source(drawn=[1, 2, 2**64]),
        seal_source(drawn="abc"),
        seal_source(finished=[0, 0, 0]),
        seal_source(sources=[{"path": "a"}, {"path": "b"}, {}]),
        seal_source(sources=[{"path": "a"}, {"path": "b"}, "c"]),
        {
            "sources": [{"path": "a"}] * (MAX_SOURCES + 1),
            "drawn": [1] * (MAX_SOURCES + 1),
            "finished": [False] * (MAX_SOURCES + 1),
            "recipe": {"weights": [1] * (MAX_SOURCES + 1)},
        },
    ],
)
def test_what_cannot_be_is_no_mixture(source: Any) -> None:
    assert mixed_sources(source) == ()


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
def test_other_streams_say_nothing_of_costs(source: Any) -> None:
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
def test_costs_that_cannot_be_say_nothing(name: str, value: Any) -> None:
    assert DealtByCost.read({"recipe": RECIPE | {name: value}}) is None


def test_rows_that_cost_nothing_say_nothing() -> None:
    assert DealtByCost.read({"recipe": RECIPE | {"cost_per_token": 0, "cost_per_token_squared": 0.0}}) is None
