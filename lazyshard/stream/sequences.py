"""Which sequences the rows of streams make, window by window, from their lengths in tokens alone.

Rows are numbered in the order in which one rank draws them, from one stream or a blend. Training makes its sequences
this way, and tracing a run makes the same ones again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import xxhash

from lazyshard.errors import StateMismatch
from lazyshard.format.state import SequenceState, WindowPlace
from lazyshard.part import BoolArray, Int64Array, Part, UInt32Array
from lazyshard.plan.blend import BlendCourse, BlendPiece, goes_on
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Gaps
from lazyshard.plan.sequences import Cut, Form, Piece, Split, SplitSequence, cut_after, make_sequences
from lazyshard.plan.shuffle import permutation
from lazyshard.stream.reader import StreamReader
from lazyshard.stream.stream import ChunkLengths

ALONE: Final = BlendCourse((BlendPiece(0, (1,)),))  # a single stream is a blend of one
_Limit = int | None  # maximum number of samples, None for all
_OnTooLong = Callable[[int, int, int], None]
_Made = tuple[list[SplitSequence], Cut]


class RowDraws(NamedTuple):
    """The stream, and the epoch and sample in it, of each of some consecutive rows."""

    streams: Int64Array
    epochs: Int64Array
    samples: Int64Array


class RowOrder(NamedTuple):
    """Which streams give the rows of an epoch, in order, and which samples are drawn from each of them."""

    blend: BlendCourse
    courses: Sequence[Course]


class SequenceRows:
    """The rows of an epoch in order, in windows of `rows` rows; `name` is the name of the streams in a state.

    There are `samples` rows; if that is None, `stopping` decides. `limits`: the maximum samples of each stream.
    """

    def __init__(
        self, name: str, readers: list[StreamReader], limits: list[_Limit], rows: int, samples: _Limit, stopping: str
    ) -> None:
        self.name, self.readers, self.rows = name, readers, rows
        self._limits, self._samples, self._stopping = limits, samples, stopping
        self._lengths = [ChunkLengths(reader) for reader in self.readers]
        self._known: dict[tuple[int, int], tuple[RowDraws, UInt32Array]] = {}

    def order(self, epoch: int) -> RowOrder:
        """Returns the order of the rows of an epoch."""
        raise NotImplementedError

    def total(self, stream: int, position: int, epoch: int) -> int | None:
        """Returns the samples of a stream, None if its end is open, waiting until the draw at `position` is certain."""
        needed, limit = self.order(epoch).courses[stream].needed(position), self._limits[stream]
        self.readers[stream].wait_for(needed if limit is None else min(needed, limit))
        return self._total_seen(stream)

    def lengths(self, window: int, epoch: int) -> UInt32Array:
        """Returns the lengths of a window's rows; fewer at the end. Waits, and raises, as a draw does."""
        return self.window(window, epoch)[1]

    def place(self, row: int, epoch: int) -> tuple[int, int]:
        """Returns the stream and the sample of row number `row` of an epoch."""
        window, within = divmod(row, self.rows)
        found = self.window(window, epoch)[0]
        return int(found.streams[within]), int(found.samples[within])

    def draws(self, first: int, stop: int, epoch: int) -> RowDraws:
        """Returns the draws of the rows [first, stop), waiting until they are certain."""
        blend, courses = self.order(epoch)
        streams = np.array(blend.streams_of(first, stop) if stop > first else [], np.int64)
        found = RowDraws(streams, np.zeros_like(streams), np.zeros_like(streams))
        for stream, before in enumerate(blend.counts(first)):
            if len(own := np.flatnonzero(streams == stream)):
                positions = before + np.arange(len(own))
                total = self.total(stream, int(positions[-1]), epoch)
                found.epochs[own], found.samples[own] = courses[stream].draws(0, positions, total)
        return found

    def ended(self, epoch: int) -> int | None:
        """Returns how many rows there are if that is known without polling."""
        if self._samples is not None or len(self.readers) > 1:
            return self._samples
        total = self._total_seen(0)
        return None if total is None else self.order(epoch).courses[0].begin(total).length

    def _total_seen(self, stream: int) -> int | None:
        seen, limit = self.readers[stream].seen, self._limits[stream]
        total = seen.samples if limit is None else min(seen.samples, limit)
        return total if seen.ended or total == limit else None

    def window(self, window: int, epoch: int) -> tuple[RowDraws, UInt32Array]:
        """Returns the draws of a window's rows, and their lengths. Waits, and raises, as `lengths`."""
        if (found := self._known.get((epoch, window))) is not None:
            return found
        first = window * self.rows
        drawn = self.draws(first, self._stop(first, epoch), epoch)
        lengths = np.zeros(len(drawn.samples), np.uint32)
        sizes = np.array([reader.samples_per_chunk for reader in self.readers])[drawn.streams]
        chunks, rows = np.divmod(drawn.samples, sizes)
        order = np.lexsort((chunks, drawn.streams))
        borders = np.diff(chunks[order]) | np.diff(drawn.streams[order])
        for own in np.split(order, np.flatnonzero(borders) + 1) if len(order) else ():
            stream, chunk = int(drawn.streams[own[0]]), int(chunks[own[0]])
            lengths[own] = self._lengths[stream].of(chunk)[rows[own]]
        # Rows left over from a window are needed with the next one.
        if len(self._known) >= 4:
            del self._known[next(iter(self._known))]
        self._known[epoch, window] = found = drawn, lengths
        return found

    def _stop(self, first: int, epoch: int) -> int:
        """Returns the row after a window, waiting until it is certain whether the rows end before."""
        if self._samples is not None:
            return max(first, min(first + self.rows, self._samples))
        window = range(first, first + self.rows)
        if self._goes_on(window[-1], epoch):
            return window.stop
        return first + bisect_left(window, True, key=lambda row: not self._goes_on(row, epoch))

    def _goes_on(self, row: int, epoch: int) -> bool:
        """Returns whether there are rows up to and including `row`, by `stopping`."""
        blend = self.order(epoch).blend
        # If a stream that has ended is exhausted, there is no need to wait for the others.
        streams = sorted(range(len(self.readers)), key=lambda stream: not self.readers[stream].seen.ended)
        exhausted = partial(self._exhausted, epoch)
        return goes_on(self._stopping, exhausted, streams, blend.counts(row), blend.counts(row + 1))

    def _exhausted(self, epoch: int, stream: int, drawn: int) -> bool:
        total = self.total(stream, drawn - 1, epoch) if drawn else None
        return total is not None and drawn > self.order(epoch).courses[stream].begin(total).length


