"""What of a run has survived its kills, and whether that is every sample once, in the declared order.

A life counts up to the checkpoint from which a later one continued; the last life counts whole::

    life 0   s s s C s s s C s s x        killed; the next one takes the newest checkpoint
    life 1                  s s C s x     killed; the next one takes an older checkpoint
    life 2                  s s s s s end
    history  ^----- life 0 ^ ^ life 2 ^
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Final

from tests.harness.runs.plan import LifePlan, RunPlan
from tests.harness.tally import RunViolation
from tests.plan.oracle import course_of_draws, turns

OF_A_STREAM: Final = 1_000_000  # Where streams are blended: samples of stream k are numbered from k times this on
Step = list[list[int]]  # The samples of each rank in one step
History = Sequence[tuple[LifePlan, list[Step]]]


@dataclass(frozen=True, slots=True)
class Lived:
    plan: LifePlan
    origin: tuple[int, int] | None  # the life it continued from, and after how many steps; None for neither
    steps: list[Step]  # what it trained, as far as all ranks have written it down


def read_steps(folder: Path, dp: int) -> list[Step]:
    ranks = []
    for path in (folder / f"rank-{rank}" for rank in range(dp)):
        lines = path.read_text().splitlines() if path.exists() else []
        trained = [list(map(int, line.split())) for line in lines]
        assert [number for number, *_ in trained] == list(range(len(trained))), f"{path} skips a step"
        ranks.append([samples for _, *samples in trained])
    return [list(step) for step in zip(*ranks, strict=False)]


def survived(lives: Sequence[Lived], at: tuple[int, int] | None) -> list[tuple[LifePlan, list[Step]]]:
    """`at`: a life, and how many of its steps."""
    history = []
    while at is not None:
        number, count = at
        lived = lives[number]
        assert len(lived.steps) >= count, f"life {number} has written down {len(lived.steps)} steps, {count} counted"
        history.append((lived.plan, lived.steps[:count]))
        at = lived.origin
    return history[::-1]


def _samples(history: History) -> list[int]:
    return [sample for _, steps in history for step in steps for rank in step for sample in rank]


def check_whole(run: RunPlan, lives: Sequence[Lived]) -> None:
    history = survived(lives, (len(lives) - 1, len(lives[-1].steps)))
    trained = check_once(run, history)
    missing = sorted(set(range(run.total)) - trained)
    last = lives[-1].plan
    if len(missing) >= last.dp * last.batch_size:
        most = f"{last.dp} ranks with micro batches of {last.batch_size} leave fewer than their product over"
        raise RunViolation("skipped", f"samples {missing} were not trained; {most}")
    check_order(run, history)


def check_once(run: RunPlan, history: History) -> set[int]:
    """Checks that no sample was trained twice, and none that there is not; returns those that were."""
    trained = Counter(_samples(history))
    twice = sorted(sample for sample, count in trained.items() if count > 1)
    if twice:
        raise RunViolation("twice", f"samples {twice} were trained more than once")
    foreign = sorted(set(trained) - set(range(run.total)))
    if foreign:
        raise RunViolation("order", f"samples {foreign} are past the end, {run.total}")
    return set(trained)


def check_order(run: RunPlan, history: History) -> None:
    parts: list[tuple[int, int, list[Step]]] = []
    for plan, steps in history:
        now = plan.dp, plan.batch_size
        if parts and parts[-1][:2] == now:
            parts[-1][2].extend(steps)
        elif parts and not _draws(parts[-1][2]):
            parts[-1] = (*now, list(steps))  # It has drawn nothing, so it is no part of the course
        else:
            parts.append((*now, list(steps)))
    chain = [(dp, size, _draws(steps), ()) for dp, size, steps in parts]
    declared = course_of_draws(run.unit, run.window_samples, run.seed, chain, run.total)
    for number, (dp, size, steps) in enumerate(parts):
        for rank in range(dp):
            found = [(0, sample) for step in steps for sample in step[rank]]
            expected = declared[number][rank]
            if found != expected:
                where = f"part {number}, rank {rank} of {dp}, micro batch {size}"
                raise RunViolation("order", f"{where}: trained {found}, declared are {expected}")


def _draws(steps: Sequence[Step]) -> int:
    return sum(len(step[0]) for step in steps)


def check_kept(run: RunPlan, lives: Sequence[Lived], life: int, steps: int, retired: int) -> None:
    """Checks that what is left to train after a checkpoint is there, the rest too. `retired`: chunks below are gone."""
    left = sorted(set(range(run.total)) - set(_samples(survived(lives, (life, steps)))))
    if left and left[0] // run.per_chunk < retired:
        text = f"chunks below {retired} are deleted, after step {steps} of life {life} sample {left[0]} is still needed"
        raise RunViolation("gone", text)


def of_stream(lives: Sequence[Lived], number: int) -> list[Lived]:
    def own(rank: list[int]) -> list[int]:
        return [sample % OF_A_STREAM for sample in rank if sample // OF_A_STREAM == number]

    found = [[list(map(own, step)) for step in life.steps] for life in lives]
    plans = [replace(life.plan, batch_size=1) for life in lives]
    return [replace(life, plan=plan, steps=steps) for life, plan, steps in zip(lives, plans, found, strict=True)]


def steps_left(run: RunPlan, lives: Sequence[Lived], origin: tuple[int, int] | None, plan: LifePlan) -> int:
    """Returns about how many steps a life has that continues from another one, `origin`, after so many of its steps."""
    trained = [0] * len(run.streams)
    for sample in _samples(survived(lives, origin)):
        trained[sample // OF_A_STREAM] += 1
    each = zip(run.streams, trained, plan.weights, strict=True)
    draws = [(stream.total - done) // plan.dp * sum(plan.weights) // weight for stream, done, weight in each if weight]
    return max(0, min(draws)) // plan.batch_size


def check_blend(run: RunPlan, lives: Sequence[Lived]) -> None:
    at = len(lives) - 1, len(lives[-1].steps)
    for number, stream in enumerate(run.streams):
        history = survived(of_stream(lives, number), at)
        check_once(stream, history)
        check_order(stream, history)
    history = survived(lives, at)
    check_end(run, history, check_turns(history))


def check_turns(history: History) -> list[int]:
    """Checks that all ranks drew from the streams whose turn it was; returns whose it would be next."""
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
                    where = f"life {number} of what has survived, step {step}, rank {rank}"
                    raise RunViolation("order", f"{where}: drew from {found}, it was the turn of {expected}")
        drawn += size * len(steps)
    return declared[-size:]


def check_end(run: RunPlan, history: History, following: Sequence[int]) -> None:
    """Checks that the blend has ended because a stream had not enough for another micro batch of all ranks."""
    plan = history[-1][0]
    left = [stream.total for stream in run.streams]
    for sample in _samples(history):
        left[sample // OF_A_STREAM] -= 1
    if all(following.count(number) * plan.dp <= most for number, most in enumerate(left)):
        raise RunViolation("skipped", f"it has ended, and streams have {left} samples left, {following} would be next")
