"""What a run is told not to train: `--sharded_lazy_skip "samples 120:180, chunks 7:8, steps 41:61"`.

The known remedy for a loss spike: go on from the checkpoint before it, without the samples that came then. All ranges
are half-open. Samples and chunks count from 0; steps as in the trainer's log and in `lazyshard trace`, so 41:61 are
those between checkpoint-40 and checkpoint-60.

What was asked for is kept in the checkpoints, so a command that is started again with the same argument, from a later
checkpoint, leaves nothing out twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from lazyshard.format.state import RunState
from lazyshard.plan import Gaps
from lazyshard.storage.run_state import course_of, ranges_of_steps, steps_of, without_samples, without_steps

KINDS: Final = ("samples", "chunks", "steps")
_ITEM: Final = re.compile(rf"({'|'.join(KINDS)})\s+(\d{{1,18}}):(\d{{1,18}})")


class Skip(NamedTuple):
    """A half-open range of samples, chunks or steps, by number."""

    kind: str
    start: int
    stop: int

    def __str__(self) -> str:
        """As on the command line."""
        return f"{self.kind} {self.start}:{self.stop}"


def parse_skips(text: str) -> tuple[Skip, ...]:
    """Reads the argument.

    >>> [str(one) for one in parse_skips("samples 120:180, steps 41:61")]
    ['samples 120:180', 'steps 41:61']

    Raises:
        ValueError: it is not of this form.
    """
    found = []
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None or int(match[2]) >= int(match[3]):
            raise ValueError(
                f'expected ranges such as "samples 120:180, chunks 7:8, steps 41:61", each FIRST:STOP with FIRST < '
                f"STOP, got {item.strip()!r}"
            )
        found.append(Skip(match[1], int(match[2]), int(match[3])))
    return tuple(dict.fromkeys(found))


def without(state: RunState, skips: Sequence[Skip], total: int | None, published: int) -> RunState:
    """Returns the state of a run that leaves these out from where it stands.

    Steps are counted as the run has gone so far, with the ranks and batches that it had.

    Args:
        state: where the run stands.
        skips: what to leave out.
        total: the end of the stream, None while it is not known.
        published: samples published.

    Raises:
        ValueError: steps that cannot be left out: they are trained, the state does not know its steps, or it is not
            known yet what they would train.
    """
    size = state.samples_per_chunk
    samples = [(one.start, one.stop) for one in skips if one.kind == "samples"]
    samples += [(one.start * size, one.stop * size) for one in skips if one.kind == "chunks"]
    # Joined, so that at most one range comes next.
    steps = Gaps((one.start, one.stop) for one in skips if one.kind == "steps").ranges
    now = steps_of(state.parts[-1]) + 1
    after = state
    for start, stop in steps:
        if start == now:
            after = without_steps(state, start, stop, total)
            continue
        if not _known(state, stop, total, published):
            raise ValueError(
                f"what the steps before {stop} would train is not published yet: go on from a checkpoint right before "
                f"the steps to leave out, or name samples"
            )
        # Of the run as it goes now, before anything is left out of it.
        samples += ranges_of_steps(state, start, stop, total)
    return without_samples(after, samples)


def _known(state: RunState, stop: int, total: int | None, published: int) -> bool:
    """Returns whether it is known what all steps before `stop` train."""
    part = state.parts[-1]
    last = part.draws + (stop - 1 - steps_of(part)) * part.draws_per_step - 1
    return total is not None or course_of(state).needed(last) <= published