class PlannedWindow(NamedTuple):
    """The sequences of a window; their pieces name rows by number.

    `after` is where the next window begins, None at the end of the stream; `dropped` counts rows in no sequence.
    """

    place: WindowPlace
    sequences: list[SplitSequence]
    after: WindowPlace | None
    dropped: int

    @property
    def stop(self) -> int:
        """The number of sequences of the epoch up to the end of this window."""
        return self.place.before + len(self.sequences)


class SequencePlanner:
    """Makes the sequences of any window; calls `on_too_long` for the first row that is too long in each window.

    `skips` returns for an epoch which samples of the only stream are left out, each from a sequence number on.
    """

    def __init__(
        self, rows: SequenceRows, form: Form, seed: int | None, where: str, on_too_long: _OnTooLong | None = None
    ) -> None:
        self.skips: Callable[[int], list[tuple[int, Gaps]]] = lambda epoch: []
        self._source, self._form, self._seed, self._where = rows, form, seed, where
        self._on_too_long = on_too_long or (lambda row, epoch, tokens: None)

    def plan(self, place: WindowPlace, epoch: int, skips: Sequence[tuple[int, Gaps]] | None = None) -> PlannedWindow:
        """Returns the sequences of a window, waiting until all of it is published or the rows have ended.

        Raises what `on_too_long` raises; StateMismatch: the rows have ended before the window; or as `lengths`.
        """
        size, first = self._source.rows, self.first_window(place)
        windows, skip = range(first, place.window + 1), place.position - first * self._source.rows
        own = [self.in_order(window, epoch) for window in windows]
        known = [self._source.lengths(at, epoch)[rows - at * size] for at, rows in zip(windows, own, strict=True)]
        rows, lengths = np.concatenate(own)[skip:], np.concatenate(known).astype(np.int64)[skip:]
        self._check_begins(place, epoch)
        kept = lengths > 0
        if not isinstance(self._form, Split):
            fits = lengths <= self._form.size
            if not fits.all():
                self._on_too_long(int(rows[~fits][0]), epoch, int(lengths[~fits][0]))
            kept &= fits
        # A window that is not full is the last one. A full one may be, too: planning the next one shows it.
        last = len(self._source.lengths(place.window, epoch)) < size
        dropped = int(np.count_nonzero(~kept[place.window * size - place.position :]))
        made = _Making(rows, lengths, self._form, last)
        # The row in which to continue has tokens, so it is the first of these.
        sequences, cut = made.of(np.flatnonzero(kept), place.offset, begun=place.before > 0)
        for number, gaps in self.skips(epoch) if skips is None else skips:
            begin = max(number - place.before, 0)
            if not begin or begin < len(sequences):
                start = Cut(int(np.argmax(kept)) if len(kept) else 0, place.offset)
                kept &= np.array([self._source.place(row, epoch)[1] not in gaps for row in rows.tolist()], bool)
                sequences, cut = made.without((sequences, cut), begin, start, kept, begun=place.before > 0)
        after = None
        if not last:
            position = place.position + cut.document if cut.document < len(rows) else (place.window + 1) * size
            after = WindowPlace(place.window + 1, place.before + len(sequences), position, cut.offset)
        return PlannedWindow(place, sequences, after, dropped)

    def digest(self, place: WindowPlace, epoch: int, consumed: int) -> str:
        """Returns the digest of the lengths that matter to a run that has consumed `consumed` sequences."""
        windows = range(self.first_window(place), place.window + (consumed > place.before))
        lengths = [self._source.lengths(window, epoch).astype("<u4").tobytes() for window in windows]
        return xxhash.xxh3_64_hexdigest(b"".join(lengths))

    def first_window(self, place: WindowPlace) -> int:
        """Returns the first window that is needed to continue at a place."""
        return place.position // self._source.rows

    def check(self, state: SequenceState) -> None:
        """Raises StateMismatch: a state has sequences of other lengths, or has consumed sequences that do not exist."""
        place, epoch, consumed = state.place, state.epoch, state.consumed
        begin = place.window * self._source.rows
        possible, most = place.position <= begin, consumed
        if not isinstance(self._form, Split):
            # Whole rows leave nothing over for the next window, and make at most one sequence per row.
            possible, most = (place.position, place.offset) == (begin, 0), begin
        if place.before > most:
            raise self._beyond(place.before, f"the {begin} rows before make at most that many")
        for reader in self._source.readers:
            reader.refresh()
        self._check_begins(place, epoch)
        if not possible or self.digest(place, epoch, consumed) != state.lengths:
            if possible and consumed > place.before and self.digest(place, epoch, place.before) == state.lengths:
                raise self._beyond(consumed, f"the rest of the state says {place.before}")
            why = f"has other lengths of the rows from {place.position} on: use the original stream, or a new epoch"
            raise state_mismatch(self._where, why, "lengths", state.lengths, "others")
        if consumed > place.before and consumed > (planned := self.plan(place, epoch, skips_of(state.parts))).stop:
            ends = "the epoch has" if planned.after is None else f"up to row {begin + self._source.rows} there are"
            raise self._beyond(consumed, f"{ends} {planned.stop}")

    def in_order(self, window: int, epoch: int) -> Int64Array:
        """Returns the rows of a window, in the order in which they are made into sequences."""
        count = len(self._source.lengths(window, epoch))
        order = np.arange(count) if self._seed is None else permutation(count, self._seed, epoch, window)
        return window * self._source.rows + order

    def length_of(self, row: int, epoch: int) -> int:
        """Returns the sealed length in tokens of a row of a planned window."""
        window, within = divmod(row, self._source.rows)
        return int(self._source.lengths(window, epoch)[within])

    def _check_begins(self, place: WindowPlace, epoch: int) -> None:
        begin, total = place.window * self._source.rows, self._source.ended(epoch)
        if total is not None and begin > total:
            raise self._beyond(place.before, f"the next begin with row {begin}, and the stream has ended with {total}")

    def _beyond(self, consumed: int, reason: str) -> StateMismatch:
        why = f"has consumed {consumed} sequences of its epoch, but {reason}. Was the state changed, or the stream cut"
        way = "or restored from an older copy? Continue with both as they were saved, or start a new epoch"
        return state_mismatch(self._where, f"{why} {way}", "consumed", reason, consumed)


