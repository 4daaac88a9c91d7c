"""Converts the state of a run to its course and back: the same history as stored values (`format`) and in `plan`.

No I/O. It is here because neither of the two packages may import the other. States are immutable: each function returns
a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from lazyshard.errors import StateMismatch
from lazyshard.format.state import RunState
from lazyshard.part import Part, SplitOf
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Gaps, Rules

Parts: TypeAlias = tuple[Part, ...]
Range: TypeAlias = tuple[int, int]
_MAX_SAMPLES_OF_STEPS: Final = 20_000_000  # that may be left out: each is looked up, at 16 bytes


def course_of(state: RunState) -> Course:
    """Returns the course that a state describes."""
    return Course(Rules(state.unit, state.window, state.seed, split_of(state)), state.parts)


def split_of(state: RunState) -> SplitOf | None:
    """Returns the split of the stream that a run draws, None for all samples."""
    return SplitOf(*state.split) if state.split else None


def draws_of(state: RunState, consumed: int) -> int:
    """Returns the draws of a lane in the current part after `consumed` samples. ValueError: before it, or in a step."""
    part = state.parts[-1]
    before = state.consumed - part.dp * part.draws
    draws, more = divmod(consumed - before, part.dp)
    if draws < 0:
        raise ValueError(f"consumed is at least {before}, what was trained when the run last continued, got {consumed}")
    if more:
        raise ValueError(f"consumed is {before} and whole steps of all ranks, a multiple of {part.dp}, got {consumed}")
    return draws


def with_consumed(state: RunState, consumed: int) -> RunState:
    """Returns the state `consumed` samples after the run began, over all ranks. Raises ValueError as `draws_of`."""
    current = replace(state.parts[-1], draws=draws_of(state, consumed))
    return replace(state, parts=(*state.parts[:-1], current), consumed=consumed)


def resumed_parts(parts: Parts, dp: int, batch_size: int, *, draws_per_step: int = 0, step: int | None = None) -> Parts:
    """Returns the parts of a run that continues with these ranks: unchanged if nothing differs, else with a new part.

    `draws_per_step`: 0 if unknown. `step`: steps trained so far; None to derive them from the part that ends.
    """
    part = parts[-1]
    if (dp, batch_size, draws_per_step or part.draws_per_step) == (part.dp, part.batch_size, part.draws_per_step):
        return parts
    first = steps_of(part) if step is None else step
    return _behind(parts, Part(dp, batch_size, first_step=first, draws_per_step=draws_per_step))


def steps_of(part: Part) -> int:
    """Returns how many steps were trained by the end of a part; if that is unknown, by its beginning."""
    if not part.trained or not part.draws_per_step:
        return part.first_step
    return part.first_step + part.draws // part.draws_per_step


def parts_without(parts: Parts, ranges: Iterable[tuple[int, int]]) -> Parts:
    """Returns the parts of a run that skips these half-open ranges of samples from here on, in all epochs."""
    skip, part = Gaps(ranges).ranges, parts[-1]
    after = replace(part, draws=0, epoch=None, skip=skip, first_step=steps_of(part))
    return _behind(parts, after) if skip else parts


def parts_behind_steps(parts: Parts, start: int, stop: int) -> Parts:
    """Returns the parts of a run that skips the next steps, [start, stop), as a part that is not trained.

    The first step is step 1. ValueError: these steps are not next, the range is empty, or the parts do not have steps.
    """
    part = parts[-1]
    now, first, last = _draws_of_steps(part, start, stop)
    if start != now:
        raise ValueError(f"steps {start}:{stop}: expected steps from the next one on, {now}; give samples instead")
    out = replace(part, draws=last - first, epoch=None, trained=False, skip=(), first_step=now - 1)
    return _behind(_behind(parts, out), replace(part, draws=0, epoch=None, skip=(), first_step=now - 1))


def without(
    state: RunState, samples: Sequence[Range], steps: Iterable[Range], total: int | None, published: int | None = None
) -> RunState:
    """Returns the state of a run that skips ranges of samples, and of steps, from here on.

    Steps that come next are passed over as a whole; of later ones the samples are skipped that they would train. With
    `published` samples of a live stream, raises ValueError for later ones that need more; or as the functions below.
    """
    last, after, out = state.parts[-1], state, list(samples)
    # Joined, so that at most one range is the next one.
    for start, stop in Gaps(steps).ranges:
        if start == steps_of(last) + 1:
            after = replace(state, parts=parts_behind_steps(state.parts, start, stop))
            continue
        end = last.draws + (stop - 1 - steps_of(last)) * last.draws_per_step - 1
        if total is None and published is not None and course_of(state).needed(end) > published:
            way_out = "continue from a checkpoint right before the steps to exclude, or name samples"
            raise ValueError(f"the samples of the steps before {stop} are not published yet: {way_out}")
        out += ranges_of_steps(state, start, stop, total)
    known = gaps_of(after.parts)
    # Samples that are already excluded need not be dealt again.
    more = known.joined(out).ranges != known.ranges
    return replace(after, parts=parts_without(after.parts, out)) if more else after


def gaps_of(parts: Parts) -> Gaps:
    """Returns all samples that the parts of a run skip."""
    return Gaps(one for part in parts for one in part.skip)


def ranges_of_steps(state: RunState, start: int, stop: int, total: int | None) -> list[tuple[int, int]]:
    """Returns what the steps [start, stop) will train, as half-open ranges of sample numbers, to skip later steps.

    `total`: the end of the stream, or None. ValueError: already trained, too many, or the steps are unknown.
    """
    _, first, last = _draws_of_steps(state.parts[-1], start, stop)
    dp = state.parts[-1].dp
    if (last - first) * dp > _MAX_SAMPLES_OF_STEPS:
        more = f"{(last - first) * dp} samples, more than {_MAX_SAMPLES_OF_STEPS}"
        raise ValueError(f"steps {start}:{stop} train {more}: continue from a checkpoint right before them")
    _, samples = course_of(state).draws(np.arange(dp)[:, None], np.arange(first, last), total)
    numbers = np.unique(samples)
    ends = np.flatnonzero(np.diff(numbers) != 1)
    starts, stops = numbers[np.r_[0, ends + 1]], numbers[np.r_[ends, len(numbers) - 1]] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def check_fits(state: RunState, now: RunState, where: str) -> None:
    """Refuses a state that does not fit the stream and the settings; ranks and micro batches may differ.

    `now`: the state of a new run with these settings. Raises StateMismatch with the field that differs and a remedy.
    """
    ways = {
        "stream_id": "it belongs to another stream: give that stream's directory, or start again without the state",
        "samples_per_chunk": "the same sample would be in another chunk: give samples_per_chunk as it was",
        "unit": 'the deal would differ: give unit as it was, or "auto"',
        "window": f"in samples; give shuffle_window={state.window // state.samples_per_chunk} for the same order",
        "seed": "the order would differ: give seed as it was",
        "split": "the samples would differ: give split and splits as they were",
        "max_total_samples": "epochs would end elsewhere: give max_total_samples as it was",
    }
    for field, way_out in ways.items():
        if getattr(state, field) != getattr(now, field):
            expected, actual = (str(split_of(one) if field == "split" else getattr(one, field)) for one in (state, now))
            what = f"{where}: the state was saved with {field} {expected}, here it is {actual}: {way_out}"
            raise StateMismatch(what, directory=where, field=field, expected=expected, actual=actual)


def _draws_of_steps(part: Part, start: int, stop: int) -> tuple[int, int, int]:
    """Returns the number of the next step, and where the draws of steps begin and end in the current part."""
    if not part.draws_per_step:
        raise ValueError("the state does not say how many samples a step has, so steps cannot be given; give samples")
    now = steps_of(part) + 1
    if not now <= start < stop:
        expected = f"FIRST:STOP with {now} <= FIRST < STOP"
        raise ValueError(f"steps {start}:{stop}: expected {expected}, since {now - 1} steps are trained")
    return now, (start - now) * part.draws_per_step + part.draws, (stop - now) * part.draws_per_step + part.draws


def _behind(parts: Parts, part: Part) -> Parts:
    """Appends a part; if the current part has drawn nothing, replaces it and keeps only what it skips."""
    ended = parts[-1]
    if ended.draws:
        return (*parts, part)
    epoch = ended.epoch if part.epoch is None else part.epoch
    return (*parts[:-1], replace(part, skip=Gaps((*ended.skip, *part.skip)).ranges, epoch=epoch))
