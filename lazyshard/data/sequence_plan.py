"""Which sequences a stream has, one window after the other, by lengths alone; and where a run stands among them."""

from __future__ import annotations

import copy
import logging
from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.data.handed_out import Worker, check_micro_batch, check_worker, read_count
from lazyshard.data.run_state import HANDED_OUT, WORKER, WORKERS
from lazyshard.data.sequence_forms import AtEnd, SequenceSettings
from lazyshard.data.substitutes import where_bad
from lazyshard.errors import BadSample, ChunkCorrupt, ChunkRetired, RowInvalid, StateMismatch, StreamMismatch
from lazyshard.format.batch import decode_pack
from lazyshard.format.row import parse_row
from lazyshard.format.seal import form_made
from lazyshard.format.state import SequenceState, WindowPlace
from lazyshard.plan.sequences import Split, make_sequences
from lazyshard.plan.shuffle import permutation
from lazyshard.plan.splitting import Cut, Piece, SplitRule, SplitSequence
from lazyshard.stream import StreamReader
from lazyshard.stream.token_lengths import WindowLengths

_RANKS: Final = "ranks"
_BATCH: Final = "batch_size"
_BEGUN: Final = "begun"

_log = logging.getLogger("lazyshard")

_Numbers = npt.NDArray[np.int64]


class PlannedWindow(NamedTuple):
    """The sequences of a window, whose pieces name samples of the stream.

    `after` is where the next window begins, None at the end of the stream; `dropped` rows of it are in no sequence.
    """

    place: WindowPlace
    sequences: list[SplitSequence]
    after: WindowPlace | None
    dropped: int

    @property
    def stop(self) -> int:
        """Sequences of the epoch up to the end of this window."""
        return self.place.before + len(self.sequences)


