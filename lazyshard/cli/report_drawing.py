"""Pictures for a report, as SVG text: columns, bars, lines over time, lanes over time, and a band of parts.

Colours are classes, which the page's style sheet fills for light and dark. Widths and heights are in units of the
picture, which is drawn as wide as there is room. All text is escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Final, NamedTuple

from lazyshard.cli.wording import one_line

__all__ = ["Bar", "Line", "Mark", "band", "bars", "columns", "escape", "lanes", "lines", "short", "ticks"]

_WIDTH: Final = 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 14, 26
_HEIGHT: Final = 190
_INNER: Final = _WIDTH - _LEFT - _RIGHT
_PLOT: Final = _HEIGHT - _TOP - _BOTTOM

_CHARACTER: Final = 6.2
"""Width of a character, about."""

_DAY_S: Final = 86400.0

Number = Callable[[float], str]


class Mark(NamedTuple):
    """A line across a picture at a value, with its name."""

    value: float
    name: str


class Bar(NamedTuple):
    """A horizontal bar: what is over it, how long it is, what is beside it, and its class."""

    label: str
    value: float
    text: str
    kind: str = "a"


class Line(NamedTuple):
    """Points over time, in order of it; joined, or where they are few and far apart also dotted; and their class."""

    points: Sequence[tuple[float, float]]
    kind: str = "a"
    dots: bool = False


def escape(text: object) -> str:
    r"""Returns a text as HTML, without characters that are not seen or turn the direction of writing.

    >>> escape("a<b & \u202e")
    'a&lt;b &amp; \\u202e'
    """
    return html.escape(one_line(str(text)))


def short(value: float) -> str:
    """Returns an amount with few characters.

    >>> short(0), short(2.5), short(1500), short(12_000_000), short(3.2e9), short(0.05)
    ('0', '2.5', '1.5k', '12M', '3.2G', '0.05')
    """
    for unit, one in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= one:
            return f"{value / one:.3g}{unit}"
    return f"{value:.3g}"


def ticks(highest: float, most: int = 4) -> list[float]:
    """Returns round values from 0 to the first that is not below the highest.

    >>> ticks(7), ticks(950), ticks(0)
    ([0.0, 2.0, 4.0, 6.0, 8.0], [0.0, 500.0, 1000.0], [0.0, 1.0])
    """
    if not highest > 0 or not math.isfinite(highest):
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / most))
    step = next(one * power for one in (1, 2, 5, 10) if one * power * most >= highest)
    return [index * step for index in range(math.ceil(highest / step - 1e-9) + 1)]


def columns(counts: Sequence[int], edges: Sequence[int], marks: Sequence[Mark], label: str) -> str:
    """Returns a column for each bin; bins are drawn equally wide, whatever they span.

    Args:
        counts: of the bins, shape (n,).
        edges: of the bins, shape (n + 1,), rising.
        marks: values to be marked.
        label: what the picture shows, for those who cannot see it.
    """
    scale = ticks(max(counts, default=0))
    width = _INNER / max(1, len(counts))
    parts = _grid(scale, short)
    for index, number in enumerate(counts):
        height = number / scale[-1] * _PLOT
        if number:
            height = max(height, 1)
        title = f"{edges[index]:,} to {edges[index + 1] - 1:,}: {number:,}"
        parts.append(
            f'<rect class="a" x="{_LEFT + index * width + 1:.1f}" y="{_TOP + _PLOT - height:.1f}" '
            f'width="{max(1, width - 2):.1f}" height="{height:.1f}"><title>{escape(title)}</title></rect>'
        )
    every = max(1, math.ceil(40 / width))
    for index, edge in enumerate(edges):
        if index % every == 0:
            parts.append(_text(_LEFT + index * width, _HEIGHT - 10, short(edge), "middle"))
    for number, mark in enumerate(marks):
        x = _LEFT + _place(mark.value, edges) * width
        anchor, shift = ("end", -3) if x > _WIDTH * 0.7 else ("start", 3)
        y = _TOP + 10 + number * 13
        parts.append(f'<line class="mark" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_TOP + _PLOT}"/>')
        parts.append(_text(x + shift, y, mark.name, anchor, "halo"))
    return _svg(_HEIGHT, parts, label)


def bars(rows: Sequence[Bar], label: str, mark: float | None = None) -> str:
    """Returns horizontal bars, each with its label above.

    Args:
        rows: the bars.
        label: what the picture shows.
        mark: a value to be marked across all of them.
    """
    most = max([*(row.value for row in rows), mark or 0], default=0) or 1
    beside = max((len(row.text) for row in rows), default=0) * _CHARACTER + 14
    room = _WIDTH - beside - 2
    parts: list[str] = []
    for index, row in enumerate(rows):
        y = index * 36
        width = max(1.5, row.value / most * room)
        parts.append(_text(1, y + 12, _cut(row.label, int(_WIDTH / _CHARACTER)), "start"))
        parts.append(
            f'<rect class="{row.kind}" x="1" y="{y + 17}" width="{width:.1f}" height="12">'
            f"<title>{escape(row.label)}: {escape(row.text)}</title></rect>"
        )
        parts.append(_text(width + 7, y + 27, row.text, "start", "value"))
    height = max(1, len(rows)) * 36
    if mark is not None:
        x = 1 + mark / most * room
        parts.append(f'<line class="mark" x1="{x:.1f}" y1="15" x2="{x:.1f}" y2="{height - 4}"/>')
    return _svg(height, parts, label)


def lines(series: Sequence[Line], label: str, number: Number = short) -> str:
    """Returns lines over time, from 0 on.

    Args:
        series: the lines, at least one with a point.
        label: what the picture shows.
        number: writes an amount at the side.
    """
    points = [point for one in series for point in one.points]
    start, stop = min(time for time, _ in points), max(time for time, _ in points)
    scale = ticks(max(value for _, value in points))
    parts = _grid(scale, number) + _times(start, stop)
    for one in series:
        placed = [(_x(time, start, stop), _TOP + _PLOT - value / scale[-1] * _PLOT) for time, value in one.points]
        if len(placed) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline class="{one.kind}" points="{path}"/>')
        if one.dots or len(placed) == 1:
            parts += [f'<circle class="{one.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed]
    return _svg(_HEIGHT, parts, label)


def lanes(rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]], label: str) -> str:
    """Returns lanes over time, each with stretches.

    Args:
        rows: for each lane its name, and its stretches as start, stop, class and what is told of it; one whose start is
            its stop is drawn as a dot.
        label: what the picture shows.
    """
    times = [time for _, stretches in rows for start, stop, _, _ in stretches for time in (start, stop)]
    first, last = min(times, default=0.0), max(times, default=1.0)
    height = len(rows) * 34
    parts: list[str] = []
    for index, (name, stretches) in enumerate(rows):
        y = index * 34
        parts.append(_text(_LEFT - 40, y + 12, _cut(name, 60), "start"))
        parts.append(f'<rect class="empty" x="6" y="{y + 17}" width="{_WIDTH - 12}" height="11"/>')
        for start, stop, kind, told in stretches:
            x, end = (6 + _share(time, first, last) * (_WIDTH - 12) for time in (start, stop))
            title = f"<title>{escape(told)}</title>"
            if start == stop:
                parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y + 22.5}" r="4">{title}</circle>')
            else:
                width = max(1.5, end - x)
                parts.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{y + 17}" width="{width:.1f}" height="11">{title}</rect>'
                )
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        text = moment_tick(first + share * (last - first), last - first)
        parts.append(_text(6 + share * (_WIDTH - 12), height + 14, text, anchor))
    return _svg(height + 22, parts, label)


def band(parts: Sequence[tuple[float, str, str]], label: str) -> str:
    """Returns parts of a whole, side by side.

    Args:
        parts: for each its share of the whole, its class, and what is told of it; none becomes invisible.
        label: what the picture shows.
    """
    total = sum(share for share, _, _ in parts) or 1
    drawn, x = [], 1.0
    for share, kind, told in parts:
        width = max(2.0, share / total * (_WIDTH - 2))
        title = f"<title>{escape(told)}</title>"
        drawn.append(f'<rect class="{kind}" x="{x:.1f}" y="1" width="{width:.1f}" height="24">{title}</rect>')
        x += width
    # Parts that were widened to be seen push the others on: all of it is drawn together again.
    return _svg(26, [f'<g transform="scale({(_WIDTH - 1) / max(x, _WIDTH - 1):.4f} 1)">', *drawn, "</g>"], label)


def moment_tick(seconds: float, span: float) -> str:
    """Returns a time under an axis of so many seconds, in UTC.

    >>> moment_tick(1700000000, 60), moment_tick(1700000000, 7200), moment_tick(1700000000, 1e6)
    ('22:13:20', '22:13', 'Nov 14')
    """
    form = "%H:%M:%S" if span < 600 else "%H:%M" if span < 2 * _DAY_S else "%b %d"
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime(form)
    except (OverflowError, OSError, ValueError):
        return "?"


def _grid(scale: Sequence[float], number: Number) -> list[str]:
    parts = []
    for value in scale:
        y = _TOP + _PLOT - value / scale[-1] * _PLOT
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 5, y + 4, number(value), "end"))
    return parts


def _times(start: float, stop: float) -> list[str]:
    shares = ((0.0, "start"), (0.5, "middle"), (1.0, "end")) if stop > start else ((0.5, "middle"),)
    return [
        _text(_LEFT + share * _INNER, _HEIGHT - 10, moment_tick(start + share * (stop - start), stop - start), anchor)
        for share, anchor in shares
    ]


def _x(time: float, start: float, stop: float) -> float:
    return _LEFT + _share(time, start, stop) * _INNER


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _place(value: float, edges: Sequence[int]) -> float:
    """Returns where a value lies among bins of equal width, in bins."""
    for index in range(len(edges) - 1):
        if value < edges[index + 1]:
            return index + max(0.0, (value - edges[index]) / (edges[index + 1] - edges[index]))
    return len(edges) - 1.0


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{''.join(parts)}</svg>"
    )
