"""The pictures of `lazyshard watch`, by matplotlib: rows published over time, and how long rows are.

Each is drawn twice, for light and dark pages, as an SVG that stands in the page itself.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lazyshard.cli.output import one_line
from lazyshard.inspection.history import History, rates
from lazyshard.inspection.row_facts import Lengths

SHARES: Final = (("median", 0.5, "-"), ("p90", 0.9, "--"), ("p99", 0.99, ":"))
"""Of lengths: name, share that is not longer, line."""

_BINS: Final = 60
_RATES: Final = 60
_NAME: Final = 24
"""Characters of a consumer's name that are shown."""

_STYLE: Final[Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "lazyshard",
    "font.size": 10,
    "font.family": "DejaVu Sans",
}


@dataclass(frozen=True, slots=True)
class Colours:
    """Of a page."""

    text: str
    line: str
    main: str
    other: str


LIGHT: Final = Colours(text="#3b434c", line="#d5dae0", main="#1d4fc4", other="#b36b00")
DARK: Final = Colours(text="#c3cad3", line="#343b45", main="#8db4ff", other="#e0a040")


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture, as addresses that hold it."""

    light: str
    dark: str


def draw(history: History) -> dict[str, Picture]:
    """Returns the pictures of what is known, by name: "course" and "lengths"; none of a stream that has no rows yet."""
    found = history.found
    pictures: dict[str, Picture] = {}
    if found is None:
        return pictures
    with mpl.rc_context(_STYLE):
        if len(history.course) > 1 and history.course[-1].time > history.course[0].time:
            pictures["course"] = Picture(*(_course(history, colours) for colours in (LIGHT, DARK)))
        lengths, unit = (found.tokens, "tokens") if found.tokens.count else (found.lengths, "bytes")
        if lengths.count:
            pictures["lengths"] = Picture(*(_lengths(lengths, unit, colours) for colours in (LIGHT, DARK)))
    return pictures


def _course(history: History, colours: Colours) -> str:
    figure = Figure(figsize=(5.8, 4.0), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    course, pace = history.course, rates(history.course, _RATES)
    times = [_moment(one.time) for one in course]
    upper.plot(times, [one.amount for one in course], color=colours.main, label="published")
    shown = [one for one in history.trained if course[0].time <= one.time]
    if shown:
        upper.plot(
            [_moment(one.time) for one in shown],
            [one.samples for one in shown],
            linestyle="none",
            marker="o",
            color=colours.other,
            label="in the last checkpoint of a consumer",
        )
    # Few enough that names do not lie on each other.
    for one in shown[:4]:
        name = one_line(one.name)
        upper.annotate(
            name if len(name) <= _NAME else f"{name[:_NAME]}…",
            (_moment(one.time), one.samples),
            xytext=(0, -8),
            textcoords="offset points",
            ha="right",
            va="top",
            color=colours.text,
            parse_math=False,
        )
    upper.set_ylabel("rows")
    lower.stairs(
        [one.amount for one in pace],
        [course[0].time / 86400, *(one.time / 86400 for one in pace)],
        fill=True,
        color=colours.main,
        alpha=0.7,
    )
    lower.set_ylabel("rows/s")
    locator = AutoDateLocator(maxticks=6)  # type: ignore[no-untyped-call, unused-ignore]
    lower.xaxis.set_major_locator(locator)
    form = ConciseDateFormatter(locator, tz=timezone.utc)  # type: ignore[no-untyped-call, unused-ignore]
    lower.xaxis.set_major_formatter(form)
    lower.set_xlabel("time (UTC)")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        _dress(axes, colours)
    if shown:
        upper.legend(loc="upper left", frameon=False, labelcolor=colours.text)
    return _address(figure)


def _lengths(lengths: Lengths, unit: str, colours: Colours) -> str:
    figure = Figure(figsize=(5.8, 3.3), layout="constrained")
    axes = figure.subplots()
    bins = lengths.spread(_BINS)
    edges = [bins[0].low, *(one.high for one in bins)]
    axes.stairs([one.count for one in bins], edges, fill=True, color=colours.main, alpha=0.7)
    for name, share, line in SHARES:
        at = lengths.quantile(share)
        axes.axvline(at, color=colours.other, linewidth=1.2, linestyle=line, label=f"{name} {at:,}")
    axes.set_xlabel(f"row length in {unit}")
    axes.set_ylabel("rows looked at")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _dress(axes, colours)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, labelcolor=colours.text)
    return _address(figure)


def _dress(axes: Axes, colours: Colours) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.grid(axis="y", color=colours.line, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=colours.text, which="both")
    for part in (axes.xaxis.label, axes.yaxis.label, axes.xaxis.get_offset_text(), axes.yaxis.get_offset_text()):
        part.set_color(colours.text)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(colours.line)


def short(value: float) -> str:
    """Returns an amount at the side of a picture, such as 0.25, 900, 12.5k and 3M."""
    for unit, one in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= one:
            return f"{value / one:g}{unit}"
    return f"{value:g}"


def _moment(seconds: float) -> Any:
    return datetime.fromtimestamp(seconds, timezone.utc)


def _address(figure: Figure) -> str:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}"
