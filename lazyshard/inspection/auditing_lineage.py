"""The history of a run: which of its states lie on the course of one of them, and where others have left it.

A resume from an older checkpoint than the newest leaves a branch behind: what was trained there is not in the model
that goes on. Two states share what they drew in the same parts, up to the first difference::

    state A   4 ranks, 100 draws | 2 ranks, 30 draws
    state B   4 ranks, 100 draws | 2 ranks, 50 draws | 8 ranks, 7 draws      A is on B's course
    state C   4 ranks, 120 draws                                            C has left it after 100 draws of part 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lazyshard.format.state import PartState, RunState

Relation = Literal["head", "on the course", "beyond", "abandoned", "another epoch", "other settings", "other stream"]
"""What a state is to the one that is audited: itself; earlier on its course; later on the same course; on a branch that
was given up; of epochs that this one does not tell of; or of no run that this one can be of."""

SETTINGS = ("samples_per_chunk", "unit", "window", "seed", "max_total_samples")


class Fork(NamedTuple):
    """Where two courses part: after `draws` positions of each lane of a part."""

    part: int
    draws: int


class Span(NamedTuple):
    """Positions of the half-open range [start, stop) of each lane of a part."""

    part: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Related:
    """What a state is to the one that is audited.

    Attributes:
        relation: see `Relation`.
        fork: where it has left the course; None where it has not, or has nothing to do with it.
        beyond: what it drew behind the fork.
        differs: the settings in which it differs.
    """

    relation: Relation
    fork: Fork | None = None
    beyond: tuple[Span, ...] = ()
    differs: tuple[str, ...] = ()


def relate(state: RunState, head: RunState, epochs: range, head_epochs: range) -> Related:
    """Returns what a state is to another one.

    Args:
        state: the state.
        head: the one that is audited.
        epochs: those of which the state has drawn anything.
        head_epochs: those of which the other one has.
    """
    if state == head:
        return Related("head")
    if state.stream_id != head.stream_id:
        return Related("other stream")
    differs = tuple(name for name in SETTINGS if getattr(state, name) != getattr(head, name))
    if differs:
        return Related("other settings", differs=differs)
    fork = fork_of(state, head)
    beyond = spans_behind(state, fork)
    if not beyond:
        return Related("on the course", fork)
    if not spans_behind(head, fork):
        return Related("beyond", fork, beyond)
    if fork == Fork(0, 0) and (epochs.stop <= head_epochs.start or head_epochs.stop <= epochs.start):
        return Related("another epoch", fork, beyond)
    return Related("abandoned", fork, beyond)


def fork_of(one: RunState, other: RunState) -> Fork:
    """Returns up to where two states have drawn the same: the end of the shorter one if they never part."""
    a, b = _drawn(one), _drawn(other)
    for number, (left, right) in enumerate(zip(a, b, strict=False)):
        if _kind(left) != _kind(right):
            return Fork(number, 0)
        if left.draws != right.draws:
            return Fork(number, min(left.draws, right.draws))
    shorter = min(a, b, key=len)
    return Fork(len(shorter) - 1, shorter[-1].draws) if shorter else Fork(0, 0)


def spans_behind(state: RunState, fork: Fork) -> tuple[Span, ...]:
    """Returns what a state has drawn behind a fork."""
    spans = []
    for number, part in enumerate(state.parts):
        start = part.draws if number < fork.part else fork.draws if number == fork.part else 0
        if start < part.draws:
            spans.append(Span(number, start, part.draws))
    return tuple(spans)


def _drawn(state: RunState) -> list[PartState]:
    """Returns the parts up to the last one that has drawn anything: one that has not decides nothing yet."""
    stop = max((number + 1 for number, part in enumerate(state.parts) if part.draws), default=0)
    return list(state.parts[:stop])


def _kind(part: PartState) -> tuple[Any, ...]:
    """Returns what decides the order of a part; an epoch that it begins or not is another one."""
    return part.dp, part.batch_size, part.epoch, part.trained, part.skip
