"""What benchmarks have in common: machine and load at the start, medians with their spread, and how they end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


class Report:
    """What was found, and what of it is worse than what is asked for.

    Prints machine, versions and load when it is made.

    Args:
        versions: of what is measured, in words.

    Attributes:
        results: all figures, for JSON.
        worse: in words; medians count.
    """

    def __init__(self, versions: str) -> None:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        load = os.getloadavg()[0]
        print(f"{machine}, {versions}; load {load:.1f} at the start")
        self.results: dict[str, Any] = {"machine": machine, "versions": versions, "load": load}
        self.worse: list[str] = []

    def judge(self, name: str, value: float, asked: float, unit: str) -> None:
        """Notes a median that is not below what is asked for."""
        if value >= asked:
            self.worse.append(f"{name}: {value:.3g} {unit}, asked for: under {asked:g}")

    def conclude(self, args: argparse.Namespace, held: str = "") -> int:
        """Prints what is worse than asked for, writes the JSON line, and returns the exit code.

        Args:
            args: `json`, a file or None, and `check`.
            held: what was seen to hold in each round, in words.
        """
        print(f"\n{held}load {os.getloadavg()[0]:.1f} at the end")
        for line in self.worse:
            print(f"worse than asked for: {line}")
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(self.results | {"worse": self.worse}) + "\n")
        return 1 if args.check and self.worse else 0


def folder(text: str) -> Path:
    """Reads an argument: a directory, made if it is not there."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise argparse.ArgumentTypeError(f"{text} cannot be used: {cause.strerror}") from None
    return path


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Returns the median with the lowest and the highest."""
    low, middle, high = (scale * one for one in (min(values), statistics.median(values), max(values)))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def versions_of(packages: Sequence[str]) -> str:
    """Returns names and versions of installed packages."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in packages)


def missing_packages(packages: Sequence[str]) -> list[str]:
    """Returns those that are not installed."""
    missing = []
    for name in packages:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return missing
