"""Steps for many rows together: shuffle or pack blocks, balance by cost, or split into sequences.

A stripe, which is one chunk for each rank, may end in the middle of the rows made of a source row, or of a block of
packed rows. Then the next stripe begins with that source row, after its `lead`. Likewise a sequence may end within a
row: its position is the one before the source row, with the numbers of its published rows and of published tokens of
the last of them::

    rows made of a, b, c ...   1 2  3 4  5 6  7 8 ...            aaaa bbbbb cccc
    stripes, sequences         5 rows each                       6 tokens each
    position after the second  before c, 1 + n skipped, 1 lead   before c, 1 row with 3 tokens
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.format.arrays import MAX_ROW_BYTES
from lazyshard.format.batch import EncodedRow, encode_encoded_pack, encode_pack
from lazyshard.plan.balance import Balance, Cost
from lazyshard.plan.sequences import Cut, SplitSequence, cut_after, cut_tokens, make_sequences, pack_samples
from lazyshard.plan.shuffle import permutation
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import count
from lazyshard_producer.opening import source_kind
from lazyshard_producer.position import RunPosition, plain_name
from lazyshard_producer.rows.encoding import MAX_TOKENS, document_of, write_tokens
from lazyshard_producer.rows.reader import Batch, Line, MadeRow, Mixer, SourceSpan, Unit, by_length
from lazyshard_producer.rows.recipe import MadeOfRow, Maker, Workers
from lazyshard_producer.rows.refusals import locate
from lazyshard_producer.sources.source import Rows, bad_row, line_size, refuse_source

# Maximum bytes of all rows in a pack, so that readers accept the pack, which is longer than its rows.
_PACK_BYTES: Final = MAX_ROW_BYTES // 2
_MOST: Final = 64  # sequences that are made at a time: a book has thousands


def shuffle(seed: int, rows: list[MadeRow], number: int) -> list[MadeRow]:
    """Returns the rows of a block in an order that depends on the seed and the number of the block."""
    # Element i of the permutation is the new index of row i.
    return [rows[index] for index in np.argsort(permutation(len(rows), seed, number)).tolist()]


def pack(capacity: int, most_patches: int, rows: list[MadeRow], number: int) -> list[MadeRow]:
    """Returns packs of rows with at most so many tokens and patches each; see `lazyshard.plan.sequences`."""
    made = []
    for indices in pack_samples([row.tokens for row in rows], capacity, [row.patches for row in rows], most_patches):
        part: list[MadeRow] = []
        held = 0
        for row in (rows[index] for index in indices):
            if part and held + line_size(row.line) > _PACK_BYTES:
                made.append(_packed(part))
                part, held = [], 0
            part.append(row)
            held += line_size(row.line)
        made.append(_packed(part))
    return made


def _packed(rows: list[MadeRow]) -> MadeRow:
    lengths, patches = [row.tokens for row in rows], sum(row.patches for row in rows)
    plain = [row.line for row in rows if isinstance(row.line, bytes)]
    encoded = [row.line for row in rows if isinstance(row.line, EncodedRow)]
    # All rows have the same type.
    line: Line = encode_encoded_pack(encoded, lengths) if encoded else encode_pack(plain, lengths)
    return MadeRow(line, rows[0].place, sum(lengths), sum(row.squares for row in rows), patches)


class Units:
    """Publishes the rows of each unit, the first perhaps from its middle on, after `samples` published samples.

    `arrays`: rows contain arrays, as encoded rows do.
    """

    def __init__(self, mixer: Mixer, settings: Settings, samples: int, *, arrays: bool) -> None:
        self._mixer, self._settings, self._samples, self._arrays = mixer, settings, samples, arrays
        self._begun = mixer.start.skip > 0
        self._measured = by_length(settings) or any((settings.split, settings.pad, settings.measure))

    def add(self, unit: Unit) -> Iterator[Batch]:
        """Adds the rows made of more source rows; yields the rows that can be published now."""
        skipped = self._mixer.start.skip if self._begun and self._find(unit.made) else 0
        if rows := unit.made[skipped:]:
            yield self._batch(rows, lambda index: unit.position(skipped + index + 1))

    def rest(self) -> Iterator[Batch]:
        """Yields the remaining rows when all source rows are read."""
        if self._begun:
            self._lose()
        yield from ()

    def _find(self, rows: Sequence[MadeRow]) -> bool:
        """Returns whether these rows begin with the published rows; if not, the result of `_lose`."""
        self._begun, start, digest = False, self._mixer.start, xxhash.xxh3_64()
        for row in rows[: start.skip]:
            digest.update(row.data)
        return (len(rows) >= start.skip and digest.hexdigest() == start.skipped) or self._lose()

    def _lose(self) -> bool:
        """Returns False if the sources may continue with other rows. Raises SourceRefused if not."""
        start = self._mixer.start
        sources = [source for source, rows in zip(self._settings.sources, start.unit, strict=True) if rows]
        names, read = ", ".join(plain_name(source.path) for source in sources), sum(start.unit)
        if all(source.resume == "append" and source_kind(source) == "stdin" for source in sources):
            lost = f"unpublished rows of the last {read} rows that were read before are lost"
            self._mixer.warn(f"{names}: continues with new rows; {lost}")
            return False
        why = f"the last chunk ends within rows made of {count(read, 'row')} of it, which are different now: "
        changed = "the source was changed in a part that was read, or a function returns other rows for the same row"
        hint, part = f"; {changed}; restore it, or choose another --out", count(start.skip, "row")
        raise refuse_source(names, f"XXH3 {start.skipped} of the first {part}", "another one", hint, where=why)

    def _batch(self, rows: list[MadeRow], position: Callable[[int], RunPosition]) -> Batch:
        tokens = [row.tokens for row in rows] if self._measured else None
        lines, patches = [row.line for row in rows], [row.patches for row in rows]
        return Batch(self._mixer, lines, lambda index: rows[index].place, position, tokens, patches)


def make_batches(mixer: Mixer, makers: Maker | Workers, units: Units) -> Iterator[Batch]:
    """Yields the rows made of source rows; `units` processes each source row, or each block of them."""
    settings = mixer.settings
    left = sum(mixer.start.unit) if mixer.start.skip else 0  # remaining source rows of a begun unit
    last, rows, most_bytes = mixer.here(mixer.counts()), settings.shuffle or 1, math.inf
    arrange = partial(shuffle, settings.seed) if settings.shuffle else None
    if settings.pack:
        rows, most_bytes = settings.pack_buffer, settings.pack_buffer_bytes
        arrange = partial(pack, settings.pack, settings.pack_patches or MAX_TOKENS)

    def end(unit: Unit) -> Iterator[Batch]:
        nonlocal last
        if arrange is not None:
            unit.made = arrange(unit.made, mixer.blocks)
            mixer.blocks += 1
            last = last._replace(counts={**last.counts, "blocks": mixer.blocks})
        unit.after = last
        return units.add(unit)

    unit: Unit | None = None
    nothing, size, taken, given = Rows(), 0, 0, False
    for made in _make(mixer, makers):
        if made is None:
            if not given:  # an empty batch, so that the caller can check signals
                yield Batch(mixer, nothing.lines, nothing.place, nothing.position)
            given = False
            continue
        # The batches of all earlier source rows have been consumed by now.
        span, index, row = made
        place = span.place(index)
        if unit is None:
            # Sources may have rejoined since the previous row.
            before = last if index else span.before._replace(counts=last.counts)
            unit, size, taken = Unit(mixer, before, [], {}), 0, 0
        mixer.rows += 1
        if row.duplicate:
            mixer.count_duplicate(place)
        if row.refused is not None:
            mixer.refusals.take(row.refused, place, span.lines[index])
        last = span.after(index, mixer.counts())
        unit.made += [MadeRow(line, place, tokens, tokens * tokens, patches) for line, (tokens, patches) in row.rows]
        unit.of[span.source] = unit.of.get(span.source, 0) + 1
        size += sum(line_size(line) for line, _ in row.rows)
        taken, left = taken + 1, left - 1
        if taken == rows or left == 0 or size >= most_bytes:
            for batch in end(unit):
                given = True
                yield batch
            unit = None
    if unit is not None:
        yield from end(unit)
    yield from units.rest()


def _make(mixer: Mixer, makers: Maker | Workers) -> Iterator[tuple[SourceSpan, int, MadeOfRow] | None]:
    """Yields a span, an index in it, and the rows made of that source row; yields None regularly to return control."""
    number = mixer.rows  # source rows submitted so far
    under_way: deque[tuple[SourceSpan, int, Any]] = deque()
    span, first = mixer.read(), 0
    while span is not None or under_way:
        while span is not None and len(under_way) < makers.most:
            if first == len(span.lines):
                span, first = mixer.read(), 0
                if span is None or not span.lines:
                    break
            lines = span.lines[first : first + makers.rows]
            with mixer.watchdog.ask(partial(_describe, span, first)):
                under_way.append((span, first, makers.submit(lines, number)))
            number, first = number + len(lines), first + len(lines)
        if under_way and (made := makers.result(under_way[0][2], 0.1)) is not None:
            of, at, _ = under_way.popleft()
            for index, row in enumerate(made, at):
                yield of, index, row
        yield None


def _describe(span: SourceSpan, index: int) -> str:
    place = span.place(index)
    return f"running the functions for rows at {place.file}:{place.line}"


class Stripes(Units):
    """Collects rows until they fill a stripe, and balances them by cost."""

    def __init__(self, mixer: Mixer, settings: Settings, samples: int, *, arrays: bool) -> None:
        super().__init__(mixer, settings, samples, arrays=arrays)
        ranks, size, seed = settings.balance or 1, settings.samples_per_chunk, settings.seed
        self._balance = Balance(ranks, size, settings.micro_batch_size, seed)
        self._cost = Cost(settings.cost_per_token, settings.cost_per_token_squared, settings.cost_per_patch)
        # The first published rows of the unit, its lead, may belong to the stripe before.
        self._first = samples - (mixer.start.skip - mixer.start.lead)
        self._start: Unit | None = None  # its rows precede the stripe; it counts the stripe's source rows
        self._rows: list[MadeRow] = []
        self._after = mixer.here(mixer.counts())

    def add(self, unit: Unit) -> Iterator[Batch]:
        """Yields the stripes that more rows fill; see `Units.add`."""
        start = self._start = self._start or Unit(self._mixer, unit.before, [], {})
        self._after, skipped = unit.after, 0
        self._rows += unit.made
        for source, rows in unit.of.items():
            start.of[source] = start.of.get(source, 0) + rows
        if self._begun:
            begun, first = self._mixer.start, self._mixer.start.lead
            if sum(start.of.values()) < sum(begun.unit):
                return
            # If only the lead is published, the stripe is not complete yet.
            published = begun.skip - first
            own = self._rows[first : first + self._balance.room(self._first)]
            if self._find(self._rows[:first] + (self._dealt(own) if published else [])):
                start.made, self._rows, skipped = self._rows[:first], self._rows[first:], published
            else:
                self._first = self._samples
        while skipped or len(self._rows) >= self._balance.room(self._first):
            taken = min(len(self._rows), self._balance.room(self._first))
            # The remaining rows of the last unit begin the next stripe.
            left = len(self._rows) - taken
            lead = unit.made[: len(unit.made) - left]
            yield self._deal(taken, Unit(self._mixer, unit.before, lead, unit.of) if left else None, skipped)
            skipped = 0

    def rest(self) -> Iterator[Batch]:
        """Yields the rows of the last, incomplete stripe, balanced as well as possible."""
        if self._begun:
            self._lose()
            self._first = self._samples
        if self._rows:
            yield self._deal(len(self._rows), None, 0)

    def _deal(self, taken: int, following: Unit | None, skipped: int) -> Batch:
        """Returns a stripe; `following` holds the rows of its last source row or block, without those of the next."""
        assert self._start is not None
        lead, rest = self._start.made, following or Unit(self._mixer, self._after, [], {})
        dealt = self._dealt(self._rows[:taken])
        unit = Unit(self._mixer, self._start.before, lead + dealt, self._start.of)

        def position(index: int) -> RunPosition:
            if skipped + index + 1 == len(dealt):
                return rest.position(len(rest.made), lead=len(rest.made))
            return unit.position(len(lead) + skipped + index + 1, lead=len(lead))

        self._first += taken
        # If the next stripe begins with a new source row, its start is set with that row: sources may rejoin before.
        self._rows, self._start = self._rows[taken:], following
        return self._batch(dealt[skipped:], position)

    def _dealt(self, rows: list[MadeRow]) -> list[MadeRow]:
        sizes = np.array([(row.tokens, row.squares, row.patches) for row in rows], np.float64).reshape(-1, 3)
        costs = self._cost.of_packs(*sizes.T)
        return [rows[index] for index in self._balance.order(costs, self._first).tolist()]


class _OpenDocument(NamedTuple):
    """A row with unpublished tokens, by its number in a unit; `framed` is its length with BOS and EOS."""

    unit: Unit
    row: int
    tokens: Mapping[str, npt.NDArray[Any]]
    framed: int


class Splitter(Units):
    """Concatenates rows and splits them into sequences. The rows are made by `read_document`."""

    def __init__(self, mixer: Mixer, settings: Settings, samples: int, *, arrays: bool) -> None:
        super().__init__(mixer, settings, samples, arrays=arrays)
        assert settings.splitting is not None
        self._split, self._follows = settings.splitting, samples > 0  # whether a sequence precedes
        (self._frame,) = self._split.framed([0])
        self._documents: list[_OpenDocument] = []
        self._offset = self._left = 0  # published tokens of the first document, unpublished tokens of all documents
        self._after = mixer.here(mixer.counts())  # position after all documents

    def add(self, unit: Unit) -> Iterator[Batch]:
        """Yields the sequences that more rows fill; see `Units.add`."""
        self._after, split = unit.after, self._split
        added = [
            _OpenDocument(unit, number, document_of(row.line), row.tokens + self._frame)
            for number, row in enumerate(unit.made)
            if isinstance(row.line, EncodedRow)  # all of them are
        ]
        if self._begun:
            # The last published row may be published only in part.
            begun, cut = self._mixer.start, self._mixer.start.cut
            first = begun.skip - (cut > 0)
            if self._find(unit.made) and (not cut or cut < added[first].framed or self._lose()):
                added, self._offset = added[first:], cut
            else:
                self._follows = False
            self._left = -self._offset
        self._documents += added
        self._left += sum(one.framed for one in added)
        if self._left >= split.size + split.overlap - (split.every_bos is not None):
            yield from self._cut_all(last=False)
            self._left = sum(one.framed for one in self._documents) - self._offset

    def rest(self) -> Iterator[Batch]:
        """Yields the remaining tokens as a shorter sequence."""
        if self._begun:
            self._follows = self._lose()
        yield from self._cut_all(last=True)

    def _cut_all(self, *, last: bool) -> Iterator[Batch]:
        documents, start, begun = self._documents, Cut(0, self._offset), self._follows
        lengths = [one.framed - self._frame for one in documents]
        sequences, end = make_sequences(lengths, self._split, start, last=last, begun=begun)
        ends = [*(cut_after(one, self._split) for one in sequences[:-1]), end]

        def position(first: int, index: int) -> RunPosition:
            document, offset = ends[first + index]
            if document < len(documents) and offset == documents[document].framed:
                document, offset = document + 1, 0
            if document == len(documents):
                return self._mixer.position(self._after)
            one = documents[document]
            return one.unit.position(one.row + (offset > 0), cut=offset)

        for first in range(0, len(sequences), _MOST):
            rows = [self._row(sequence) for sequence in sequences[first : first + _MOST]]
            yield self._batch(rows, partial(position, first))
        self._documents, self._offset = documents[end.document :], end.offset
        self._follows |= bool(sequences)

    def _row(self, sequence: SplitSequence) -> MadeRow:
        documents = {piece.document: self._documents[piece.document] for piece in sequence.pieces}
        first = next(iter(documents.values()))
        try:
            tokens = cut_tokens(sequence, {number: one.tokens for number, one in documents.items()}, self._split)
        except ValueError as cause:
            # Ends the run: skipping the row would shift all tokens after it.
            other = next((one for one in documents.values() if one.tokens.keys() != first.tokens.keys()), first)
            hint = "and this is the first that differs from the previous row; give labels to all rows, or to none"
            raise locate(bad_row(f"--split: {cause}, {hint}"), other.unit.made[other.row].place) from cause
        length = len(tokens["input_ids"])
        line = write_tokens(tokens, length, arrays=self._arrays)
        return MadeRow(line, first.unit.made[first.row].place, length)
