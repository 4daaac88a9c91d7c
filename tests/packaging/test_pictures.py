"""The pictures of `docs/pictures` are what `scripts/draw_pictures` draws, and show what the plan does."""

from __future__ import annotations

import re
from typing import Final
from xml.etree import ElementTree

import pytest

from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from scripts.pictures.draw_pictures import PICTURES
from tests.packaging.test_import_directions import ROOT

FOLDER: Final = ROOT / "docs" / "pictures"
WIDTH: Final = 420
LETTER: Final = 0.53
LETTER_OF_CODE: Final = 0.61
"""How wide letters are on average, by their size, in DejaVu Sans and its monospaced sister, wide ones of their kind."""


def drawn() -> dict[str, str]:
    return {name: draw() for name, draw in PICTURES.items()}


def test_committed_pictures_are_those_that_would_be_drawn() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
    pictures = drawn()
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


def test_the_ranks_in_the_picture_of_rescaling_train_what_is_drawn() -> None:
    # By hand: after 3 draws of 8 ranks, chunks of 2, the open stripe still holds 17, 19, ... 31; rank 2's first new
    # chunk is 36, 37.
    six = Course(Rules(unit=2), [Part(8, draws=3), Part(6)])
    first = [[six.draw(lane, position, None).sample for position in range(2)] for lane in range(6)]
    assert first == [[17, 19], [21, 23], [25, 36], [27, 38], [29, 40], [31, 42]]
    picture = (FOLDER / "rescaling.svg").read_text(encoding="utf-8")
    lower = picture.partition("6 ranks, from the cursor on")[2]
    assert "".join(re.findall(r">(\d)</text>", lower))[:20] == "00112345" + "001122334455"


def test_the_pages_show_every_picture() -> None:
    pages = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert [path.name for path in FOLDER.glob("*.svg") if f"](pictures/{path.name})" not in pages] == []
