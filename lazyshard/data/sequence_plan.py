"""Which sequences a stream has, one window after the other, by lengths alone; and where a run stands among them."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.data.run_state import (
    HANDED_OUT,
    WORKER,
    WORKERS,
    Worker,
    check_micro_batch,
    check_worker,
    mistaken,
    read_count,
)
from lazyshard.data.sequence_forms import RAISED, AtEnd, Rows, SequenceSettings, row_too_long
from lazyshard.errors import StateInvalid, StateMismatch
from lazyshard.format.state import SequenceState, WindowPlace
from lazyshard.plan.sequences import Cut, Piece, Split, SplitSequence, make_sequences
from lazyshard.plan.shuffle import permutation

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

    def __init__(self, rows: Rows, settings: SequenceSettings, where: object) -> None:
        self.tells = False
        self._source = rows
        self._where = str(where)
        self._form = settings.form
        self._seed = settings.seed
        self._too_long = settings.too_long

    def plan(self, place: WindowPlace, epoch: int) -> PlannedWindow:
        """Returns the sequences of a window, waiting until all of it is published, or the rows have ended.

        Raises BadSample: a row is longer than a sequence; StateMismatch: the rows have ended before; or as their
        lengths do.
        """
        size = self._source.rows
        samples, lengths = self._rows(place, epoch)
        self._check_begins(place, epoch)
        kept = lengths > 0
        if not isinstance(self._form, Split):
            fits = lengths <= self._form.size
            if not fits.all():
                self._meet_too_long(int(samples[~fits][0]), epoch, int(lengths[~fits][0]))
            kept &= fits
        documents, positions = samples[kept].tolist(), place.position + np.flatnonzero(kept)
        # A window that is not full is the last one. One that is may be, too: who asks for the next one finds out.
        last = len(self._source.lengths(place.window, epoch)) < size
        # The row in which to go on has tokens: it is the first of these.
        start, begun = Cut(0, place.offset), place.before > 0
        made, (document, offset) = make_sequences(lengths[kept].tolist(), self._form, start, last=last, begun=begun)
        # Not by `_replace`, which takes three times as long, for rows of which most are other ranks'.
        sequences = [
            SplitSequence(tuple([Piece(documents[piece[0]], *piece[1:]) for piece in pieces]), bos, eos)
            for pieces, bos, eos in made
        ]
        after = None
        if not last:
            position = int(positions[document]) if document < len(positions) else (place.window + 1) * size
            after = WindowPlace(place.window + 1, place.before + len(sequences), position, offset)
        first = place.window * size - place.position
        return PlannedWindow(place, sequences, after, int(np.count_nonzero(~kept[first:])))

    def digest(self, place: WindowPlace, epoch: int, consumed: int) -> str:
        """Returns the digest of the lengths that matter to a run which stands behind so many sequences."""
        windows = range(self.first_window(place), place.window + (consumed > place.before))
        lengths = [self._source.lengths(window, epoch).astype("<u4").tobytes() for window in windows]
        return xxhash.xxh3_64_hexdigest(b"".join(lengths))

    def first_window(self, place: WindowPlace) -> int:
        """Returns the first window that a run needs which goes on at a place."""
        return place.position // self._source.rows

    def check(self, state: SequenceState) -> None:
        """Raises StateMismatch: a state has sequences of other lengths, or stands behind sequences which are not.

        How many there are before the window of the state is taken as the state says, since only all lengths tell.
        """
        place, epoch, consumed = state.place, state.epoch, state.consumed
        begin = place.window * self._source.rows
        possible, most = place.position <= begin, consumed
        if not isinstance(self._form, Split):
            # Whole rows leave nothing over for the next window, and make no more sequences than they are.
            possible, most = (place.position, place.offset) == (begin, 0), begin
        if place.before > most:
            raise self._beyond(place.before, f"the {begin} rows before make no more than as many")
        for reader in self._source.readers:
            reader.refresh()
        self._check_begins(place, epoch)
        if not possible or self.digest(place, epoch, consumed) != state.lengths:
            if possible and consumed > place.before and self.digest(place, epoch, place.before) == state.lengths:
                raise self._beyond(consumed, f"all else in it says {place.before}")
            why = (
                f"has made its sequences of other lengths of the rows from {place.position} on: take the stream of "
                f"before, or begin an epoch anew"
            )
            raise _misfit(self._where, why, "lengths", state.lengths, "others")
        if consumed == place.before:
            return
        planned = self.plan(place, epoch)
        if consumed > planned.stop:
            ends = "the epoch has" if planned.after is None else f"up to row {begin + self._source.rows} there are"
            raise self._beyond(consumed, f"{ends} {planned.stop}")

    def length_of(self, row: int, epoch: int) -> int:
        """Returns how many tokens a row has as sealed, of a window that was planned."""
        window, within = divmod(row, self._source.rows)
        return int(self._source.lengths(window, epoch)[within])

    def _rows(self, place: WindowPlace, epoch: int) -> tuple[_Numbers, _Numbers]:
        """Returns the rows from a place on up to the end of its window, in their order, and their lengths."""
        size, first = self._source.rows, self.first_window(place)
        samples, lengths = [], []
        for window in range(first, place.window + 1):
            tokens = self._source.lengths(window, epoch).astype(np.int64)
            count = len(tokens)
            order = np.arange(count) if self._seed is None else permutation(count, self._seed, epoch, window)
            samples.append(window * size + order)
            lengths.append(tokens[order])
        skip = place.position - first * size
        return np.concatenate(samples)[skip:], np.concatenate(lengths)[skip:]

    def _check_begins(self, place: WindowPlace, epoch: int) -> None:
        """Refuses a window before which the rows have ended, as far as it was looked at."""
        begin, total = place.window * self._source.rows, self._source.ended(epoch)
        if total is not None and begin > total:
            raise self._beyond(
                place.before, f"those that follow begin with row {begin}, and the stream has ended with {total}"
            )

    def _beyond(self, consumed: int, reason: str) -> StateMismatch:
        why = (
            f"stands behind {consumed} sequences of its epoch, but {reason}: nothing that follows can be told from it. "
            f"Was the state changed, or the stream cut or restored from an older copy? Go on from the state as it was "
            f"saved, with the stream as it was then, or begin an epoch anew"
        )
        return _misfit(self._where, why, "consumed", reason, consumed)

    def _meet_too_long(self, row: int, epoch: int, tokens: int) -> None:
        reader, sample, _ = self._source.place(row, epoch)
        if self._too_long == "raise":
            raise row_too_long(reader, sample, tokens, self._form.size, RAISED)
        if self.tells:
            self.tells = False
            longer = row_too_long(reader, sample, tokens, self._form.size)
            _log.warning("%s; it is left out, and so are all that are longer", longer)


_PLACES: Final = 1024  # windows whose beginning a walk remembers


class SequenceWalk:
    """Goes through the sequences of an epoch, forwards; `total` is how many there are, None until its end was met.

    `places` are where the last windows began, in order, also those that were let go of, and where the next one does.
    """

    def __init__(self, planner: SequencePlanner, place: WindowPlace, epoch: int) -> None:
        self.places = [place]
        self._planner = planner
        self._epoch = epoch
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

    def window_of(self, number: int) -> PlannedWindow:
        """Returns the window of a sequence that is held; the last one for what is behind the end."""
        return next((window for window in self._windows if window.stop > number), self._windows[-1])

    def place_of(self, number: int) -> WindowPlace:
        """Returns the place from which a sequence from that of `places[0]` on, or the first behind the last, is made.

        Waits no longer than until the sequence before it is known.
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
                # Of each window that is held, too: a micro batch may be made of more of them.
                self.places = [*self.places[-max(_PLACES, len(self._windows)) :], window.after]


