"""Documents cut into sequences, as Megatron and fms-fsdp do; and samples put into packs, as few as best fit makes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.sequences import Cut, Split, SplitSequence, cut_after, pack_samples, split_documents

BOS, EOS = "<", ">"

lengths_of_documents = st.lists(st.integers(0, 9), max_size=12)
ids = st.sampled_from([None, 0])
rules = st.builds(Split, size=st.integers(3, 12), bos=ids, eos=ids, every_bos=ids, every_eos=ids)


def token(document: int, number: int) -> str:
    return f"{document}.{number}"


def framed(lengths: list[int], rule: Split) -> list[list[str]]:
    """The documents as they are concatenated."""
    own = [[token(document, number) for number in range(length)] for document, length in enumerate(lengths)]
    return [[BOS] * (rule.bos is not None) + tokens + [EOS] * (rule.eos is not None) for tokens in own]


def written(sequence: SplitSequence) -> list[str]:
    """The tokens of a sequence."""
    found = [BOS] * sequence.bos
    for piece in sequence.pieces:
        found += [BOS] * piece.bos
        found += [token(piece.document, number) for number in range(piece.start, piece.stop)]
        found += [EOS] * piece.eos
    return found + [EOS] * sequence.eos


def texts(sequences: list[list[str]]) -> list[str]:
    """The tokens in them that are neither BOS nor EOS."""
    return [token for tokens in sequences for token in tokens if token not in (BOS, EOS)]


def moved(sequence: SplitSequence, by: int) -> SplitSequence:
    """The same of documents so many further on."""
    pieces = (piece._replace(document=piece.document + by) for piece in sequence.pieces)
    return sequence._replace(pieces=tuple(pieces))


def megatron() -> Any:
    """Megatron Core's own helpers, compiled."""
    with warnings.catch_warnings():
        # Of Transformer Engine, which is not there.
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.helpers_cpp", exc_type=ImportError)


def of_buffer(documents: list[list[str]], rule: Split) -> Iterator[list[str]]:
    """What a buffer of tokens gives that is filled document by document, as fms-fsdp's is."""
    buffer = [token for document in documents for token in document]
    while True:
        line = list(buffer)
        if rule.every_bos is not None and line[:1] != [BOS]:
            line = [BOS, *line]
        if len(line) < rule.size or not buffer:
            return
        line, buffer = line[: rule.size], line[rule.size :]
        if rule.every_eos is not None and line[-1] != EOS:
            line, buffer = [*line[:-1], EOS], [line[-1], *buffer]
        yield line


@given(lengths_of_documents, rules)
def test_sequences_are_those_of_a_buffer_of_tokens_and_every_token_up_to_what_is_left_over_comes_once(
    lengths: list[int], rule: Split
) -> None:
    sequences, left = split_documents(lengths, rule)
    found = [written(sequence) for sequence in sequences]
    assert found == list(of_buffer(framed(lengths, rule), rule))
    assert all(sequence.pieces for sequence in sequences)
    documents = framed(lengths, rule)[: left.document + 1]
    if left.document < len(lengths):
        documents[-1] = documents[-1][: left.offset]
    assert texts(found) == texts(documents)


@given(lengths_of_documents, lengths_of_documents, rules)
def test_it_goes_on_where_documents_were_left_over(before: list[int], more: list[int], rule: Split) -> None:
    whole = split_documents(before + more, rule)
    first, left = split_documents(before, rule)
    rest, end = split_documents(before + more, rule, left)
    assert (first + rest, end) == whole
    # Those that are done with need not be given again.
    kept, end_of_kept = split_documents((before + more)[left.document :], rule, Cut(0, left.offset))
    assert [written(moved(one, left.document)) for one in kept] == [written(one) for one in rest]
    assert end_of_kept == (end.document - left.document, end.offset)


@given(lengths_of_documents, rules, st.integers(0, 1))
def test_it_goes_on_after_any_sequence(lengths: list[int], rule: Split, overlap: int) -> None:
    if rule.every_bos is rule.every_eos is None:
        rule = replace(rule, overlap=overlap)
    sequences, left = split_documents(lengths, rule)
    for number, sequence in enumerate(sequences, 1):
        assert split_documents(lengths, rule, cut_after(sequence, rule)) == (sequences[number:], left)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 1))
