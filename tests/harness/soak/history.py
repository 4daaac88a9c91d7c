"""The history of a run that survives its kills: checks each step against it, and goes back with the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lazyshard.stream import read_retired
from tests.harness.runs.checkpoints import Checkpoint
from tests.harness.tally import RunViolation
from tests.plan.oracle import permutation, slices

if TYPE_CHECKING:
    from tests.harness.soak.job import Rules, Shape


@dataclass(frozen=True, slots=True)
class Standing:
    own: tuple[tuple[int, ...], ...]  # what is carried over, a list for each rank
    start: int  # behind that the samples from here on are dealt
    turn: int  # the rank that gets the first sample of a tail
    at: int  # how many positions each rank has drawn since `own` was dealt


class DeclaredOrder:
    """The order of a run. `unit`: dealt to a rank in a row. `window`: positions that are shuffled together, or 0."""

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
        start, carried = self._left()
        self._windows.clear()
        own = tuple(map(tuple, slices(carried, dp)))
        self.standing = Standing(own, start, len(carried) % dp, 0)

    def draw(self, batch_size: int) -> list[list[int]]:
        at = self.standing.at
        drawn = [self._positions(lane, at, at + batch_size) for lane in range(len(self.standing.own))]
        self.standing = Standing(self.standing.own, self.standing.start, self.standing.turn, at + batch_size)
        return drawn

    def floor(self) -> int:
        start, left = self._left()
        return min([*left, start])

    def _left(self) -> tuple[int, list[int]]:
        """Returns the first sample of no window that was begun, and what is left in those that were, lane by lane."""
        own, at = self.standing.own, self.standing.at
        opened = max(0, *(-(-(at - len(one)) // self._span) for one in own))
        left = [self._positions(lane, at, len(one) + opened * self._span) for lane, one in enumerate(own)]
        start = self.standing.start + opened * self._span * len(own)
        end = start if self.total is None else min(start, self.total)  # The last windows are shorter than the others
        return end, [sample for lane in left for sample in lane]

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
        if window is None:  # Of an open end only whole windows are drawn; they stay as they are
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


class Ledger:
    def __init__(self) -> None:
        self.base = 0  # every sample below is trained for good
        self.stretch = 1  # number of the current stretch, from 1
        self._marks: dict[int, int] = {}  # in which stretch each sample was trained that is not

    @property
    def trained(self) -> int:
        return self.base + len(self._marks)

    @property
    def size(self) -> int:
        return len(self._marks)

    def train(self, samples: list[int]) -> None:
        again = [sample for sample in samples if sample < self.base or sample in self._marks]
        if again or len(set(samples)) < len(samples):
            raise RunViolation("twice", f"samples {sorted(again)[:10]} of {len(samples)} came again")
        self._marks.update(dict.fromkeys(samples, self.stretch))

    def close(self) -> int:
        self.stretch += 1
        return self.stretch - 1

    def roll_back(self, stretch: int) -> None:
        """Takes back what came after a stretch; 0 takes back all that is not for good."""
        self._marks = {sample: mark for sample, mark in self._marks.items() if mark <= stretch}
        self.stretch = stretch + 1

    def settle(self, stretch: int) -> None:
        while self._marks.get(self.base, stretch + 1) <= stretch:
            del self._marks[self.base]
            self.base += 1

    def check_below(self, floor: int) -> None:
        lost = next((sample for sample in range(self.base, floor) if sample not in self._marks), None)
        if lost is not None:
            raise RunViolation("lost", f"sample {lost} was never trained, and nobody is to draw it any more")


class Snapshot(NamedTuple):
    stretch: int  # of the run, that ends with it
    standing: Standing  # of the ranks
    floor: int  # whoever continues from it draws no sample below


class History:
    def __init__(self, rules: "Rules", dp: int) -> None:
        self.ledger = Ledger()  # which samples are trained
        self.trained = 0  # samples that were trained, those of lost stretches too
        self.ranks_before = dp  # of the checkpoint that the current life continues from
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
        if self._order.total is None and decided.exists():
            self._order.total = int(decided.read_text())

    def go_on(self, origin: Checkpoint | None, dp: int) -> None:
        snapshot = self._beginning if origin is None else self._snapshots[origin.consumed]
        self._consumed = 0 if origin is None else origin.consumed
        self.ranks_before = len(snapshot.standing.own)
        self.ledger.roll_back(snapshot.stretch)
        self._order.go_on(snapshot.standing, dp)

    def train(self, step: Sequence[list[int]], shape: "Shape", number: int) -> None:
        samples = [sample for own in step for sample in own]
        self.ledger.train(samples)
        for rank, (found, expected) in enumerate(zip(step, self._order.draw(shape.batch_size), strict=True)):
            if found != expected:
                at = f"life {shape.number}, step {number}, rank {rank} of {shape.dp}"
                raise RunViolation("order", f"{at}: read {found[:8]}, declared are {expected[:8]}")
        self._consumed += len(samples)
        self.trained += len(samples)

    def close(self) -> None:
        floor = self._order.floor()
        self._snapshots[self._consumed] = Snapshot(self.ledger.close(), self._order.standing, floor)
        self.ledger.check_below(floor)

    def check_kept(self, stream: Path, checkpoints: Path) -> int:
        """Checks that what any kept checkpoint needs is there, and forgets the rest; returns chunks deleted."""
        retired = read_retired(stream)  # First: checkpoints found after are those, or newer
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

    def check_whole(self, shape: "Shape") -> None:
        missing = (self.total or 0) - self.ledger.trained
        if self.total is None or not 0 <= missing < shape.dp * shape.batch_size:
            raise RunViolation("lost", f"of {self.total} samples {self.ledger.trained} were trained")
