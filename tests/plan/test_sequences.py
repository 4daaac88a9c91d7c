"""Sequences window by window: the same as at once where rows are cut, and each row in one where they stay whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.sequences import (
    BEGINNING,
    Cut,
    Form,
    Pack,
    Pad,
    Piece,
    Split,
    SplitSequence,
    completed,
    make_sequences,
    pack_samples,
    split_rest,
)
from tests.plan.test_splitting import BOS, EOS, framed, ids, lengths_of_documents, moved, rules, texts, token, written

overlapping = st.builds(Split, size=st.integers(1, 9), bos=ids, eos=ids, overlap=st.integers(0, 1))


def whole(*documents: int, tokens: int = 1) -> SplitSequence:
    return SplitSequence(tuple(Piece(one, 0, tokens, False, False) for one in documents), False, False)


def documents(sequences: list[SplitSequence]) -> list[list[int]]:
    return [[piece.document for piece in one.pieces] for one in sequences]


@given(lengths_of_documents, rules)
def test_with_what_is_left_over_every_token_comes_once(lengths: list[int], rule: Split) -> None:
    found = [written(one) for one in make_sequences(lengths, rule, last=True)[0]]
    assert texts(found) == texts(framed(lengths, rule))
    assert all(len(one) == rule.size for one in found[:-1])
    assert all(0 < len(one) <= rule.size for one in found[-1:])
    assert all(one[0] == BOS for one in found if rule.every_bos is not None)
    assert all(one[-1] == EOS for one in found if rule.every_eos is not None)


@given(lengths_of_documents, overlapping)
def test_with_an_overlap_the_last_one_goes_on_with_the_token_before_it(lengths: list[int], rule: Split) -> None:
    sequences = [written(one) for one in make_sequences(lengths, rule, last=True)[0]]
    found = sequences[0] if sequences else []
    for one in sequences[1:]:
        assert not rule.overlap or one[0] == found[-1]
        found = found + one[rule.overlap :]
    assert found == [one for tokens in framed(lengths, rule) for one in tokens]
    assert all(len(one) > rule.overlap for one in sequences[1:])


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 20), st.one_of(rules, overlapping))
def test_windows_cut_documents_as_if_there_were_none(lengths: list[int], window: int, rule: Split) -> None:
    found: list[list[str]] = []
    first, start = 0, BEGINNING
    for stop in range(window, len(lengths) + window, window):
        last = stop >= len(lengths)
        made, left = make_sequences(lengths[first:stop], rule, start, last=last, begun=bool(found))
        found += [written(moved(one, first)) for one in made]
        first, start = first + left.document, Cut(0, left.offset)
    assert found == [written(one) for one in make_sequences(lengths, rule, last=True)[0]]


def test_one_token_that_the_sequence_before_has_already_is_nothing_left_over() -> None:
    rule = Split(size=2, overlap=1)
    made, left = make_sequences([3], rule)
    assert [written(one) for one in made] == [[token(0, 0), token(0, 1), token(0, 2)]]
    assert split_rest([3], rule, left, begun=True) is None
    # A document of one token that begins a stream is that very place, but nobody has it yet.
    assert split_rest([1], rule, BEGINNING, begun=False) == whole(0)


@given(st.lists(st.integers(1, 10), max_size=20), st.integers(10, 15))
def test_packs_are_those_of_pack_samples_and_padded_documents_stand_alone(lengths: list[int], size: int) -> None:
    alone = [[number] for number in range(len(lengths))]
    made: list[tuple[Form, list[list[int]]]] = [(Pack(size), pack_samples(lengths, size)), (Pad(size), alone)]
    for rule, expected in made:
        sequences = make_sequences(lengths, rule, last=True)[0]
        assert documents(sequences) == expected
        pieces = [piece for one in sequences for piece in one.pieces]
        assert pieces == [Piece(n, 0, lengths[n], False, False) for group in expected for n in group]


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(0, 12))
def test_a_completed_micro_batch_has_every_document_and_takes_packs_apart_first(
    packs: list[list[int]], more: int
) -> None:
    numbers = iter(range(99))
    left = [
        SplitSequence(tuple(Piece(next(numbers), 0, n, False, False) for n in pack), False, False) for pack in packs
    ]
    everything = [number for one in documents(left) for number in one]
    found = documents(completed(left, len(left) + more, Pack(99)))
    assert len(found) == len(left) + more
    different = found[: min(len(found), len(everything))]
    assert [number for one in different for number in one] == everything
    assert found[len(different) :] == [
        different[place % len(different)] for place in range(len(found) - len(different))
    ]


def test_a_pack_is_taken_apart_where_its_halves_are_nearest() -> None:
    pack = SplitSequence(
        tuple(Piece(n, 0, tokens, False, False) for n, tokens in enumerate([5, 1, 1, 1, 4])), False, False
    )
    assert documents(completed([pack, whole(9)], 3, Pack(20))) == [[0, 1], [2, 3, 4], [9]]
    assert documents(completed([pack, whole(9)], 4, Pack(20))) == [[0], [1], [2, 3, 4], [9]]


def test_others_come_once_more_in_turn() -> None:
    assert documents(completed([whole(0), whole(1, 2)], 5, Pad(9))) == [[0], [1, 2], [0], [1, 2], [0]]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Pack(0), "size .* got 0"),
        (lambda: make_sequences([1], Pack(4), Cut(0, 1)), "not begun within one"),
        (lambda: make_sequences([1], Pad(4), Cut(0, 1)), "not begun within one"),
        (lambda: make_sequences([3, 1, 2], Pad(2)), "lengths are from 1 to 2"),
        (lambda: make_sequences([0], Pad(2)), "lengths are from 1 to 2"),
        (lambda: completed([whole(0), whole(1)], 1, Pad(9)), "from 1 to 1 .* got 2"),
        (lambda: completed([], 1, Pad(9)), "from 1 to 1 .* got 0"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make()
