"""Pictures of amounts for a report: columns, bars, and a band of parts, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lazyshard.cli.report_svg import (
    CHARACTER,
    HEIGHT,
    INNER,
    LEFT,
    PLOT,
    TOP,
    WIDTH,
    cut,
    escape,
    grid,
    short,
    svg,
    text_at,
    ticks,
)

__all__ = ["Bar", "Mark", "band", "bars", "columns"]


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


def columns(counts: Sequence[int], edges: Sequence[int], marks: Sequence[Mark], label: str) -> str:
    """Returns a column for each bin; bins are drawn equally wide, whatever they span.

    Args:
        counts: of the bins, shape (n,).
        edges: of the bins, shape (n + 1,), rising.
        marks: values to be marked.
        label: what the picture shows, for those who cannot see it.
    """
    scale = ticks(max(counts, default=0))
    width = INNER / max(1, len(counts))
    parts = grid(scale, short)
    for index, number in enumerate(counts):
        height = number / scale[-1] * PLOT
        if number:
            height = max(height, 1)
        title = f"{edges[index]:,} to {edges[index + 1] - 1:,}: {number:,}"
        parts.append(
            f'<rect class="a" x="{LEFT + index * width + 1:.1f}" y="{TOP + PLOT - height:.1f}" '
            f'width="{max(1, width - 2):.1f}" height="{height:.1f}"><title>{escape(title)}</title></rect>'
        )
    every = max(1, math.ceil(40 / width))
    for index, edge in enumerate(edges):
        if index % every == 0:
            parts.append(text_at(LEFT + index * width, HEIGHT - 10, short(edge), "middle"))
    for number, mark in enumerate(marks):
        x = LEFT + _place(mark.value, edges) * width
        anchor, shift = ("start", 3) if x + len(mark.name) * CHARACTER < WIDTH else ("end", -3)
        y = TOP + 10 + number * 13
        parts.append(f'<line class="mark" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + PLOT}"/>')
        parts.append(text_at(x + shift, y, mark.name, anchor, "halo"))
    return svg(HEIGHT, parts, label)


def bars(rows: Sequence[Bar], label: str, mark: float | None = None) -> str:
    """Returns horizontal bars, each with its label above.

    Args:
        rows: the bars.
        label: what the picture shows.
        mark: a value to be marked in each of them.
    """
    most = max([*(row.value for row in rows), mark or 0], default=0) or 1
    beside = max((len(row.text) for row in rows), default=0) * CHARACTER + 14
    room = WIDTH - beside - 2
    parts: list[str] = []
    for index, row in enumerate(rows):
        y = index * 36
        width = max(1.5, row.value / most * room)
        parts.append(text_at(1, y + 12, cut(row.label, int(WIDTH / CHARACTER)), "start"))
        parts.append(
            f'<rect class="{row.kind}" x="1" y="{y + 17}" width="{width:.1f}" height="12">'
            f"<title>{escape(row.label)}: {escape(row.text)}</title></rect>"
        )
        parts.append(text_at(width + 7, y + 27, row.text, "start", "value"))
        if mark is not None:
            x = 1 + mark / most * room
            parts.append(f'<line class="over" x1="{x:.1f}" y1="{y + 17}" x2="{x:.1f}" y2="{y + 29}"/>')
    return svg(max(1, len(rows)) * 36, parts, label)


def band(parts: Sequence[tuple[float, str, str]], label: str) -> str:
    """Returns parts of a whole, side by side.

    Args:
        parts: for each its share of the whole, its class, and what is told of it; none becomes invisible.
        label: what the picture shows.
    """
    total = sum(share for share, _, _ in parts) or 1
    drawn, x = [], 1.0
    for share, kind, told in parts:
        width = max(2.0, share / total * (WIDTH - 2))
        title = f"<title>{escape(told)}</title>"
        drawn.append(f'<rect class="{kind}" x="{x:.1f}" y="1" width="{width:.1f}" height="24">{title}</rect>')
        x += width
    # Parts that were widened to be seen push the others on: all of it is drawn together again.
    return svg(26, [f'<g transform="scale({(WIDTH - 1) / max(x, WIDTH - 1):.4f} 1)">', *drawn, "</g>"], label)


def _place(value: float, edges: Sequence[int]) -> float:
    """Returns where a value lies among bins of equal width, in bins."""
    for index in range(len(edges) - 1):
        if value < edges[index + 1]:
            return index + max(0.0, (value - edges[index]) / (edges[index + 1] - edges[index]))
    return len(edges) - 1.0
