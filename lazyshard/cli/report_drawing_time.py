"""Pictures over time for a report: lines, and lanes with stretches. Times are seconds since 1970, shown in UTC."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Final, NamedTuple

from lazyshard.cli.report_svg import (
    HEIGHT,
    INNER,
    LEFT,
    PLOT,
    TOP,
    WIDTH,
    Number,
    cut,
    escape,
    grid,
    short,
    svg,
    text_at,
    ticks,
)

__all__ = ["Line", "lanes", "lines", "moment_tick"]

_DAY_S: Final = 86400.0


class Line(NamedTuple):
    """Points over time, in order of it; joined, or where they are few and far apart also dotted; and their class."""

    points: Sequence[tuple[float, float]]
    kind: str = "a"
    dots: bool = False


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
    parts = grid(scale, number) + _times(start, stop)
    for one in series:
        placed = [(_x(time, start, stop), TOP + PLOT - value / scale[-1] * PLOT) for time, value in one.points]
        if len(placed) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline class="{one.kind}" points="{path}"/>')
        if one.dots or len(placed) == 1:
            parts += [f'<circle class="{one.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed]
    return svg(HEIGHT, parts, label)


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
        parts.append(text_at(LEFT - 40, y + 12, cut(name, 60), "start"))
        parts.append(f'<rect class="empty" x="6" y="{y + 17}" width="{WIDTH - 12}" height="11"/>')
        for start, stop, kind, told in stretches:
            x, end = (6 + _share(time, first, last) * (WIDTH - 12) for time in (start, stop))
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
        parts.append(text_at(6 + share * (WIDTH - 12), height + 14, text, anchor))
    return svg(height + 22, parts, label)


def moment_tick(seconds: float, span: float) -> str:
    """Returns a time under an axis of so many seconds, in UTC.

    >>> moment_tick(1700000000, 60), moment_tick(1700000000, 7200), moment_tick(1700000000, 1e6)
    ('22:13:20', '22:13', 'Nov 14')
    >>> moment_tick(1700000000.25, 2)
    '13:20.25'
    """
    form = "%M:%S.%f" if span < 5 else "%H:%M:%S" if span < 600 else "%H:%M" if span < 2 * _DAY_S else "%b %d"
    try:
        text = datetime.fromtimestamp(seconds, timezone.utc).strftime(form)
        return text[:-4] if span < 5 else text
    except (OverflowError, OSError, ValueError):
        return "?"


def _times(start: float, stop: float) -> list[str]:
    shares = ((0.0, "start"), (0.5, "middle"), (1.0, "end")) if stop > start else ((0.5, "middle"),)
    return [
        text_at(LEFT + share * INNER, HEIGHT - 10, moment_tick(start + share * (stop - start), stop - start), anchor)
        for share, anchor in shares
    ]


def _x(time: float, start: float, stop: float) -> float:
    return LEFT + _share(time, start, stop) * INNER


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5
