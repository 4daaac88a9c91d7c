"""The demo's arithmetic: it has to notice whatever could go wrong, or its "exactly once" says nothing."""

from collections.abc import Sequence

import pytest

from scripts.demonstration.demo import bar
from scripts.demonstration.demo_report import Findings, RankFindings, check, count, ends, ranges

SOURCE = list(range(11))
CHUNKS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
GOOD = [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]


def found(trained: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]] = CHUNKS) -> Findings:
    return check(SOURCE, chunks, trained, samples_per_chunk=2, step_samples=2)


def test_a_good_run_is_found_good() -> None:
    findings = found(GOOD)
    assert findings.exactly_once and findings.own_chunks
    assert findings.untrained == [10]
    assert findings.ranks == [RankFindings(5, 2, [], 1), RankFindings(5, 2, [], 1)]


@pytest.mark.parametrize(
    ("trained", "field", "value"),
    [
        ([[0, 1, 4, 5], [2, 3, 6, 7]], "missing", 2),
        ([[0, 1, 4, 4, 8], [2, 3, 6, 7, 9]], "repeated", [4]),
        ([[0, 1, 4, 5, 8], [2, 3, 6, 7, 8]], "repeated", [8]),
        ([[0, 1, 4, 5, 8], [2, 3, 6, 7, 11]], "unknown", [11]),
        ([[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]], "uneven", True),
    ],
)
def test_what_is_not_exactly_once_is_found(trained: list[list[int]], field: str, value: object) -> None:
    findings = found(trained)
    assert getattr(findings, field) == value
    assert not findings.exactly_once


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([[0, 1], [3, 2], *CHUNKS[2:]], id="another order"),
        pytest.param(CHUNKS[:-1], id="one lost"),
        pytest.param([*CHUNKS, [11]], id="one more"),
    ],
)
def test_a_stream_unlike_its_source_is_found(chunks: list[list[int]]) -> None:
    assert found(GOOD, chunks).unlike_source
    assert not found(GOOD, chunks).exactly_once


def test_a_chunk_of_another_rank_is_found() -> None:
    findings = found([[0, 1, 4, 6, 8], [2, 3, 5, 7, 9]])
    assert findings.exactly_once
    assert not findings.own_chunks
    assert [rank.foreign for rank in findings.ranks] == [[3], [2]]


def test_fewer_chunks_than_ranks_are_all_shared() -> None:
    findings = check([0, 1, 2], [[0, 1, 2]], [[0, 2], [1]], samples_per_chunk=3, step_samples=1)
    assert findings.ranks == [RankFindings(2, 0, [], 1), RankFindings(1, 0, [], 1)]


def test_ends_of_the_losses_never_overlap() -> None:
    assert ends([4.0, 3.0, 2.0]) == (4.0, 2.0, 1)
    assert ends([5.0] * 30 + [1.0] * 30) == (5.0, 1.0, 20)


def test_texts_for_people() -> None:
    assert ranges([]) == ""
    assert ranges([1, 3, 4, 5, 9]) == "1, 3-5, 9"
    assert count(1, "chunk") == "1 chunk"
    assert count(2000, "process", "es") == "2,000 processes"
    assert bar(1, 2, 3) == "#" * 10 + "+" * 10 + "." * 10
    assert bar(3, 3, 3) == "#" * 30