class SequencePlanner:
    """Makes the sequences of any window; `tells` whether to log the first row that is left out as it is too long."""

    def __init__(self, reader: StreamReader, settings: SequenceSettings) -> None:
        assert settings.window is not None, "known of settings for a stream"
        self.tells = False
        self._reader = reader
        self._rule = settings.rule
        self._lengths = WindowLengths(reader, settings.window)
        self._seed = settings.seed
        self._too_long = settings.too_long

    def plan(self, place: WindowPlace, epoch: int) -> PlannedWindow:
        """Returns the sequences of a window, waiting until all of it is published, or the stream has ended.

        Raises:
            BadSample: a row is longer than a sequence.
            StateMismatch: the stream has ended before the window.
            LengthsMissing, WaitTimeout, ChunkRetired, OSError: as `WindowLengths.of`.
        """
        size = self._lengths.rows
        samples, lengths = self._rows(place, epoch)
        self._check_begins(place)
        kept = lengths > 0
        if not isinstance(self._rule, SplitRule):
            fits = lengths <= self._rule.size
            if not fits.all():
                self._meet_too_long(int(samples[~fits][0]), int(lengths[~fits][0]), self._rule.size)
            kept &= fits
        documents, positions = samples[kept], place.position + np.flatnonzero(kept)
        # A window that is not full is the last one. One that is may be, too: who asks for the next one finds out.
        last = len(self._lengths.of(place.window)) < size
        # The row in which to go on has tokens: it is the first of these.
        start, begun = Cut(0, place.offset), place.before > 0
        made = make_sequences(lengths[kept].tolist(), self._rule, start, last=last, begun=begun)
        numbers = documents.tolist()
        # Not by `_replace`, which takes three times as long, for rows of which most are other ranks'.
        sequences = [
            SplitSequence(tuple([Piece(numbers[piece[0]], *piece[1:]) for piece in pieces]), bos, eos)
            for pieces, bos, eos in made.sequences
        ]
        after = None
        if not last:
            document, offset = made.left
            end = (place.window + 1) * size
            position = int(positions[document]) if document < len(positions) else end
            after = WindowPlace(place.window + 1, place.before + len(sequences), position, offset)
        first = place.window * size - place.position
        return PlannedWindow(place, sequences, after, int(np.count_nonzero(~kept[first:])))

    def digest(self, place: WindowPlace, consumed: int) -> str:
        """Returns the digest of the lengths that matter to a run which stands behind so many sequences."""
        return self._lengths.digest(place.position // self._lengths.rows, place.window + (consumed > place.before))

    def check(self, state: SequenceState) -> None:
        """Refuses a state of which sequences were made by other lengths, or that stands behind sequences which are not.

        How many there are before the window of the state is taken as the state says, since only all lengths tell.

        Raises:
            StateMismatch: with the way out; or the stream does not have these rows.
            Others: as `plan`.
        """
        place, consumed = state.place, state.consumed
        begin = place.window * self._lengths.rows
        possible, most = place.position <= begin, consumed
        if not isinstance(self._rule, SplitRule):
            # Whole rows leave nothing over for the next window, and make no more sequences than they are.
            possible, most = (place.position, place.offset) == (begin, 0), begin
        if place.before > most:
            raise self._beyond(place.before, f"the {begin} rows before make no more than as many")
        self._reader.refresh()
        self._check_begins(place)
        if not possible or self.digest(place, consumed) != state.lengths:
            if possible and consumed > place.before and self.digest(place, place.before) == state.lengths:
                raise self._beyond(consumed, f"all else in it says {place.before}")
            where = self._reader.directory
            raise StateMismatch(
                f"{where}: the lengths of the rows from {place.position} on are not those of which the run has made "
                f"its sequences, so it cannot go on with the next one: take the stream of before, or begin an epoch "
                f"anew",
                directory=str(where),
                field="lengths",
                expected=state.lengths,
                actual="others",
            )
        if consumed == place.before:
            return
        planned = self.plan(place, state.epoch)
        if consumed > planned.stop:
            ends = "the epoch has" if planned.after is None else f"up to row {begin + self._lengths.rows} there are"
            raise self._beyond(consumed, f"{ends} {planned.stop}")

    def length_of(self, sample: int) -> int:
        """Returns how many tokens a sample has, of a window that was planned."""
        window, row = divmod(sample, self._lengths.rows)
        return int(self._lengths.of(window)[row])

    def _rows(self, place: WindowPlace, epoch: int) -> tuple[_Numbers, _Numbers]:
        """Returns the samples from a place on up to the end of its window, in their order, and their lengths."""
        size, first = self._lengths.rows, place.position // self._lengths.rows
        samples, lengths = [], []
        for window in range(first, place.window + 1):
            tokens = self._lengths.of(window).astype(np.int64)
            order = np.arange(len(tokens))
            if self._seed is not None:
                order = permutation(len(tokens), self._seed, epoch, window)
            samples.append(window * size + order)
            lengths.append(tokens[order])
        skip = place.position - first * size
        return np.concatenate(samples)[skip:], np.concatenate(lengths)[skip:]

    def _check_begins(self, place: WindowPlace) -> None:
        """Refuses a window before which the stream has ended, as far as it was looked at."""
        begin, seen = place.window * self._lengths.rows, self._reader.seen
        if seen.ended and begin > seen.samples:
            raise self._beyond(
                place.before, f"those that follow begin with row {begin}, and the stream has ended with {seen.samples}"
            )

    def _beyond(self, consumed: int, reason: str) -> StateMismatch:
        where = self._reader.directory
        return StateMismatch(
            f"{where}: the state to go on from stands behind {consumed} sequences of its epoch, but {reason}: nothing "
            f"that follows can be told from it. Was the state changed, or the stream cut or restored from an older "
            f"copy? Go on from the state as it was saved, with the stream as it was then, or begin an epoch anew",
            directory=str(where),
            field="consumed",
            expected=reason,
            actual=str(consumed),
        )

    def _meet_too_long(self, sample: int, tokens: int, size: int) -> None:
        if self._too_long == "raise":
            raise _too_long(self._reader, sample, tokens, size)
        if self.tells:
            self.tells = False
            _log.warning(
                "%s; it is left out, and so are all that are longer", _longer(self._reader, sample, tokens, size)
            )


class SequenceWalk:
    """Goes through the sequences of an epoch, forwards; `total` is how many there are, None until its end was met."""

    def __init__(self, planner: SequencePlanner, place: WindowPlace, epoch: int) -> None:
        self._planner = planner
        self._epoch = epoch
        self._next: WindowPlace | None = place
        self._windows: deque[PlannedWindow] = deque()
        self.total: int | None = None
        self.dropped = 0

    def sequences(self, first: int, stop: int) -> list[SplitSequence]:
        """Returns the sequences [first, stop) of the epoch, waiting for them; fewer where it ends before.

        `first` lies neither before the place where the walk began, nor before one that was let go of.
        """
        self._plan_up_to(stop)
        windows = ((window.sequences, window.place.before) for window in self._windows)
        return [one for made, before in windows for one in made[max(0, first - before) : max(0, stop - before)]]

    def let_go(self, first: int) -> None:
        """Forgets the windows that end before a sequence."""
        while self._windows and self._windows[0].stop <= first and self._windows[0].after is not None:
            self._windows.popleft()

    def holds(self, number: int) -> bool:
        """Returns whether a sequence was not let go of, and the walk did not begin behind it."""
        first = self._windows[0].place if self._windows else self._next
        return first is not None and first.before <= number

    def window_of(self, number: int) -> PlannedWindow:
        """Returns the window of a sequence that is held; the last one for what is behind the end."""
        return next((window for window in self._windows if window.stop > number), self._windows[-1])

    def place_of(self, number: int) -> WindowPlace:
        """Returns the place from which a sequence that is held, or the first behind the last, can be made again.

        Waits no longer than until the sequence before it is known.
        """
        self._plan_up_to(number)
        for window in self._windows:
            if number < window.stop or window.after is None:
                return window.place
        assert self._next is not None
        return self._next

    def _plan_up_to(self, stop: int) -> None:
        while self._next is not None and self._next.before < stop:
            window = self._planner.plan(self._next, self._epoch)
            self._windows.append(window)
            self.dropped += window.dropped
            self._next = window.after
            if window.after is None:
                self.total = window.stop


def _longer(reader: StreamReader, sample: int, tokens: int, size: int) -> BadSample:
    return where_bad(reader, sample, ValueError(f"it has {tokens} tokens, a sequence at most {size}"))


def _too_long(reader: StreamReader, sample: int, tokens: int, size: int) -> BadSample:
    error = _longer(reader, sample, tokens, size)
    error.args = (f"{error}: take longer sequences, or leave such rows out with too_long='drop'",)
    return error


def check_beginning(reader: StreamReader, settings: SequenceSettings) -> bool:
    """Refuses a stream of which no sequences can be made, as far as its first chunk, or the first that is left, tells.

    Returns whether there was a chunk to look at. The reader opens nothing.

    Raises:
        StreamMismatch: its rows are packs, or were cut or padded by their producer.
        LengthsMissing: how long its rows are is not known.
        BadSample: one of them is longer than a sequence.
        SealInvalid, ChunkMissing, OSError: it cannot be read.
    """
    size, samples = reader.samples_per_chunk, reader.seen.samples
    # Its open files are let go of with it: this process may never read that chunk again.
    look = copy.copy(reader)
    look.parent = reader.parent
    first = 0
    try:
        if samples:
            look.chunk(0)
    except ChunkRetired as error:
        first = (error.chunks_before or 0) * size
    if first >= samples:
        return False
    _check_rows(look, first)
    known = WindowLengths(look, 1)
    _check_form(look, form_made(known.source(first // size)))
    lengths = known.of(first // size)
    size = settings.form.size
    if settings.too_long == "raise" and not isinstance(settings.form, Split):
        for row in np.flatnonzero(lengths > size).tolist():
            raise _too_long(look, first + row, int(lengths[row]), size)
    return True


def _check_form(reader: StreamReader, form: str | None) -> None:
    # What pads them would be taken for tokens, and borders would be lost.
    if form in ("split", "pad"):
        raise _made(
            reader,
            f"were {'cut to sequences' if form == 'split' else 'padded'}",
            form,
            f"train each as one sample, with `LazyShardedDataset({str(reader.directory)!r}, ...)`",
            f"rows made with --{form}",
        )


def _check_rows(reader: StreamReader, sample: int) -> None:
    # A stream has packs in every row or in none.
    try:
        packed = decode_pack(parse_row(reader.line(sample))) is not None
    except (ChunkCorrupt, RowInvalid):
        # Who draws it says so, or leaves it out.
        return
    if packed:
        how = (
            f"train each pack as one sample, with `LazyShardedDataset({str(reader.directory)!r}, encode)`, whose "
            f"`encode` gets {{'pack': ROWS, 'lengths': TOKENS}} (in ms-swift --packing true)"
        )
        raise _made(reader, "were made packs", "pack", how, "packs")


def _made(reader: StreamReader, was: str, option: str, instead: str, actual: str) -> StreamMismatch:
    return StreamMismatch(
        f"{reader.directory}: its rows {was} by their producer (lazyshard-producer run --{option}), so no sequences "
        f"are made of them: {instead}, or produce the rows without --{option}",
        directory=str(reader.directory),
        expected="rows",
        actual=actual,
    )


class EpochPosition(NamedTuple):
    """Where a run is in an epoch.

    Attributes:
        epoch: in which.
        consumed: sequences of it that are behind the run, over all ranks.
        place: where the next ones are made again, at or before that.
        within: sequences of a rank that are behind it besides, in the micro batch that follows.
        worker: of which DataLoader worker, of how many, it is the position; None for all.
        begun: whether the micro batch that follows is one of that worker, which it has begun to hand out.
    """

    epoch: int
    consumed: int
    place: WindowPlace
    within: int
    worker: Worker | None = None
    begun: bool = False

    def beside(self, ranks: int, batch_size: int) -> dict[str, Any]:
        """Returns what a state has beside that of a whole run."""
        if not self.within and self.worker is None:
            return {}
        found = {HANDED_OUT: self.within, _RANKS: ranks, _BATCH: batch_size}
        return (
            found
            if self.worker is None
            else found | {WORKER: self.worker[0], WORKERS: self.worker[1], _BEGUN: self.begun}
        )


def within_micro_batch(
    value: dict[str, Any], micro_batch: tuple[int, int], here: Worker | None, where: str
) -> tuple[int, bool]:
    """Returns what is handed out of a micro batch in a state, and whether that is one of its worker's own.

    Raises:
        StateInvalid: it is that of another worker than `here`, or within a micro batch of other ranks and batch size.
    """
    check_worker(value, here, where)
    if value.get(HANDED_OUT, 0) != 0 or here is not None:
        check_micro_batch((value.get(_RANKS), value.get(_BATCH)), micro_batch, where)
    begun = here is not None and value.get(_BEGUN) is True
    # Where a worker has handed all of its micro batch out, the next one is not that which follows this one.
    return read_count(value, HANDED_OUT, micro_batch[1] - (not begun), where), begun


def not_whole(count: int, begun: int, total: int | None, micro: tuple[int, int], at_end: AtEnd) -> str | None:
    """Returns why a number of sequences was not trained at the end of a micro batch, in words; None if it can be.

    It counts what completes the epoch, too. The run began, or went on, behind `begun`; `micro` is ranks and batch size.
    """
    step = micro[0] * micro[1]
    batches = f"consumed counts whole micro batches of dp_size * batch_size = {micro[0]} * {micro[1]} sequences"
    if count < begun:
        known = ", what was trained when the loaded state was saved" if begun else ""
        return f"{batches} from {begun} on{known}; got {count}"
    most = None
    if total is not None:
        left = (total - begun) % step
        most = total - left + (step if left and at_end == "complete" else 0)
        if count > most:
            over = f", of which at_end='drop' leaves {left} over" if most < total else ""
            return f"{batches}, which are {most} at the most: the epoch has {total} sequences{over}; got {count}"
    below = begun + (count - begun) // step * step
    if below == count:
        return None
    other = "" if most == below else f" or {below + step}"
    return f"{batches} from {begun} on, so {below}{other}; got {count}"
