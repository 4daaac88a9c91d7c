"""What all pictures of a report are made of: sizes, text, grids, and the SVG around them.

Colours are classes, which the page's style sheet fills for light and dark. Widths and heights are in units of the
picture, which is drawn as wide as there is room. All text is escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Final

from lazyshard.cli.output import one_line

WIDTH: Final = 420
HEIGHT: Final = 190
LEFT: Final = 46
RIGHT: Final = 12
TOP: Final = 14
BOTTOM: Final = 26
INNER: Final = WIDTH - LEFT - RIGHT
"""Width of what lies between the margins."""

PLOT: Final = HEIGHT - TOP - BOTTOM
"""Height of the same."""

CHARACTER: Final = 7.0
"""Width of a character, about."""

Number = Callable[[float], str]


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


def grid(scale: Sequence[float], number: Number) -> list[str]:
    """Returns a line across the picture for each value, with the value beside it; the last is at the top."""
    parts = []
    for value in scale:
        y = TOP + PLOT - value / scale[-1] * PLOT
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(text_at(LEFT - 5, y + 4, number(value), "end"))
    return parts


def cut(text: str, most: int) -> str:
    """Returns a text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def text_at(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    """Returns a text, which starts, ends or has its middle at x."""
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def svg(height: float, parts: Sequence[str], label: str) -> str:
    """Returns a picture of its parts, with what it shows for those who cannot see it."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{''.join(parts)}</svg>"
    )
