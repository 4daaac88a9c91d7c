"""Pictures of a simulated run and of a sweep. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.simulation.simulate_report import Outcome
from scripts.simulation.simulate_sweep import Axis

_POINTS: Final = 1000
_DPI: Final = 120
_PANELS: Final[tuple[tuple[str, Callable[[dict[str, Any]], float], bool], ...]] = (
    ("stalled, % of the time", lambda one: 100 * float(one["stall_share"]), False),
    ("first step after, s", lambda one: float(one["first_step_s"]), True),
    ("disk peak, GB", lambda one: one["peak_bytes"] / 1e9, True),
    ("metadata operations a second", lambda one: float(one["metadata_a_second"]), True),
    ("drawn in turn, rows apart in the stream", lambda one: float(one["in_turn_distance"]), True),
    ("a global batch in the stream, rows apart", lambda one: float(one["batch_distance"] or 0), True),
)


class PlotMissing(Exception):
    """matplotlib is not installed."""


def _pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as cause:
        raise PlotMissing("--plot needs matplotlib, which is not installed: pip install '.[plots]'") from cause
    # Files only: no screen is needed.
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def plot_run(found: Outcome, folder: Path) -> Path:
    """Draws backlog and waits over time; returns the file.

    Raises:
        PlotMissing, OSError: see there.
    """
    pyplot, timeline = _pyplot(), found.timeline
    times = np.linspace(0.0, timeline.end_s, _POINTS)
    published, trained = timeline.published_rows(times), timeline.trained(times)
    waited = np.concatenate(([0.0], np.cumsum(timeline.waits)))[np.searchsorted(timeline.began, times, side="right")]
    figure, (upper, middle, lower) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 8), layout="constrained")
    upper.plot(times, published, label="published")
    upper.plot(times, trained, label="trained")
    upper.set_ylabel("rows")
    upper.legend()
    upper.set_title(
        f"{found.setting.ranks:,} ranks, {found.setting.samples_per_chunk:,} rows a chunk, window "
        f"{found.setting.window}: limited by {found.limited_by}, {timeline.stall_share:.1%} stalled"
    )
    middle.fill_between(times, published - trained, alpha=0.5)
    middle.set_ylabel("backlog: published,\nnot trained, rows")
    lower.plot(times, waited)
    lower.set_ylabel("waited so far, s")
    lower.set_xlabel("seconds since the training began")
    return _save(pyplot, figure, folder / "run.png")


def plot_sweep(axes: Sequence[Axis], found: Sequence[Outcome], folder: Path) -> Path:
    """Draws a sweep: the first axis to the right, a line for each value of the second; returns the file.

    Raises:
        PlotMissing, OSError: see there.
    """
    pyplot = _pyplot()
    (name, values), others = axes[0], axes[1][1] if len(axes) > 1 else [None]
    figures = [one.figures() for one in found]
    figure, panels = pyplot.subplots(2, 3, figsize=(14, 8), layout="constrained")
    for panel, (title, value, logarithmic) in zip(panels.ravel(), _PANELS, strict=True):
        for number, other in enumerate(others):
            label = None if other is None else f"{axes[1][0]} {other:,}"
            panel.plot(values, [value(one) for one in figures[number :: len(others)]], marker="o", label=label)
        panel.set_title(title)
        panel.set_xlabel(name)
        if min(values) > 0 and max(values) >= 10 * min(values):
            panel.set_xscale("log")
        if logarithmic and all(value(one) > 0 for one in figures):
            panel.set_yscale("log")
        panel.grid(alpha=0.3)
    if len(axes) > 1:
        panels.ravel()[0].legend()
    return _save(pyplot, figure, folder / "sweep.png")


def _save(pyplot: Any, figure: Any, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=_DPI)
    pyplot.close(figure)
    return file
