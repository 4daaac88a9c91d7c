"""What each rank is to draw next, worked out again beside the package, in memory that does not grow with the run.

It follows the plain lists of `tests.plan.oracle` and shares no code with the package, but makes the lists only where
the ranks stand: what is carried over from ranks before, and the windows that are open. One epoch; nothing is skipped.

A part begins where the one before stands: what its ranks had begun is dealt evenly to the new ones, and behind that
the stream is dealt anew::

    lane 0   carried carried | window 0 | window 1 ...
    lane 1   carried         | window 0 | window 1 ...
             ^ own slices    ^ from sample `start` on
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.plan.oracle import permutation, slices


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the ranks stand, as a checkpoint would keep it.

    Attributes:
        own: what is carried over, a list for each rank.
        start: behind that the samples from here on are dealt.
        turn: the rank that gets the first sample of a tail.
        at: how many positions each rank has drawn since `own` was dealt.
    """

    own: tuple[tuple[int, ...], ...]
    start: int
    turn: int
    at: int


class DeclaredOrder:
    """The order of a run.

    Args:
        unit: samples dealt to a rank in a row.
        window: positions of a rank that are shuffled together, a multiple of the unit; 0 keeps the order.
        seed: of the shuffle.
        dp: ranks that begin the run.

    Attributes:
        total: the stream's samples, once it has ended; None before.
    """

    def __init__(self, unit: int, window: int, seed: int, dp: int) -> None:
        self.total: int | None = None
        self._unit = unit
        self._window = window
        self._span = window or unit
        self._seed = seed
        self._windows: dict[tuple[int, int], list[int]] = {}
        self.standing = Standing(((),) * dp, 0, 0, 0)

    def go_on(self, standing: Standing, dp: int) -> None:
        """Begins a part with so many ranks, where others stood."""
        self._windows.clear()
        self.standing = standing
        if dp == len(standing.own):
            return
        opened = self._opened()
        carried = [sample for lane in range(len(standing.own)) for sample in self._rest(lane, opened)]
        start = standing.start + opened * self._span * len(standing.own)
        if self.total is not None:
            start = min(start, self.total)
        self._windows.clear()
        own = tuple(map(tuple, slices(carried, dp)))
        self.standing = Standing(own, start, len(carried) % dp, 0)

    def draw(self, batch_size: int) -> list[list[int]]:
        """Returns what each rank draws in the next step, and goes on behind it."""
        at = self.standing.at
        drawn = [self._positions(lane, at, at + batch_size) for lane in range(len(self.standing.own))]
        self.standing = Standing(self.standing.own, self.standing.start, self.standing.turn, at + batch_size)
        return drawn

    def floor(self) -> int:
        """Returns a number below which nothing is still to be drawn."""
        opened = self._opened()
        start = self.standing.start + opened * self._span * len(self.standing.own)
        left = [sample for lane in range(len(self.standing.own)) for sample in self._rest(lane, opened)]
        # The last windows are shorter than the others.
        end = [] if self.total is None else [self.total]
        return min([*left, start, *end])

    def _opened(self) -> int:
        """Windows that some rank has begun."""
        standing = self.standing
        return max(0, *(-(-(standing.at - len(own)) // self._span) for own in standing.own))

    def _rest(self, lane: int, opened: int) -> list[int]:
        own = self.standing.own[lane]
        return self._positions(lane, self.standing.at, len(own) + opened * self._span)

    def _positions(self, lane: int, first: int, stop: int) -> list[int]:
        own = self.standing.own[lane]
        found = list(own[first:stop])
        position = max(first, len(own)) - len(own)
        while position < stop - len(own):
            number, at = divmod(position, self._span)
            window = self._open(lane, number)
            piece = window[at : at + stop - len(own) - position]
            found += piece
            position += len(piece)
            if len(window) < self._span:
                break
        return found

    def _open(self, lane: int, number: int) -> list[int]:
        """Returns a window of a rank, shorter only where the stream has ended."""
        window = self._windows.get((lane, number))
        # Of an open end only whole windows are drawn; they stay as they are.
        if window is None:
            if len(self._windows) > 4 * len(self.standing.own):
                self._windows.clear()
            window = self._deal(lane, number)
            if self._window:
                order = permutation(len(window), (self._seed, 0, lane, number))
                window = [window[at] for at in order]
            if self.total is not None or len(window) == self._span:
                self._windows[lane, number] = window
        return window

    def _deal(self, lane: int, number: int) -> list[int]:
        dp, unit, start = len(self.standing.own), self._unit, self.standing.start
        whole = None if self.total is None else max(0, self.total - start) // (dp * unit) * unit
        window = []
        for position in range(number * self._span, (number + 1) * self._span):
            if whole is None or position < whole:
                window.append(start + (position // unit * dp + lane) * unit + position % unit)
                continue
            assert self.total is not None
            # The tail, one by one: the rank `turn` gets the first.
            sample = start + whole * dp + (lane - self.standing.turn) % dp + (position - whole) * dp
            if sample >= self.total:
                break
            window.append(sample)
        return window
