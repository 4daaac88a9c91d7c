"""A simulated run as numbers, all of it in one place; and sweeps: the same run with other values of its settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from lazyshard.simulation.costs import Disk, Files, count_files, disk_use
from lazyshard.simulation.order import Shuffle, shuffle_quality
from lazyshard.simulation.run import Timeline, simulate
from lazyshard.simulation.setting import Setting

SWEPT: Final[dict[str, Callable[[str], Any]]] = {
    **dict.fromkeys(
        ("samples_per_chunk", "window", "ranks", "batch", "workers", "head_start", "checkpoint_steps"), int
    ),
    **dict.fromkeys(("step_seconds", "producer_rate"), float),
}
"""What can be swept, and what its values are."""

MOST_RUNS: Final = 400
"""Of a sweep."""

Axis = tuple[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Simulated:
    """All that is known of a simulated run."""

    setting: Setting
    timeline: Timeline
    disk: Disk
    files: Files
    shuffle: Shuffle

    @property
    def limited_by(self) -> Literal["producer", "reading", "training"]:
        """What is slowest in the long run, whatever the head start."""
        setting, step_s = self.setting, self.timeline.step_s
        if setting.producer_rate * step_s < setting.step_rows:
            return "producer"
        return "reading" if step_s > 1.01 * setting.step_seconds else "training"

    @property
    def longest_wait_s(self) -> float:
        """Of the waits but that for the first step."""
        return float(self.timeline.waits[1:].max(initial=0.0))

    def figures(self) -> dict[str, Any]:
        """Returns all figures by name, plain values."""
        setting, timeline = self.setting, self.timeline
        found = {
            "steps": setting.steps,
            "chunks": setting.chunks,
            "limited_by": self.limited_by,
            "first_step_s": timeline.first_step_s,
            "end_s": timeline.end_s,
            "stalled_s": timeline.stalled_s,
            "stall_share": timeline.stall_share,
            "longest_wait_s": self.longest_wait_s,
            "waits": len(timeline.waits) - 1,
            "tail_chunks": setting.tail_chunks,
            "tail_openings": setting.tail_openings,
        }
        return asdict(setting) | found | self.disk._asdict() | self.files._asdict() | self.shuffle._asdict()


def outcome(setting: Setting) -> Simulated:
    """Simulates a run and counts everything."""
    timeline = simulate(setting)
    disk = disk_use(timeline)
    return Simulated(setting, timeline, disk, count_files(timeline, disk), shuffle_quality(setting))


def parse_axis(text: str) -> Axis:
    """Returns name and values of ``name=1,2,4`` or ``name=100:10000``: both ends, and 1, 2, 5, 10, ... between.

    >>> parse_axis("samples_per_chunk=100:1500")
    ('samples_per_chunk', [100, 200, 500, 1000, 1500])

    Raises:
        ValueError: it is neither; says why.
    """
    name, _, values = text.partition("=")
    name = name.replace("-", "_")
    if name not in SWEPT:
        raise ValueError(f"{name!r} cannot be swept; one of {', '.join(SWEPT)} can")
    number = SWEPT[name]
    try:
        if ":" in values:
            low, high = map(number, values.split(":"))
            found = list(_between(low, high))
        else:
            found = [number(value) for value in values.split(",")]
    except (ValueError, OverflowError) as cause:
        raise ValueError(f"{text!r}: expected NAME=VALUE,VALUE,... or NAME=LOW:HIGH with 0 < LOW < HIGH") from cause
    return name, found


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """Returns the axes of a sweep.

    Raises:
        ValueError: one cannot be read, or they are too many, or make too many runs.
    """
    axes = [parse_axis(text) for text in texts]
    if len(axes) > 2 or len({name for name, _ in axes}) < len(axes):
        raise ValueError("one or two different settings can be swept")
    runs = math.prod(len(values) for _, values in axes)
    if runs > MOST_RUNS:
        raise ValueError(f"a sweep of {runs} runs is more than {MOST_RUNS}")
    return axes


def _between(low: Any, high: Any) -> Iterator[Any]:
    if not 0 < low < high:
        raise ValueError("LOW is above 0 and below HIGH")
    yield low
    power = math.floor(math.log10(low))
    while 10.0**power < high:
        for step in (1, 2, 5):
            value = type(low)(step * 10.0**power)
            if low < value < high:
                yield value
        power += 1
    yield high


def sweep(setting: Setting, axes: Sequence[Axis]) -> list[Simulated]:
    """Simulates a run for all values of one or two axes, the last one changing fastest."""
    found = [setting]
    for name, values in axes:
        found = [replace(one, **{name: value}) for one in found for value in values]
    return [outcome(one) for one in found]
