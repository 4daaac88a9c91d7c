"""Documents cut into sequences, as Megatron and fms-fsdp do, also window by window; samples put into packs."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan import sequences as planned
from lazyshard.plan.sequences import Cut, Pack, Piece, Split, completed, make_sequences, pack_samples
from tests.plan.cases import megatron
from tests.stream.streams import refusal_of

BOS, EOS = "<", ">"

lengths_of_documents = st.lists(st.integers(0, 9), max_size=12)
ids = st.sampled_from([None, 0])
rules = st.builds(Split, size=st.integers(3, 12), bos=ids, eos=ids, every_bos=ids, every_eos=ids)


def token(document: int, number: int) -> str:
    return f"{document}.{number}"


def framed(lengths: list[int], rule: Split) -> list[list[str]]:
    own = [[token(document, number) for number in range(length)] for document, length in enumerate(lengths)]
    return [[BOS] * (rule.bos is not None) + tokens + [EOS] * (rule.eos is not None) for tokens in own]


def written(sequence: planned.SplitSequence) -> list[str]:
    found = [BOS] * sequence.bos
    for piece in sequence.pieces:
        found += [BOS] * piece.bos
        found += [token(piece.document, number) for number in range(piece.start, piece.stop)]
        found += [EOS] * piece.eos
    return found + [EOS] * sequence.eos


def texts(sequences: list[list[str]]) -> list[str]:
    return [token for tokens in sequences for token in tokens if token not in (BOS, EOS)]


def moved(sequence: planned.SplitSequence, by: int) -> planned.SplitSequence:
    pieces = (piece._replace(document=piece.document + by) for piece in sequence.pieces)
    return sequence._replace(pieces=tuple(pieces))


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
def test_sequences_are_those_of_a_buffer_of_tokens_and_every_token_comes_once(lengths: list[int], rule: Split) -> None:
    sequences, left = make_sequences(lengths, rule)
    found = [written(sequence) for sequence in sequences]
    assert found == list(of_buffer(framed(lengths, rule), rule))
    assert all(sequence.pieces for sequence in sequences)
    documents = framed(lengths, rule)[: left.document + 1]
    if left.document < len(lengths):
        documents[-1] = documents[-1][: left.offset]
    assert texts(found) == texts(documents)


@given(lengths_of_documents, lengths_of_documents, rules)
def test_it_goes_on_where_documents_were_left_over(before: list[int], more: list[int], rule: Split) -> None:
    whole = make_sequences(before + more, rule)
    first, left = make_sequences(before, rule)
    rest, end = make_sequences(before + more, rule, left)
    assert (first + rest, end) == whole
    kept, end_of_kept = make_sequences((before + more)[left.document :], rule, Cut(0, left.offset))
    assert [written(moved(one, left.document)) for one in kept] == [written(one) for one in rest]
    assert end_of_kept == (end.document - left.document, end.offset)


@given(lengths_of_documents, rules, st.integers(0, 1))
def test_it_goes_on_after_any_sequence(lengths: list[int], rule: Split, overlap: int) -> None:
    if rule.every_bos is rule.every_eos is None:
        rule = replace(rule, overlap=overlap)
    sequences, left = make_sequences(lengths, rule)
    for number, sequence in enumerate(sequences, 1):
        assert make_sequences(lengths, rule, planned.cut_after(sequence, rule)) == (sequences[number:], left)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 1))
def test_sequences_begin_where_megatrons_samples_do(lengths: list[int], size: int, overlap: int) -> None:
    sequences, left = make_sequences(lengths, Split(size=size, overlap=overlap))
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


def best_fit_of_two(samples: list[tuple[int, int]], bounds: tuple[int, int]) -> list[list[int]]:
    """Packs by looking at every pack; a sample is as long, and a pack as full, as its shares of the bounds say."""
    packs: list[list[int]] = []

    def left(*pack: int) -> list[float]:
        return [(bound - sum(samples[one][size] for one in pack)) / bound for size, bound in enumerate(bounds)]

    for sample in sorted(range(len(samples)), key=lambda sample: (min(left(sample)), sample)):
        fits = [pack for pack in packs if min(left(*pack, sample)) >= 0]
        if not fits:
            packs.append([])
        min(fits or packs[-1:], key=lambda pack: sum(left(*pack))).append(sample)
    return [sorted(pack) for pack in sorted(packs, key=lambda pack: pack[0])]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=60))
def test_packs_exceed_neither_bound_and_are_those_of_best_fit_decreasing(samples: list[tuple[int, int]]) -> None:
    lengths, patches = map(list, zip(*samples, strict=True))
    packs = pack_samples(lengths, 20, patches, 12)
    assert packs == (best_fit(lengths, 20) if sum(patches) <= 12 else best_fit_of_two(samples, (20, 12)))
    assert sorted(sample for pack in packs for sample in pack) == list(range(len(samples)))
    filled = [(sum(lengths[one] for one in pack), sum(patches[one] for one in pack)) for pack in packs]
    assert all(tokens <= 20 and held <= 12 for tokens, held in filled)
    assert sum(2 * tokens <= 20 and 2 * held <= 12 for tokens, held in filled) <= 1


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Split(size=0), "size .* at least 1, got 0"),
        (lambda: Split(size=2, every_bos=0, every_eos=0), "size .* at least 3, got 2"),
        (lambda: Split(size=9, overlap=2), "overlap .* got 2"),
        (lambda: Split(size=9, overlap=1, every_bos=0), "overlap=1"),
        (lambda: Split(size=9, overlap=1, every_eos=0), "overlap=1"),
        (lambda: make_sequences([3, -1], Split(size=2)), "lengths .* got -1"),
        (lambda: pack_samples([3, 0], 10), "got 0 for sample 1"),
        (lambda: pack_samples([3, 11], 10), "got 11 for sample 1"),
        (lambda: pack_samples([], 0), "capacity .* got 0"),
        (lambda: pack_samples([3, 4], 10, [5, 6], 5), r"at most \[10, 5\], got \[4, 6\]"),
        (lambda: Pack(0), "size .* got 0"),
        (lambda: planned.Pad(0), "size .* got 0"),
        (lambda: make_sequences([1], Pack(4), Cut(0, 1)), "cannot start within"),
        (lambda: make_sequences([1], planned.Pad(4), Cut(0, 1)), "cannot start within"),
        (lambda: make_sequences([3, 1, 2], planned.Pad(2)), "lengths must be from 1 to 2"),
        (lambda: make_sequences([0], planned.Pad(2)), "lengths must be from 1 to 2"),
        (lambda: completed([whole(0), whole(1)], 1, planned.Pad(9)), "from 1 to 1 .* got 2"),
        (lambda: completed([], 1, planned.Pad(9)), "from 1 to 1 .* got 0"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], what: str) -> None:
    refusal_of(ValueError, what, make)


def test_a_place_that_no_document_has_is_no_start() -> None:
    for at in ((0, 4), (0, -1), (1, 1), (2, 0), (-1, 0)):
        refusal_of(ValueError, "start", make_sequences, [3], Split(size=2), Cut(*at))


overlapping = st.builds(Split, size=st.integers(1, 9), bos=ids, eos=ids, overlap=st.integers(0, 1))


def whole(*documents: int, tokens: int = 1) -> planned.SplitSequence:
    return planned.SplitSequence(tuple(Piece(one, 0, tokens, False, False) for one in documents), False, False)


def documents(sequences: list[planned.SplitSequence]) -> list[list[int]]:
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
    first, start = 0, planned.BEGINNING
    for stop in range(window, len(lengths) + window, window):
        last = stop >= len(lengths)
        made, left = make_sequences(lengths[first:stop], rule, start, last=last, begun=bool(found))
        found += [written(moved(one, first)) for one in made]
        first, start = first + left.document, Cut(0, left.offset)
    assert found == [written(one) for one in make_sequences(lengths, rule, last=True)[0]]


@given(st.lists(st.integers(1, 10), max_size=20), st.integers(10, 15))
def test_packs_are_those_of_pack_samples_and_padded_documents_stand_alone(lengths: list[int], size: int) -> None:
    alone = [[number] for number in range(len(lengths))]
    rules: list[planned.Form] = [Pack(size), planned.Pad(size)]
    for rule, expected in zip(rules, (pack_samples(lengths, size), alone), strict=True):
        sequences = make_sequences(lengths, rule, last=True)[0]
        assert documents(sequences) == expected
        pieces = [piece for one in sequences for piece in one.pieces]
        assert pieces == [Piece(n, 0, lengths[n], False, False) for group in expected for n in group]


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(0, 12))
def test_a_completed_micro_batch_has_every_document_and_takes_packs_apart(packs: list[list[int]], more: int) -> None:
    numbers = iter(range(99))
    pieces = [tuple(Piece(next(numbers), 0, n, False, False) for n in pack) for pack in packs]
    left = [planned.SplitSequence(one, False, False) for one in pieces]
    everything = [number for one in documents(left) for number in one]
    found = documents(completed(left, len(left) + more, Pack(99)))
    assert len(found) == len(left) + more
    different = found[: min(len(found), len(everything))]
    assert [number for one in different for number in one] == everything
    assert found[len(different) :] == [different[at % len(different)] for at in range(len(found) - len(different))]


def test_a_pack_is_taken_apart_where_its_halves_are_nearest_then_others_come_once_more_in_turn() -> None:
    pieces = tuple(Piece(n, 0, tokens, False, False) for n, tokens in enumerate([5, 1, 1, 1, 4]))
    pack = planned.SplitSequence(pieces, False, False)
    assert documents(completed([pack, whole(9)], 3, Pack(20))) == [[0, 1], [2, 3, 4], [9]]
    assert documents(completed([pack, whole(9)], 4, Pack(20))) == [[0], [1], [2, 3, 4], [9]]
    assert documents(completed([whole(0), whole(1, 2)], 5, planned.Pad(9))) == [[0], [1, 2], [0], [1, 2], [0]]
    assert pack_samples([6, 4, 2, 7, 3, 5], 10) == [[0, 1], [3, 4], [2, 5]]
    spread = np.random.default_rng(0).lognormal(np.log(700) - 0.5, 1.0, 10_000)
    lengths = np.clip(np.rint(spread), 1, 8192).astype(np.int64)
    assert lengths.sum() > 0.995 * 8192 * len(pack_samples(lengths, 8192))
