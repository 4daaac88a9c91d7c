"""What a seal says of the mixture of sources, and what it cannot say."""

from typing import Any

import pytest

from lazyshard.format.source_facts import MAX_SOURCES, MixedSource, mixed_sources


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