def test_sequences_begin_where_megatrons_samples_do(lengths: list[int], size: int, overlap: int) -> None:
    sequences, left = split_documents(lengths, Split(size=size, overlap=overlap))
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


def test_every_sequence_may_begin_and_end_alike() -> None:
    rule = Split(size=5, bos=0, eos=0, every_bos=0, every_eos=0)
    sequences, left = split_documents([5, 1, 4], rule)
    assert [" ".join(written(one)) for one in sequences] == [
        "< 0.0 0.1 0.2 >",
        "< 0.3 0.4 > >",
        "< 1.0 > < >",
        "< 2.0 2.1 2.2 >",
    ]
    assert left == Cut(2, 4)


lengths_of_samples = st.lists(st.integers(1, 20), max_size=60)


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Packs by looking at every pack; of packs with the same room the one that got it last."""
    packs: list[list[int]] = []
    rooms: list[int] = []
    changed: list[int] = []
    for moment, sample in enumerate(sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))):
        fits = [pack for pack, room in enumerate(rooms) if room >= lengths[sample]]
        if fits:
            pack = min(fits, key=lambda pack: (rooms[pack], -changed[pack]))
        else:
            pack = len(packs)
            packs.append([])
            rooms.append(capacity)
            changed.append(moment)
        packs[pack].append(sample)
        rooms[pack] -= lengths[sample]
        changed[pack] = moment
    return [sorted(pack) for pack in sorted(packs, key=lambda pack: pack[0])]


@given(lengths_of_samples)
def test_packs_are_those_of_best_fit_decreasing_and_none_is_too_full(lengths: list[int]) -> None:
    packs = pack_samples(np.array(lengths, np.uint32), 20)
    assert packs == pack_samples(lengths, 20) == best_fit(lengths, 20)
    assert sorted(sample for pack in packs for sample in pack) == list(range(len(lengths)))
    filled = [sum(lengths[sample] for sample in pack) for pack in packs]
    assert all(0 < tokens <= 20 for tokens in filled)
    assert sum(2 * tokens <= 20 for tokens in filled) <= 1


def test_a_small_case_of_packs() -> None:
    #                    0  1  2  3  4  5   longest first: 3 (7), 0 (6), 5 (5), 1 (4), 4 (3), 2 (2)
    assert pack_samples([6, 4, 2, 7, 3, 5], 10) == [[0, 1], [3, 4], [2, 5]]


def test_lengths_as_of_texts_are_packed_almost_without_waste() -> None:
    spread = np.random.default_rng(0).lognormal(np.log(700) - 0.5, 1.0, 10_000)
    lengths = np.clip(np.rint(spread), 1, 8192).astype(np.int64)
    assert lengths.sum() > 0.995 * 8192 * len(pack_samples(lengths, 8192))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Split(size=0), "size .* from 1, got 0"),
        (lambda: Split(size=2, every_bos=0, every_eos=0), "size .* from 3, got 2"),
        (lambda: Split(size=9, overlap=2), "overlap .* got 2"),
        (lambda: Split(size=9, overlap=1, every_bos=0), "overlap=1"),
        (lambda: Split(size=9, overlap=1, every_eos=0), "overlap=1"),
        (lambda: split_documents([3, -1], Split(size=2)), "lengths .* got -1"),
        (lambda: split_documents([3], Split(size=2), Cut(0, 4)), "start"),
        (lambda: split_documents([3], Split(size=2), Cut(0, -1)), "start"),
        (lambda: split_documents([3], Split(size=2), Cut(1, 1)), "start"),
        (lambda: split_documents([3], Split(size=2), Cut(2, 0)), "start"),
        (lambda: split_documents([3], Split(size=2), Cut(-1, 0)), "start"),
        (lambda: pack_samples([3, 0], 10), "got 0 for sample 1"),
        (lambda: pack_samples([3, 11], 10), "got 11 for sample 1"),
        (lambda: pack_samples([], 0), "capacity .* got 0"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make()
