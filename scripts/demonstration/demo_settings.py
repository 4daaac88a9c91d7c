"""The demo's options and the folder that it works in."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

BATCH: Final = 8
"""Samples of one rank in a step."""

WORKERS: Final = 2
"""Loader workers of each rank."""

ROOT: Final = Path(__file__).resolve().parents[2]

_MARKER: Final = "made-by-lazyshard-demo"
LEAST_STEPS: Final = 20
"""With fewer steps a falling loss is not visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the demo is run.

    Attributes:
        samples: how many are made at the most.
        rate: how many are published a second.
        samples_per_chunk: rows in a chunk file.
        ranks: data-parallel processes.
        folder: where everything is put.
    """

    samples: int
    rate: float
    samples_per_chunk: int
    ranks: int
    folder: Path

    @property
    def source(self) -> Path:
        """The producer's source."""
        return self.folder / "source.jsonl"

    @property
    def stream(self) -> Path:
        """The stream that it publishes and the ranks read."""
        return self.folder / "stream"

    @property
    def step_samples(self) -> int:
        """Samples of all ranks in a step."""
        return self.ranks * BATCH


def parse(arguments: Sequence[str]) -> Settings:
    """Returns the settings of a command line; a wrong one ends the process with code 2."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Trains a small language model on data while it is still being produced: a producer publishes at "
        "a limited rate, torchrun trains on published data. At the end it checks which samples were trained.",
        epilog="exit codes: 0 all checks passed; 1 a check failed or a process died; 2 wrong arguments, or a folder in "
        "use or of somebody else's; 130 Ctrl-C",
    )
    add = parser.add_argument
    add("--samples", type=_whole, default=12_345, metavar="N", help="maximum number of samples (default: %(default)s)")
    add("--rate", type=_rate, default=200.0, metavar="R", help="samples published per second (default: %(default)g)")
    add("--samples-per-chunk", type=_whole, default=100, metavar="S", help="rows per chunk (default: %(default)s)")
    add("--ranks", type=_whole, default=2, metavar="DP", help="data-parallel processes (default: %(default)s)")
    add(
        "--dir",
        type=Path,
        default=Path(os.path.relpath(ROOT / "runs" / "demo")),
        metavar="DIR",
        help="where to put everything; the demo's last run there is replaced (default: %(default)s)",
    )
    given = parser.parse_args(arguments)
    least = LEAST_STEPS * given.ranks * BATCH
    if given.samples < least:
        parser.error(f"--samples: {given.ranks} ranks need {least} for {LEAST_STEPS} steps, got {given.samples}")
    return Settings(
        samples=given.samples,
        rate=given.rate,
        samples_per_chunk=given.samples_per_chunk,
        ranks=given.ranks,
        folder=given.dir,
    )


def _whole(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return number


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


class FolderRefused(Exception):
    """The folder cannot be used: the demo did not make it, or another demo is using it."""


def take_folder(folder: Path) -> TextIO:
    """Makes the folder, or clears it if a demo made it, and returns an open lock on it.

    Raises:
        FolderRefused: it is in use, was made by something else, or the filesystem refused.
    """
    try:
        return _take_folder(folder)
    except OSError as cause:
        raise FolderRefused(f"{cause.filename or folder}: {cause.strerror}") from cause


def _take_folder(folder: Path) -> TextIO:
    marker = folder / _MARKER
    if folder.exists() and not folder.is_dir():
        raise FolderRefused(f"{folder} is a file; choose another with --dir")
    if folder.is_dir() and not marker.is_file() and any(folder.iterdir()):
        raise FolderRefused(f"{folder} was not made by the demo, so it is left alone; choose another with --dir")
    folder.mkdir(parents=True, exist_ok=True)
    held = marker.open("a+")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise FolderRefused(f"another demo is using {folder}; choose another with --dir") from None
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != _MARKER:
            os.unlink(entry.path)
    return held
