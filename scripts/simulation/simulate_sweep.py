"""Sweeps: the same run with other values of one or two of its settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from scripts.simulation.simulate_report import Outcome, outcome
from scripts.simulation.simulate_setting import Setting

NUMBERS: Final[dict[str, Callable[[str], Any]]] = {
    "samples_per_chunk": int,
    "window": int,
    "ranks": int,
    "batch": int,
    "workers": int,
    "head_start": int,
    "checkpoint_steps": int,
    "step_seconds": float,
    "producer_rate": float,
}
"""What can be swept, and what its values are."""

MOST: Final = 400
"""Runs of a sweep."""

_STEPS: Final = (1, 2, 5)

Axis = tuple[str, list[Any]]


def parse_axis(text: str) -> Axis:
    """Returns name and values of ``name=1,2,4`` or ``name=100:10000``: both ends, and 1, 2, 5, 10, ... between.

    >>> parse_axis("samples_per_chunk=100:1500")
    ('samples_per_chunk', [100, 200, 500, 1000, 1500])

    Raises:
        ValueError: it is neither; says why.
    """
    name, _, values = text.partition("=")
    name = name.replace("-", "_")
    if name not in NUMBERS:
        raise ValueError(f"{name!r} cannot be swept; one of {', '.join(NUMBERS)} can")
    number = NUMBERS[name]
    try:
        if ":" in values:
            low, high = map(number, values.split(":"))
            found = list(_between(low, high))
        else:
            found = [number(value) for value in values.split(",")]
    except (ValueError, OverflowError) as cause:
        raise ValueError(f"{text!r}: NAME=LOW:HIGH or NAME=VALUE,VALUE,... is needed, with numbers above 0") from cause
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
    if runs > MOST:
        raise ValueError(f"a sweep of {runs} runs is more than {MOST}")
    return axes


def _between(low: Any, high: Any) -> Iterator[Any]:
    if not 0 < low < high:
        raise ValueError("LOW is above 0 and below HIGH")
    yield low
    power = math.floor(math.log10(low))
    while 10.0**power < high:
        for step in _STEPS:
            value = type(low)(step * 10.0**power)
            if low < value < high:
                yield value
        power += 1
    yield high


def sweep(setting: Setting, axes: Sequence[Axis]) -> list[Outcome]:
    """Simulates a run for all values of one or two axes, the last one changing fastest."""
    found = [setting]
    for name, values in axes:
        found = [replace(one, **{name: value}) for one in found for value in values]
    return [outcome(one) for one in found]


def lines(axes: Sequence[Axis], found: Sequence[Outcome]) -> list[str]:
    """Returns a table, a line for each run."""
    heads = ["first step", "stalled", "later waits", "disk peak", "metadata", "in turn", "batch"]
    units = ["s", "share", "s", "GB", "a second", "rows", "rows"]
    names = [name for name, _ in axes]
    rows = [[*names, *heads], ["" for _ in names] + units]
    for one in found:
        figures = one.figures()
        batch = figures["batch_distance"]
        rows.append(
            [f"{figures[name]:,}" for name in names]
            + [
                f"{figures['first_step_s']:,.1f}",
                f"{figures['stall_share']:.1%}",
                f"{figures['longest_wait_s']:,.1f}",
                f"{figures['peak_bytes'] / 1e9:,.2f}",
                f"{figures['metadata_a_second']:,.1f}",
                f"{figures['in_turn_distance']:,.0f}",
                "-" if batch is None else f"{batch:,.0f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
