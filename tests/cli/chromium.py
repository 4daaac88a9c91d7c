"""A real browser without a screen: what it shows of a page, as a document and as a picture.

Pictures are kept in the folder `$LAZYSHARD_SCREENSHOTS`, by default `runs/screenshots` of the checkout, for people to
look at.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final, Literal, NamedTuple

import pytest

DEADLINE_S: Final = 90.0

PROGRAM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed")

SCREENSHOTS: Final = Path(
    os.environ.get("LAZYSHARD_SCREENSHOTS") or Path(__file__).resolve().parents[2] / "runs" / "screenshots"
)

_FLAGS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--enable-logging=stderr"),
    # So long the page's clock goes on, as fast as it can; while an answer is waited for it stands still.
    "--virtual-time-budget=3500",
)


class Shown(NamedTuple):
    """What the browser has shown: the document as it is then, and what it complained about."""

    document: str
    console: list[str]


def open_page(url: str, *flags: str, width: int = 1280, height: int = 800) -> Shown:
    """Opens a page, lets its clock go on for some seconds, and returns what it has become."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="lazyshard-chromium-") as profile:
        done = subprocess.run(
            [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", *flags, url],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return Shown(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


def screenshot(url: str, name: str, scheme: Literal["light", "dark"], width: int, height: int) -> Path:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    picture = SCREENSHOTS / f"{name}-{width}x{height}-{scheme}.png"
    picture.unlink(missing_ok=True)
    # 0 is dark, 1 light.
    preference = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    shown = open_page(url, preference, f"--screenshot={picture}", width=width, height=height)
    assert shown.console == []
    return picture
