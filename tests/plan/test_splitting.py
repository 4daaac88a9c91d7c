"""Documents cut into sequences: no token twice or lost, each sequence whole, in the order of Megatron and fms-fsdp."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.splitting import Cut, Piece, SplitRule, SplitSequence, cut_after, split_documents

BOS, EOS = "<", ">"

lengths_of_documents = st.lists(st.integers(0, 9), max_size=12)
rules = st.builds(
    SplitRule,
    size=st.integers(3, 12),
    bos=st.booleans(),
    eos=st.booleans(),
    every_bos=st.booleans(),
    every_eos=st.booleans(),
)


def token(document: int, number: int) -> str:
    return f"{document}.{number}"


def framed(lengths: list[int], rule: SplitRule) -> list[list[str]]:
    """The documents as they are concatenated."""
    own = [[token(document, number) for number in range(length)] for document, length in enumerate(lengths)]
    return [[BOS] * rule.bos + tokens + [EOS] * rule.eos for tokens in own]


def written(sequence: SplitSequence) -> list[str]:
    """The tokens of a sequence."""
    found = [BOS] * sequence.bos
    for piece in sequence.pieces:
        found += [BOS] * piece.bos
        found += [token(piece.document, number) for number in range(piece.start, piece.stop)]
        found += [EOS] * piece.eos
    return found + [EOS] * sequence.eos


def megatron() -> Any:
    """Megatron Core's own helpers, compiled."""
    with warnings.catch_warnings():
        # Of Transformer Engine, which is not there.
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.helpers_cpp", exc_type=ImportError)


def of_buffer(documents: list[list[str]], rule: SplitRule) -> Iterator[list[str]]:
    """What a buffer of tokens gives that is filled document by document, as fms-fsdp's is."""
    buffer = [token for document in documents for token in document]
    while True:
        line = list(buffer)
        if rule.every_bos and line[:1] != [BOS]:
            line = [BOS, *line]
        if len(line) < rule.size or not buffer:
            return
        line, buffer = line[: rule.size], line[rule.size :]
        if rule.every_eos and line[-1] != EOS:
            line, buffer = [*line[:-1], EOS], [line[-1], *buffer]
        yield line


@given(lengths_of_documents, rules)
def test_sequences_are_those_of_a_buffer_of_tokens(lengths: list[int], rule: SplitRule) -> None:
    sequences, _ = split_documents(lengths, rule)
    assert [written(sequence) for sequence in sequences] == list(of_buffer(framed(lengths, rule), rule))


@given(lengths_of_documents, rules)
def test_every_token_up_to_what_is_left_over_comes_once(lengths: list[int], rule: SplitRule) -> None:
    sequences, left = split_documents(lengths, rule)
    own = [token for sequence in sequences for token in written(sequence) if token not in (BOS, EOS)]
    documents = framed(lengths, rule)[: left.document + 1]
    if left.document < len(lengths):
        documents[-1] = documents[-1][: left.offset]
    expected = [token for tokens in documents for token in tokens if token not in (BOS, EOS)]
    assert own == expected
    assert all(len(written(sequence)) == rule.size for sequence in sequences)
    assert all(sequence.pieces for sequence in sequences)


@given(lengths_of_documents, lengths_of_documents, rules)
def test_it_goes_on_where_documents_were_left_over(before: list[int], more: list[int], rule: SplitRule) -> None:
    whole = split_documents(before + more, rule)
    first, left = split_documents(before, rule)
    rest, end = split_documents(before + more, rule, left)
    assert (first + rest, end) == whole
    # Those that are done with need not be given again.
    kept, end_of_kept = split_documents((before + more)[left.document :], rule, Cut(0, left.offset))
    assert [written(one) for one in kept] == [
        written(
            one._replace(pieces=tuple(piece._replace(document=piece.document - left.document) for piece in one.pieces))
        )
        for one in rest
    ]
    assert end_of_kept == (end.document - left.document, end.offset)


@given(lengths_of_documents, rules, st.integers(0, 1))
def test_it_goes_on_after_any_sequence(lengths: list[int], rule: SplitRule, overlap: int) -> None:
    if not (rule.every_bos or rule.every_eos):
        rule = replace(rule, overlap=overlap)
    sequences, left = split_documents(lengths, rule)
    for number, sequence in enumerate(sequences, 1):
        assert split_documents(lengths, rule, cut_after(sequence, rule)) == (sequences[number:], left)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 1))
def test_sequences_begin_where_megatrons_samples_do(lengths: list[int], size: int, overlap: int) -> None:
    sequences, left = split_documents(lengths, SplitRule(size=size, overlap=overlap))
    tokens = sum(lengths)
    if tokens <= overlap:
        assert sequences == []
        return
    sizes, order = np.array(lengths, np.int32), np.arange(len(lengths), dtype=np.int32)
    samples = megatron().build_sample_idx_int32(sizes, order, size, 1, tokens, True, overlap)
    assert len(sequences) == len(samples) - 1
    starts = np.concatenate(([0], np.cumsum(lengths)))
    found = [starts[sequence.pieces[0].document] + sequence.pieces[0].start for sequence in sequences]
    # Where a document ends it may name the end of that one or the start of the next.
    assert [*found, starts[left.document] + left.offset] == [starts[at] + offset for at, offset in samples.tolist()]
    assert all(len(written(sequence)) == size + overlap for sequence in sequences)


def test_a_small_case() -> None:
    sequences, left = split_documents([4, 2, 5], SplitRule(size=6, eos=True))
    assert sequences == [
        SplitSequence((Piece(0, 0, 4, False, True), Piece(1, 0, 1, False, False)), False, False),
        SplitSequence((Piece(1, 1, 2, False, True), Piece(2, 0, 4, False, False)), False, False),
    ]
    assert left == Cut(2, 4)


def test_the_last_token_of_a_sequence_is_the_first_of_the_next() -> None:
    sequences, left = split_documents([4, 3], SplitRule(size=3, overlap=1))
    assert [written(one) for one in sequences] == [["0.0", "0.1", "0.2", "0.3"], ["0.3", "1.0", "1.1", "1.2"]]
    assert left == Cut(1, 2)


def test_every_sequence_may_begin_and_end_alike() -> None:
    rule = SplitRule(size=5, bos=True, eos=True, every_bos=True, every_eos=True)
    sequences, left = split_documents([5, 1, 4], rule)
    assert [" ".join(written(one)) for one in sequences] == [
        "< 0.0 0.1 0.2 >",
        "< 0.3 0.4 > >",
        "< 1.0 > < >",
        "< 2.0 2.1 2.2 >",
    ]
    assert left == Cut(2, 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "size is a number of tokens from 1, got 0"),
        ({"size": 2, "every_bos": True, "every_eos": True}, "size is a number of tokens from 3, got 2"),
        ({"size": 9, "overlap": 2}, "overlap is 0 or 1, got 2"),
        ({"size": 9, "overlap": 1, "every_bos": True}, "goes with neither"),
    ],
)
def test_impossible_rules_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitRule(**values)


def test_impossible_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths are 0 or more, got -1"):
        split_documents([3, -1], SplitRule(size=2))
    for start in (Cut(0, 4), Cut(1, 1), Cut(2, 0), Cut(-1, 0)):
        with pytest.raises(ValueError, match="start is a place in one of 1 documents"):
            split_documents([3], SplitRule(size=2), start)
