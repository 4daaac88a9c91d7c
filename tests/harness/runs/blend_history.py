"""What of a run over a blend has survived its kills: each stream by itself, whose turn it was, and where it ended.

A sample is written down as its number in its stream, and `OF_A_STREAM` for each stream before that one. What ranks have
trained of one stream is the history of a run over that stream alone, whose micro batches are single samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from tests.harness.runs.history import OF_A_STREAM, Lived, Step, Violation, check_once, check_order, survived
from tests.harness.runs.plan import LifePlan, RunPlan
from tests.plan.oracle import turns

History = Sequence[tuple[LifePlan, list[Step]]]


def of_stream(lives: Sequence[Lived], number: int) -> list[Lived]:
    """Returns what lives have trained of one stream, step by step, by its own sample numbers."""
    first = number * OF_A_STREAM
    return [
        replace(
            life,
            plan=replace(life.plan, batch_size=1),
            steps=[
                [[sample - first for sample in rank if sample // OF_A_STREAM == number] for rank in step]
                for step in life.steps
            ],
        )
        for life in lives
    ]


def steps_left(run: RunPlan, lives: Sequence[Lived], origin: tuple[int, int] | None, plan: LifePlan) -> int:
    """Returns about how many steps a life has, until the first of its streams is at its end.

    Args:
        run: the run.
        lives: those so far.
        origin: the life from which it goes on, and the steps which that had trained; None for neither.
        plan: of the life.
    """
    trained = [0] * len(run.streams)
    for _, steps in [] if origin is None else survived(lives, *origin):
        for sample in [sample for step in steps for rank in step for sample in rank]:
            trained[sample // OF_A_STREAM] += 1
    draws = [
        (stream.total - done) // plan.dp * sum(plan.weights) // weight
        for stream, done, weight in zip(run.streams, trained, plan.weights, strict=True)
        if weight
    ]
    return max(0, min(draws)) // plan.batch_size


def check_blend(run: RunPlan, lives: Sequence[Lived]) -> None:
    """Checks that all lives together have trained no sample twice, in the declared order and mixture, to the end.

    Raises:
        Violation: they have not.
    """
    steps = len(lives[-1].steps)
    for number, stream in enumerate(run.streams):
        history = survived(of_stream(lives, number), len(lives) - 1, steps)
        check_once(stream, history)
        check_order(stream, history)
    history = survived(lives, len(lives) - 1, steps)
    following = check_turns(history)
    check_end(run, history, following)


def check_turns(history: History) -> list[int]:
    """Checks that all ranks drew from the same streams at the same positions, and from those whose turn it was.

    Returns:
        Whose turn it would be in the next micro batch.

    Raises:
        Violation: one has not.
    """
    begun: tuple[int, ...] = ()
    drawn = 0
    for number, (plan, steps) in enumerate(history):
        divisor = gcd(*plan.weights)
        weights = tuple(weight // divisor for weight in plan.weights)
        if weights != begun:
            begun, drawn = weights, 0
        size = plan.batch_size
        blended = [stream for stream, weight in enumerate(weights) if weight]
        order = turns([weights[stream] for stream in blended], drawn + size * (len(steps) + 1))
        declared = [blended[turn] for turn in order[drawn:]]
        for step, ranks in enumerate(steps):
            expected = declared[step * size : (step + 1) * size]
            for rank, samples in enumerate(ranks):
                found = [sample // OF_A_STREAM for sample in samples]
                if found != expected:
                    raise Violation(
                        "order",
                        f"life {number} of what has survived, step {step}: rank {rank} drew from streams {found}, it "
                        f"was the turn of {expected}, with weights {plan.weights}",
                    )
        drawn += size * len(steps)
    return declared[-size:]


def check_end(run: RunPlan, history: History, following: Sequence[int]) -> None:
    """Checks that the blend has ended because a stream had not enough for another micro batch of all ranks.

    Raises:
        Violation: it has ended too early.
    """
    plan = history[-1][0]
    left = [stream.total for stream in run.streams]
    for sample in [sample for _, steps in history for step in steps for rank in step for sample in rank]:
        left[sample // OF_A_STREAM] -= 1
    if all(following.count(number) * plan.dp <= most for number, most in enumerate(left)):
        raise Violation("skipped", f"it has ended, and streams have {left} samples left, {following} would be next")
