"""The course of a run over its starts: what a start makes of its checkpoint, and how the trainer's own counts fit it.

Megatron counts samples, so it goes on with any ranks and batches by itself. The Hugging Face trainer counts steps, and
takes all steps of all epochs to be alike: where that is no longer true, it is given the rest of the run as one long
epoch, of which it skips as many batches as it has trained steps.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lazyshard.format.state import PartState, RunState
from lazyshard.storage.run_state import course_of, resumed, steps_of
from lazyshard_swift.position import Position


def consumed_after(step: int, epoch_samples: int, micro_samples: int, accumulation_steps: int) -> int:
    """Returns how many samples the Hugging Face trainer takes to have been trained after so many steps.

    Args:
        step: steps trained.
        epoch_samples: samples of an epoch, over all ranks.
        micro_samples: samples of a micro batch, over all ranks.
        accumulation_steps: micro batches of a step; the last step of an epoch has what is left.
    """
    batches = epoch_samples // micro_samples
    epoch, within = divmod(step, -(-batches // accumulation_steps))
    return epoch * epoch_samples + min(within * accumulation_steps, batches) * micro_samples


def goes_straight_on(state: RunState, saved: Position, part: PartState, counted: int) -> bool:
    """Returns whether the trainer's own counts fit: the ranks and batches have been the same since the run began.

    Args:
        state: where the run stands.
        saved: the checkpoint's position.
        part: of a run that would begin now.
        counted: samples trained after the checkpoint's steps, as the trainer would count them.
    """
    only = state.parts[0]
    return (
        len(state.parts) == 1
        and (only.dp, only.batch_size, only.first_step, only.epoch) == (part.dp, part.batch_size, 0, None)
        and counted == saved.consumed
    )


def gone_on(state: RunState, saved: Position, part: PartState, straight: bool) -> RunState:
    """Returns the state with which a run goes on.

    Args:
        state: where it stands.
        saved: the checkpoint's position.
        part: of a run that would begin now: its ranks, its micro batch, its positions a step.
        straight: see `goes_straight_on`.
    """
    if straight:
        # What format 1 did not say is known now.
        return replace(state, parts=(replace(state.parts[0], draws_per_step=part.draws_per_step),))
    last = state.parts[-1]
    if steps_of(last) != saved.step:
        # Its steps were not all alike, so it does not say when it trained what; the next part does.
        state = replace(state, parts=(*state.parts[:-1], replace(last, draws_per_step=0)))
    return resumed(state, part.dp, part.batch_size, draws_per_step=part.draws_per_step, step=saved.step)


def end_of_epochs(state: RunState, total: int, epochs: float) -> int:
    """Returns at which position of the current part so many epochs, counted from the run's beginning, are trained.

    Args:
        state: the run's.
        total: samples of the stream.
        epochs: also a fraction.
    """
    course = course_of(state)
    size = course.batch_size
    first, whole = course.epoch_length(total) // size, course.full_epoch_length(total) // size
    return max(0, first + math.ceil((epochs - course.epoch(total) - 1) * whole)) * size


def ends_epoch(state: RunState, total: int, first: int, stop: int) -> bool:
    """Returns whether an epoch ends with one of the positions [first, stop) of the current part."""
    course = course_of(state)
    length, full = course.epoch_length(total), course.full_epoch_length(total)
    if stop < length or not full:
        return first < length <= stop
    return first < length or (stop - length) // full > (first - length) // full
