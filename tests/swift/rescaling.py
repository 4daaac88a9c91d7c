"""Runs that are killed and go on with other ranks: which checkpoint is safe, and what the surviving history trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lazyshard.stream import read_cursor
from lazyshard.stream.run_state import course_of
from lazyshard_swift.checkpoints import load_position
from lazyshard_swift.position import Position
from tests.swift.commands import Run, Training, ids_by_dp


def killed_at(training: Training, directory: Path, consumer: str, step: int) -> tuple[Run, Path]:
    """Kills a training after a step has its loss, and returns the newest checkpoint that is safe, as the cursor says.

    If the training ends before, it is not killed.
    """
    training.wait_for(lambda: step in training.losses, f"loss of step {step}")
    training.kill()
    run, cursor = training.wait(), read_cursor(directory, consumer)
    assert cursor is not None and cursor.state is not None
    saved = {folder: load_position(folder) for folder in training.output_dir.glob("checkpoint-*")}
    (newest,) = (
        folder for folder, position in saved.items() if position is not None and position.consumed == cursor.consumed
    )
    return run, newest


def position_of(checkpoint: Path) -> Position:
    position = load_position(checkpoint)
    assert position is not None and position.state is not None
    return position


def assert_every_sample_once(runs: Sequence[Run], checkpoints: Sequence[Path], samples: int, epochs: int = 1) -> None:
    """Checks what each start trained up to its checkpoint: the declared order, and together every sample once an epoch.

    Args:
        runs: the starts, each with other ranks or batches than the one before.
        checkpoints: those that the next start went on from, and the last one of all.
        samples: of the stream; fewer than a step may be left over at its end, and of a micro batch of all ranks at that
            of an epoch.
        epochs: how many were trained.
    """
    final = position_of(checkpoints[-1]).state
    assert final is not None
    course, first = course_of(final), 0
    assert len(final.parts) == len(runs)
    trained: list[tuple[int, int]] = []
    for number, (run, checkpoint) in enumerate(zip(runs, checkpoints, strict=True)):
        position, part, here = position_of(checkpoint), final.parts[number], course.until(number)
        batches = [batch for batch in run.batches if first < batch.step <= position.step]
        assert min(batch.step for batch in run.batches) == first + 1
        declared = {lane: [here.draw(lane, at, samples) for at in range(part.draws)] for lane in range(part.dp)}
        by_dp = {lane: [drawn.sample for drawn in draws] for lane, draws in declared.items() if draws}
        assert ids_by_dp(batches) == by_dp, f"start {number}"
        trained += ((drawn.epoch, drawn.sample) for draws in declared.values() for drawn in draws)
        assert (len(trained), part.first_step) == (position.consumed, first)
        first = position.step
    assert not {where: n for where, n in Counter(trained).items() if n > 1}, "samples that were trained more than once"
    largest = max(part.dp * max(part.draws_per_step, part.batch_size) for part in final.parts)
    found = Counter(epoch for epoch, _ in trained)
    assert set(found) == set(range(epochs))
    assert all(samples - largest < number <= samples for number in found.values()), found