def skips_of(parts: Sequence[Part]) -> list[tuple[int, Gaps]]:
    """Returns what the parts of a run skip in an epoch, each with the number of its first sequence."""
    begins = accumulate((part.dp * part.draws for part in parts), initial=0)
    return [(begin, Gaps(part.skip)) for begin, part in zip(begins, parts, strict=False) if part.skip]


class _Making(NamedTuple):
    """Makes sequences of some rows of a window, given by their indices; `last` if no row follows."""

    rows: Int64Array
    lengths: Int64Array
    form: Form
    last: bool

    def of(self, own: Int64Array, offset: int, *, begun: bool) -> _Made:
        names = self.rows[own].tolist()
        lengths, start = self.lengths[own].tolist(), Cut(0, offset)
        made, (document, offset) = make_sequences(lengths, self.form, start, last=self.last, begun=begun)
        # `_replace` takes three times as long, and most of these rows belong to other ranks.
        sequences = [
            SplitSequence(tuple([Piece(names[piece[0]], *piece[1:]) for piece in pieces]), bos, eos)
            for pieces, bos, eos in made
        ]
        return sequences, Cut(int(own[document]) if document < len(own) else len(self.rows), offset)

    def without(self, made: _Made, begin: int, start: Cut, kept: BoolArray, *, begun: bool) -> _Made:
        """Remakes the sequences from number `begin` on from the rows in `kept`; those before stay as they are."""
        (sequences, cut), own = made, np.flatnonzero(kept)
        before = sequences[:begin]
        if begin and isinstance(self.form, Split):
            document, offset = cut_after(before[-1], self.form)
            start = Cut(int(np.flatnonzero(self.rows == document)[0]), offset)
        elif begin:
            stay = set(self.rows[own].tolist())
            left = (tuple(piece for piece in one.pieces if piece.document in stay) for one in sequences[begin:])
            return [*before, *(SplitSequence(pieces, False, False) for pieces in left if pieces)], cut
        own = own[own >= start.document]
        offset = start.offset if len(own) and own[0] == start.document else 0
        again, cut = self.of(own, offset, begun=begun or begin > 0)
        return [*before, *again], cut


