"""A drawing as SVG text: boxes, lines and words, the same bytes for the same calls.

420 wide, so that words can be read on a phone, where it fills the width. It brings its own light background: pages are
shown light and dark, and a picture that is loaded as one does not learn which.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final, Literal

WIDTH: Final = 420
MARGIN: Final = 18

PAPER: Final = "#fbfbf8"
INK: Final = "#22262b"
FAINT: Final = "#646b73"
LINE: Final = "#c3c8ce"
EMPTY: Final = "#ffffff"
DONE: Final = "#e0e3e7"

RANKS: Final = ("#9fd0f5", "#f9c784", "#b5e3b0", "#e7b7e8", "#f3a9a0", "#d9d27a", "#9fdfd8", "#c5bdf2")
"""A colour for each rank, light enough for black text; the number in the box identifies it too."""


class Drawing:
    """Collects what is drawn; `text` is the file.

    Args:
        title: what the picture shows, for those who cannot see it.
        height: in the units of `WIDTH`.
    """

    def __init__(self, title: str, height: int) -> None:
        self._title = title
        self._height = height
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = EMPTY,
        *,
        line: str = LINE,
        dashed: bool = False,
    ) -> None:
        """Draws a box with its upper left corner at (x, y)."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"'
            f' fill="{fill}" stroke="{line}"{dashes}/>'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12,
        *,
        anchor: Literal["start", "middle", "end"] = "start",
        colour: str = INK,
        bold: bool = False,
        code: bool = False,
    ) -> None:
        """Writes one line whose base line is at y."""
        weight = ' font-weight="600"' if bold else ""
        family = ' font-family="ui-monospace, Menlo, Consolas, monospace"' if code else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{colour}"{weight}{family}>'
            f"{escape(text)}</text>"
        )

    def lines(self, x: float, y: float, texts: Sequence[str], size: float = 12, *, colour: str = FAINT) -> None:
        """Writes lines below each other."""
        for number, text in enumerate(texts):
            self.words(x, y + number * size * 1.35, text, size, colour=colour)

    def cell(self, x: float, y: float, size: float, text: str, fill: str) -> None:
        """Draws a square with a word in its middle."""
        self.box(x, y, size, size, fill)
        self.words(x + size / 2, y + size / 2 + 4, text, 11, anchor="middle")

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str = FAINT, *, arrow: bool = False) -> None:
        """Draws a straight line, with a head at its end if it is an arrow."""
        head = ' marker-end="url(#head)"' if arrow else ""
        self._parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" stroke-width="1.3"{head}/>'
        )

    @property
    def text(self) -> str:
        """The file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" role="img"'
                ' font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">',
                f"<title>{escape(self._title)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
                ' orient="auto">'
                f'<path d="M0 0 8 4 0 8z" fill="{FAINT}"/></marker></defs>',
                f'<rect width="{WIDTH}" height="{self._height}" rx="8" fill="{PAPER}"/>',
                *self._parts,
                "</svg>\n",
            ]
        )