def read_state(value: Any, facts: dict[str, Any], where: str) -> SequenceState:
    """Returns a state of sequences of these facts, the stream among them. Raises as `load_state_dict`."""
    what = f"{where}: the state to go on from"
    if (reason := mistaken(value, "sequences")) is not None:
        raise StateInvalid(f"{what}: {reason}", file=what, expected="the state of LazyShardedSequences")
    state = SequenceState.from_dict(value, what)
    theirs = {"stream": state.stream, **state.rule}
    # The form before what another form has or has not.
    for name in sorted(facts.keys() | theirs, key=lambda name: (name != "stream", name != "form", name)):
        mine, other = facts.get(name), theirs.get(name)
        if (mine, type(mine)) != (other, type(other)):
            why = (
                f"was saved with {name} = {other!s:.100}, here it is {mine!s:.100}: other sequences would be made. "
                f"Take what it was, or begin an epoch anew"
            )
            raise _misfit(where, why, name, mine, other)
    return state


def _misfit(where: str, why: str, field: str, expected: object, actual: object) -> StateMismatch:
    what, told = f"{where}: the state to go on from {why}", {"expected": str(expected), "actual": str(actual)}
    return StateMismatch(what, directory=where, field=field, **told)


class EpochPosition(NamedTuple):
    """Where a run is in an epoch: behind `consumed` sequences, over all ranks, and `within` more of each.

    The next ones are made again from `place`, at or before that. Of which DataLoader worker, of how many, it is the
    position, None for all; `begun` if the micro batch that follows is one of that worker, which it has begun to hand
    out.
    """

    epoch: int
    consumed: int
    place: WindowPlace
    within: int
    worker: Worker | None = None
    begun: bool = False

    @classmethod
    def of_state(
        cls, state: SequenceState, value: dict[str, Any], micro_batch: tuple[int, int], here: Worker | None, where: str
    ) -> EpochPosition:
        """Returns the position of a state, read from a value, if this worker of how many can go on from it."""
        check_worker(value, here, where)
        if value.get(HANDED_OUT, 0) != 0 or here is not None:
            check_micro_batch((value.get(_RANKS), value.get(_BATCH)), micro_batch, where)
        begun = here is not None and value.get(_BEGUN) is True
        # Where a worker has handed all of its micro batch out, the next one is not that which follows this one.
        within = read_count(value, HANDED_OUT, micro_batch[1] - (not begun), where)
        return cls(state.epoch, state.consumed, state.place, within, here, begun)

    def beside(self, ranks: int, batch_size: int) -> dict[str, Any]:
        """Returns what a state has beside that of a whole run."""
        if not self.within and self.worker is None:
            return {}
        found = {HANDED_OUT: self.within, _RANKS: ranks, _BATCH: batch_size}
        worker = {} if self.worker is None else dict(zip((WORKER, WORKERS), self.worker, strict=True))
        return found | (worker | {_BEGUN: self.begun} if worker else {})


def not_whole(count: int, begun: int, total: int | None, micro: tuple[int, int], at_end: AtEnd) -> str | None:
    """Returns why a number of sequences was not trained at the end of a micro batch, in words; None if it can be.

    It counts what completes the epoch, too. The run began, or went on, behind `begun`; `micro` is ranks and batch size.
    """
    step = micro[0] * micro[1]
    left = 0 if total is None else (total - begun) % step
    most = None if total is None else total - left + (step if left and at_end == "complete" else 0)
    if count >= begun and not (count - begun) % step and (most is None or count <= most):
        return None
    said = f"consumed counts whole micro batches of dp_size * batch_size = {micro[0]} * {micro[1]} sequences"
    if total is not None and most is not None and count > most:
        over = f", of which at_end='drop' leaves {left} over" if most < total else ""
        return f"{said}, which are {most} at the most: the epoch has {total} sequences{over}; got {count}"
    known = ", what was trained when the loaded state was saved" if begun and count < begun else ""
    return f"{said} from {begun} on{known}; got {count}"
