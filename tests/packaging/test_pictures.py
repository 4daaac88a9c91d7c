"""The pictures of `docs/pictures` are what `scripts/draw_pictures` draws, and show what the plan does."""

from __future__ import annotations

from typing import Final
from xml.etree import ElementTree

import pytest

from scripts.pictures.draw_pictures import PICTURES
from tests.packaging.test_import_directions import ROOT

FOLDER: Final = ROOT / "docs" / "pictures"
WIDTH: Final = 420
LETTER: Final = 0.53
LETTER_OF_CODE: Final = 0.61
"""How wide letters are on average, by their size, in DejaVu Sans and its monospaced sister, wide ones of their kind."""


def test_committed_pictures_are_those_that_would_be_drawn() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
    pictures = {name: draw() for name, draw in PICTURES.items()}
    assert sorted(committed) == sorted(pictures)
    changed = [name for name, text in pictures.items() if committed[name] != text]
    assert not changed, f"run scripts/draw_pictures, and look at what has changed in {changed}"


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.svg")))
def test_words_stay_inside_their_picture(name: str) -> None:
    root = ElementTree.fromstring((FOLDER / name).read_text(encoding="utf-8"))  # noqa: S314
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    texts = root.findall("{http://www.w3.org/2000/svg}text")
    assert width == WIDTH and len(texts) >= 10
    for text in texts:
        size, x = float(text.attrib["font-size"]), float(text.attrib["x"])
        half = len(text.text or "") * size * (LETTER_OF_CODE if "font-family" in text.attrib else LETTER) / 2
        left = {"start": x, "middle": x - half, "end": x - 2 * half}[text.attrib["text-anchor"]]
        assert left >= 0 and left + 2 * half <= width, (text.text, left + 2 * half)
        assert size >= 11, "too small for a phone"
        assert float(text.attrib["y"]) < height - 4, text.text


def test_the_pages_show_every_picture() -> None:
    pages = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert [path.name for path in FOLDER.glob("*.svg") if f"](pictures/{path.name})" not in pages] == []
