"""The pictures of `lazyshard watch`, by matplotlib, each for light and dark pages, as an SVG that is in the page."""

from __future__ import annotations

import base64
import io
from datetime import datetime, timezone
from typing import Any, Final, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lazyshard.cli.output import one_line
from lazyshard.inspection.inspection import History, rates
from lazyshard.inspection.row_facts import Lengths

SHARES: Final = (("median", 0.5, "-"), ("p90", 0.9, "--"), ("p99", 0.99, ":"))  # Of lengths: share not above
_BINS: Final = 60
_RATES: Final = 60
_NAME: Final = 24  # Characters of a consumer's name that are shown
_STYLE: Final[Any] = {
    **{"svg.fonttype": "path", "svg.hashsalt": "lazyshard", "font.size": 10, "font.family": "DejaVu Sans"},
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "legend.frameon": False},
    **{"axes.spines.top": False, "axes.spines.right": False},
}


class Colours(NamedTuple):
    """Of a page."""

    text: str
    line: str
    main: str
    other: str


LIGHT: Final = Colours(text="#3b434c", line="#d5dae0", main="#1d4fc4", other="#b36b00")
DARK: Final = Colours(text="#c3cad3", line="#343b45", main="#8db4ff", other="#e0a040")


class Picture(NamedTuple):
    """A picture, as addresses that hold it."""

    light: str
    dark: str


def draw(history: History) -> dict[str, Picture]:
    """Returns the pictures of what is known, by name: "course" and "lengths"; none of a stream that has no rows yet."""
    found, pictures = history.found, dict[str, list[str]]()
    if found is None:
        return {}
    course, (lengths, unit) = history.course, (found.lengths, "bytes")
    if found.tokens.count:
        lengths, unit = found.tokens, "tokens"
    for colours in (LIGHT, DARK):
        text = dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color", "legend.labelcolor"), colours.text)
        lines = dict.fromkeys(("axes.edgecolor", "grid.color"), colours.line)
        with mpl.rc_context(_STYLE | text | lines):
            if len(course) > 1 and course[-1].time > course[0].time:
                pictures.setdefault("course", []).append(_course(history, colours))
            if lengths.count:
                pictures.setdefault("lengths", []).append(_lengths(lengths, unit, colours))
    return {name: Picture(*drawn) for name, drawn in pictures.items()}


def _course(history: History, colours: Colours) -> str:
    figure = Figure(figsize=(5.8, 4.0), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    course, pace = history.course, rates(history.course, _RATES)
    times = [_moment(one.time) for one in course]
    upper.plot(times, [one.amount for one in course], color=colours.main, label="published")
    shown = [one for one in history.trained if course[0].time <= one.time]
    if shown:
        at, samples = [_moment(one.time) for one in shown], [one.samples for one in shown]
        label = "in the last checkpoint of a consumer"
        upper.plot(at, samples, linestyle="none", marker="o", color=colours.other, label=label)
    # Few enough that names do not lie on each other.
    for one in shown[:4]:
        name = one_line(one.name)
        name = name if len(name) <= _NAME else f"{name[:_NAME]}…"
        place: Any = {"xytext": (0, -8), "textcoords": "offset points", "ha": "right", "va": "top"}
        upper.annotate(name, (_moment(one.time), one.samples), color=colours.text, parse_math=False, **place)
    upper.set_ylabel("rows")
    edges = [one.time / 86400 for one in (course[0], *pace)]
    lower.stairs([one.amount for one in pace], edges, fill=True, color=colours.main, alpha=0.7)
    lower.set_ylabel("rows/s")
    locator = AutoDateLocator(maxticks=6)  # type: ignore[no-untyped-call, unused-ignore]
    lower.xaxis.set_major_locator(locator)
    form = ConciseDateFormatter(locator, tz=timezone.utc)  # type: ignore[no-untyped-call, unused-ignore]
    lower.xaxis.set_major_formatter(form)
    lower.set_xlabel("time (UTC)")
    for axes in (upper, lower):
        _from_zero(axes)
    if shown:
        upper.legend(loc="upper left")
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
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _from_zero(axes)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    return _address(figure)


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


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
