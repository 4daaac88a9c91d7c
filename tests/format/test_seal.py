"""What seals say of their rows, exactly; and of the sources of their rows: where it can be read, never an error."""

from typing import Any

import pytest

from lazyshard.format.records import pack
from lazyshard.format.seal import MAX_SOURCES, DealtByCost, MixedSource, Seal, SourceRows, mixed_sources
from tests.format.records import RECORDS, changed, refusal


def test_row_that_ends_past_the_file_is_named() -> None:
    data = changed(RECORDS["seal"].golden, offsets=pack([0, 35, 34], "<u8"))
    refused = refusal(lambda: Seal.decode(data, 7), RECORDS["seal"].error, "chunk_00007.jsonl.completed", "offsets")
    assert refused.actual == "row 1 from byte 35 to byte 34"


OTHERS: list[Any] = [None, 3, [], {}, {"sources": 3}, {"in.jsonl": 5}]
SOURCE: dict[str, Any] = {"version": 1, "sources": [], "rows": 24, "refused": 3, "skip": 0, "recipe": {}}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (SOURCE, SourceRows(24, 3, True)),
        (SOURCE | {"skip": 2, "recipe": {"pack": 8192}}, SourceRows(24, 3, False, 8192)),
        (SOURCE | {"recipe": None}, SourceRows(24, 3, True)),
        (SOURCE | {"recipe": []}, SourceRows(24, 3, True)),
        *[(SOURCE | {"recipe": {"pack": pack}}, SourceRows(24, 3, True)) for pack in ("8192", -1, True, 2**70)],
        *[(source, None) for source in OTHERS],
        *[(SOURCE | {"rows": value}, None) for value in (None, -1, 1.5, "3", True, 2**70)],
        *[(SOURCE | {"refused": value}, None) for value in (None, -1, 1.5, True, 25)],
        *[(SOURCE | {"skip": value}, None) for value in (None, -1, 1.5, True, 2**70)],
    ],
)
def test_source_rows(source: Any, told: SourceRows | None) -> None:
    assert SourceRows.read_source(source) == told


def seal_source(**values: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "sources": [{"path": "web.jsonl"}, {"path": "code.jsonl"}, {"path": "books.jsonl"}],
        "drawn": [6, 2, 0],
        "finished": [False, False, False],
        "recipe": {"weights": [2, 1.0, 1]},
    } | values


def test_what_a_finished_source_had_goes_to_the_others() -> None:
    others = (MixedSource("code.jsonl", 0.25, 0.25, 2, False), MixedSource("books.jsonl", 0.25, 0.0, 0, False))
    assert mixed_sources(seal_source())[1:] == others
    found = mixed_sources(seal_source(drawn=[0, 0, 0], finished=[True, False, False]))
    assert [(one.weight, one.share) for one in found] == [(0.0, None), (0.5, None), (0.5, None)]
    found = mixed_sources(seal_source(finished=[True, True, True]))
    assert [one.weight for one in found] == [0.0, 0.0, 0.0]


def many(count: int) -> dict[str, Any]:
    entries = [{"path": "a"}] * count
    return {"sources": entries, "drawn": [1] * count, "finished": [False] * count, "recipe": {"weights": [1] * count}}


@pytest.mark.parametrize(
    "source",
    [
        *[None, [], {}, seal_source(recipe={}), seal_source(recipe=None), many(1), many(MAX_SOURCES + 1)],
        seal_source(recipe={"weights": [1, 1]}),
        *[seal_source(recipe={"weights": [1, 1, w]}) for w in (0, -1, True, float("inf"), float("nan"), 10**400)],
        *[seal_source(drawn=drawn) for drawn in ([1, 2], [1, 2, -1], [1, 2, 2**64], "abc")],
        seal_source(finished=[0, 0, 0]),
        seal_source(sources=[{"path": "a"}, {"path": "b"}, {}]),
        seal_source(sources=[{"path": "a"}, {"path": "b"}, "c"]),
    ],
)
def test_what_cannot_be_is_no_mixture(source: Any) -> None:
    assert mixed_sources(source) == ()
    assert len(mixed_sources(many(MAX_SOURCES))) == MAX_SOURCES


RECIPE: dict[str, Any] = {"transform": "m:f", "balance": 64, "micro_batch_size": 2, "length_field": "tokens"}
RECIPE |= {"cost_per_token": 1.0, "cost_per_token_squared": 4e-05}


def test_costs_that_cannot_be_say_nothing() -> None:
    assert DealtByCost.read({"sources": [], "recipe": RECIPE}) == DealtByCost(64, 2, "tokens", 1.0, 4e-05)
    wrong: list[Any] = [
        *[{"balance": value} for value in (0, -1, 1.5, "64", True, None, 2**70)],
        *[{"micro_batch_size": value} for value in (0, None, 2.0)],
        *[{"length_field": value} for value in (None, 3)],
        *[{"cost_per_token": value} for value in (-1, "1", True, float("inf"), float("nan"))],
        {"cost_per_token_squared": [1]},
        {"cost_per_token": 0, "cost_per_token_squared": 0.0},
    ]
    sources: list[Any] = [None, 3, [], {}, {"recipe": None}, {"recipe": {"shuffle": 4}}]
    for source in [*sources, *({"recipe": RECIPE | changes} for changes in wrong)]:
        assert DealtByCost.read(source) is None
