"""The history of a run that survives its kills: checks each step against it, and goes back with the run. Beside the
samples themselves it is only kept where the ranks stood at the checkpoints that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.stream import read_retired
from tests.harness.runs.checkpoints import Checkpoint
from tests.harness.tally import RunViolation
from tests.plan.oracle import permutation, slices

if TYPE_CHECKING:
    from tests.harness.soak.rank import Rules, Shape


@dataclass(frozen=True, slots=True)
class Standing:
    own: tuple[tuple[int, ...], ...]  # what is carried over, a list for each rank
    start: int  # behind that the samples from here on are dealt
    turn: int  # the rank that gets the first sample of a tail
    at: int  # how many positions each rank has drawn since `own` was dealt


class DeclaredOrder:
    """The order of a run. `unit`: samples dealt to a rank in a row. `window`: positions of a rank that are shuffled
    together, a multiple of the unit; 0 keeps the order."""

    def __init__(self, unit: int, window: int, seed: int, dp: int) -> None:
        self.total: int | None = None  # the stream's samples, once it has ended; None before
        self._unit = unit
        self._window = window
        self._span = window or unit
        self._seed = seed
        self._windows: dict[tuple[int, int], list[int]] = {}
        self.standing = Standing(((),) * dp, 0, 0, 0)

    def go_on(self, standing: Standing, dp: int) -> None:
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
        at = self.standing.at
        drawn = [self._positions(lane, at, at + batch_size) for lane in range(len(self.standing.own))]
        self.standing = Standing(self.standing.own, self.standing.start, self.standing.turn, at + batch_size)
        return drawn

    def floor(self) -> int:
        opened = self._opened()
        start = self.standing.start + opened * self._span * len(self.standing.own)
        left = [sample for lane in range(len(self.standing.own)) for sample in self._rest(lane, opened)]
        end = [] if self.total is None else [self.total]  # The last windows are shorter than the others
        return min([*left, start, *end])

    def _opened(self) -> int:
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


# So many samples may lie between the first that is not trained for good and the last that is trained
MOST: Final = 1 << 24


class Ledger:
    def __init__(self) -> None:
        self.base = 0  # every sample below is trained for good
        self.stretch = 1  # number of the current stretch, from 1
        self._marks: npt.NDArray[np.uint32] = np.zeros(1 << 12, dtype=np.uint32)

    @property
    def trained(self) -> int:
        return self.base + int(np.count_nonzero(self._marks))

    @property
    def size(self) -> int:
        return len(self._marks)

    def train(self, samples: npt.NDArray[np.int64]) -> None:
        places = samples - self.base
        known = places[(places >= 0) & (places < len(self._marks))]
        again = places < 0
        again[(places >= 0) & (places < len(self._marks))] = self._marks[known] > 0
        if again.any() or len(np.unique(samples)) < len(samples):
            raise RunViolation("twice", f"samples {sorted(samples[again].tolist())[:10]} of {len(samples)} came again")
        most = int(places.max()) + 1
        if most > MOST:
            raise RunViolation("lost", f"sample {self.lowest()} was not trained, {int(samples.max())} is")
        if most > len(self._marks):
            grown = np.zeros(max(most, 2 * len(self._marks)), dtype=np.uint32)
            grown[: len(self._marks)] = self._marks
            self._marks = grown
        self._marks[places] = self.stretch

    def close(self) -> int:
        """Ends a stretch, where a checkpoint is written; returns its number."""
        self.stretch += 1
        return self.stretch - 1

    def roll_back(self, stretch: int) -> None:
        """Takes back what came after a stretch; 0 takes back all that is not for good."""
        self._marks[self._marks > stretch] = 0
        self.stretch = stretch + 1

    def settle(self, stretch: int) -> None:
        settled = (self._marks > 0) & (self._marks <= stretch)
        count = len(settled) if settled.all() else int(np.argmin(settled))
        if count:
            self._marks = np.concatenate((self._marks[count:], np.zeros(count, dtype=np.uint32)))
            self.base += count
        used = np.flatnonzero(self._marks)
        needed = int(used[-1]) + 1 if len(used) else 0
        if len(self._marks) > max(1 << 12, 4 * needed):
            self._marks = self._marks[: max(1 << 12, 2 * needed)].copy()

    def lowest(self) -> int:
        open_marks = np.flatnonzero(self._marks == 0)
        return self.base + (int(open_marks[0]) if len(open_marks) else len(self._marks))

    def check_below(self, floor: int) -> None:
        if self.lowest() < floor:
            raise RunViolation("lost", f"sample {self.lowest()} was never trained, and nobody is to draw it any more")


class Snapshot(NamedTuple):
    stretch: int  # of the run, that ends with it
    standing: Standing  # of the ranks
    floor: int  # whoever goes on from it draws no sample below


class History:
    def __init__(self, rules: Rules, dp: int) -> None:
        self.ledger = Ledger()  # which samples are trained
        self.trained = 0  # samples that were trained, those of lost stretches too
        self.ranks_before = dp  # of the checkpoint that the current life goes on from
        self._rules = rules
        self._order = DeclaredOrder(rules.unit, rules.window_samples, rules.seed, dp)
        self._beginning = Snapshot(0, self._order.standing, 0)
        self._snapshots: dict[int, Snapshot] = {}
        self._consumed = 0

    @property
    def total(self) -> int | None:
        """The stream's samples; None as long as they are not decided."""
        return self._order.total

    def learn_end(self, decided: Path) -> None:
        """Reads with which sample the source ends, which it has decided before it gave the last ones."""
        if self._order.total is None and decided.exists():
            self._order.total = int(decided.read_text())

    def go_on(self, origin: Checkpoint | None, dp: int) -> None:
        snapshot = self._beginning if origin is None else self._snapshots[origin.consumed]
        self._consumed = 0 if origin is None else origin.consumed
        self.ranks_before = len(snapshot.standing.own)
        self.ledger.roll_back(snapshot.stretch)
        self._order.go_on(snapshot.standing, dp)

    def train(self, step: Sequence[npt.NDArray[np.int64]], shape: Shape, number: int) -> None:
        samples = np.concatenate(step)
        self.ledger.train(samples)
        for rank, (found, expected) in enumerate(zip(step, self._order.draw(shape.batch_size), strict=True)):
            if found.tolist() != expected:
                at = f"life {shape.number}, step {number}, rank {rank} of {shape.dp}"
                raise RunViolation("order", f"{at}: read {found.tolist()[:8]}, declared are {expected[:8]}")
        self._consumed += len(samples)
        self.trained += len(samples)

    def close(self) -> None:
        floor = self._order.floor()
        self._snapshots[self._consumed] = Snapshot(self.ledger.close(), self._order.standing, floor)
        self.ledger.check_below(floor)

    def check_kept(self, stream: Path, checkpoints: Path) -> int:
        """Checks that what any kept checkpoint needs is still there, and forgets what none goes back to. Returns chunks
        that are deleted."""
        # Before the checkpoints: those that are found after are the ones that were kept then, or newer.
        retired = read_retired(stream)
        kept = sorted(int(path.stem) for path in checkpoints.glob("*.json"))
        for consumed in kept:
            needed = self._snapshots[consumed].floor // self._rules.per_chunk
            if needed < retired:
                text = f"chunks below {retired} are deleted; the checkpoint after {consumed} samples needs {needed}"
                raise RunViolation("gone", text)
        if kept:
            self.ledger.settle(self._snapshots[kept[0]].stretch)
            for consumed in [consumed for consumed in self._snapshots if consumed < kept[0]]:
                del self._snapshots[consumed]
        return retired

    def check_whole(self, shape: Shape) -> None:
        missing = (self.total or 0) - self.ledger.trained
        if self.total is None or not 0 <= missing < shape.dp * shape.batch_size:
            raise RunViolation("lost", f"of {self.total} samples {self.ledger.trained} were trained")
