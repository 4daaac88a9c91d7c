"""Draws the pictures of docs/pictures. See scripts/draw_pictures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from scripts.pictures import draw_pictures_files, draw_pictures_plan

PICTURES: Final = {
    "flow.svg": draw_pictures_files.flow,
    "life.svg": draw_pictures_files.life,
    "rescaling.svg": draw_pictures_plan.rescaling,
    "stripes.svg": draw_pictures_plan.stripes,
    "watermark.svg": draw_pictures_plan.watermark,
    "windows.svg": draw_pictures_plan.windows,
}
"""Name of each file, and what draws it."""

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def main() -> int:
    """Writes every picture."""
    parser = argparse.ArgumentParser(prog="scripts/draw_pictures", description="Draws the pictures of docs/pictures.")
    parser.parse_args()
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print(f"docs/pictures/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
