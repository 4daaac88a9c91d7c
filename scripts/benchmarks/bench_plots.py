"""Pictures of the benchmarks' figures: horizontal bars, the best on top, each with its value; ours in a colour.

Needs matplotlib, the extra `plots`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.bench_figures import Figure, with_unit

OURS: Final = "#d95f02"
OTHERS: Final = "#9aa5b1"
_INK: Final = "#333333"
_BAR_INCHES: Final = 0.27
_TITLE_INCHES: Final = 0.4
_WIDTH_INCHES: Final = 9.0
_DPI: Final = 130
_ROOM: Final = 1.22
"""How far the axis goes beyond the longest bar, so that its label has room."""
_FLOOR_FROM: Final = 0.4
"""Where nothing is so much of the floor's speed, the floor is not drawn: the bars would be too short to compare."""
_MOST_BARS: Final = 30
"""Of a group; more cannot be read at a glance, so the rest is named in the title."""


class PlotMissing(Exception):
    """matplotlib is not installed."""


def groups_of(figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    """Returns the figures of each group, the best first."""
    groups: dict[str, list[Figure]] = {}
    for one in figures:
        groups.setdefault(one.group, []).append(one)
    return {
        group: sorted(ones, key=lambda one: -one.median if one.higher else one.median) for group, ones in groups.items()
    }


def _pyplot() -> Any:
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError as cause:
        raise PlotMissing("matplotlib is not installed: .venv/bin/pip install '.[plots]'") from cause
    # Files only: no screen is needed.
    matplotlib.use("Agg")
    # Text stays text in SVG, and the same figures give the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "lazyshard", "font.size": 9}
    return importlib.import_module("matplotlib.pyplot")


def _draw(axes: Any, group: str, figures: Sequence[Figure]) -> None:
    shown = figures[:_MOST_BARS]
    more = f" (the best {_MOST_BARS} of {len(figures)})" if len(figures) > len(shown) else ""
    first = shown[0]
    highest = max(max(one.values) for one in shown)
    with_floor = first.unit == "x" and highest > _FLOOR_FROM
    better = "more is better" if first.higher else "less is better"
    if first.unit == "x" and not with_floor:
        better += "; the floor is far beyond, at 1x"
    axes.set_title(f"{group}{more}", loc="left", fontsize=10, fontweight="bold", color=_INK)
    axes.set_title(better, loc="right", fontsize=8, color=_INK)
    places = range(len(shown))
    axes.barh(places, [one.median for one in shown], color=[OURS if one.ours else OTHERS for one in shown], height=0.72)
    longest = max(highest, 1.0) if with_floor else highest
    for place, one in zip(places, shown, strict=True):
        low, high = min(one.values), max(one.values)
        if high > low:
            axes.plot([low, high], [place, place], color=_INK, linewidth=1)
        label = with_unit(one.median, one.unit)
        axes.text(high + 0.01 * longest, place, label, va="center", fontsize=8.5, color=_INK)
    if with_floor:
        axes.axvline(1.0, color=_INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(list(places), [one.name for one in shown])
    for label, one in zip(axes.get_yticklabels(), shown, strict=True):
        label.set_fontweight("bold" if one.ours else "normal")
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(min([0.0, *(min(one.values) for one in shown)]), longest * _ROOM or 1.0)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)


def draw(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Draws a picture for each `Figure.plot`, as PNG and SVG; returns the files.

    Raises:
        PlotMissing: see there.
    """
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for plot in dict.fromkeys(one.plot for one in figures):
        groups = groups_of([one for one in figures if one.plot == plot])
        bars = [min(len(ones), _MOST_BARS) for ones in groups.values()]
        picture, panels = pyplot.subplots(
            len(groups),
            1,
            squeeze=False,
            figsize=(_WIDTH_INCHES, _TITLE_INCHES * len(groups) + _BAR_INCHES * sum(bars)),
            height_ratios=bars,
            layout="constrained",
        )
        for axes, (group, ones) in zip(panels[:, 0], groups.items(), strict=True):
            _draw(axes, group, ones)
        for kind in ("png", "svg"):
            files.append(folder / f"{plot}.{kind}")
            picture.savefig(files[-1], dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
        pyplot.close(picture)
    return files