_PLACES: Final = 1024  # windows whose beginnings a walk keeps


class SequenceWalk:
    """Walks forward through the sequences of an epoch; `total` is their number, None until the end was reached.

    `places` are the beginnings of the last windows, in order, including released ones, and of the next window.
    """

    def __init__(self, planner: SequencePlanner, place: WindowPlace, epoch: int) -> None:
        self.places = [place]
        self._planner = planner
        self._epoch = epoch
        self._windows: deque[PlannedWindow] = deque()
        self.total: int | None = None
        self.dropped = 0

    def sequences(self, first: int, stop: int) -> list[SplitSequence]:
        """Returns the sequences [first, stop) of the epoch, waiting for them; fewer if the epoch ends before.

        `first` is neither before the place where the walk began nor before one given to `let_go`.
        """
        self._plan_up_to(stop)
        windows = ((window.sequences, window.place.before) for window in self._windows)
        return [one for made, before in windows for one in made[max(0, first - before) : max(0, stop - before)]]

    def let_go(self, first: int) -> None:
        """Releases the windows that end before a sequence."""
        while self._windows and self._windows[0].stop <= first and self._windows[0].after is not None:
            self._windows.popleft()

    def window_of(self, number: int) -> PlannedWindow:
        """Returns the window that holds a sequence; the last window for a number after the end."""
        return next((window for window in self._windows if window.stop > number), self._windows[-1])

    def place_of(self, number: int) -> WindowPlace:
        """Returns the place from which to make a sequence: any from `places[0]` on, or the first after the last.

        Waits at most until the sequence before it is known.
        """
        self._plan_up_to(number)
        return self.places[max(bisect_right(self.places, number, key=lambda place: place.before) - 1, 0)]

    def _plan_up_to(self, stop: int) -> None:
        while self.total is None and self.places[-1].before < stop:
            window = self._planner.plan(self.places[-1], self._epoch)
            self._windows.append(window)
            self.dropped += window.dropped
            if window.after is None:
                self.total = window.stop
            else:
                # At least one for each window that is held: a micro batch may span several of them.
                self.places = [*self.places[-max(_PLACES, len(self._windows)) :], window.after]


def state_mismatch(where: str, why: str, field: str, expected: object, actual: object) -> StateMismatch:
    """Returns the error for a state from which these rows cannot continue."""
    what, told = f"{where}: the state to continue from {why}", {"expected": str(expected), "actual": str(actual)}
    return StateMismatch(what, directory=where, field=field, **told)
