"""The pictures of `docs/pictures` are what `scripts/draw_pictures` draws, and show what the plan does."""

from typing import Final

from scripts.pictures.draw_pictures import PICTURES
from tests.packaging.test_import_directions import ROOT

FOLDER: Final = ROOT / "docs" / "pictures"


def test_committed_pictures_are_those_that_would_be_drawn() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
    pictures = {name: draw() for name, draw in PICTURES.items()}
    assert sorted(committed) == sorted(pictures)
    changed = [name for name, text in pictures.items() if committed[name] != text]
    assert not changed, f"run scripts/draw_pictures, and look at what has changed in {changed}"


def test_the_pages_show_every_picture() -> None:
    pages = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert [path.name for path in FOLDER.glob("*.svg") if f"](pictures/{path.name})" not in pages] == []
