"""Measures for the processes of the tests, which import this module by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from lazyshard.errors import SkipSample


def tenfold(row: dict[str, Any]) -> int:
    """Ten times the row's number, and a word on stdout, where the answers go."""
    print("measuring", row["id"])
    return 10 * int(row["id"])


def another(row: dict[str, Any]) -> int:
    return 1 + int(row["id"])


def odd_ones(row: dict[str, Any]) -> int:
    """No sample is made of even rows."""
    if row["id"] % 2 == 0:
        raise SkipSample("even")
    return int(row["id"])


def fails_at_3(row: dict[str, Any]) -> int:
    if row["id"] == 3:
        raise ValueError("no such \udc80 image")
    return 1


def killed_at_3(row: dict[str, Any]) -> int:
    if row["id"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1


def stuck_at_3(row: dict[str, Any]) -> int:
    """Says in `stuck` who it is, and never returns from row 3, unless `go-on` is there."""
    if row["id"] == 3 and not Path("go-on").exists():
        Path("stuck.part").write_text(str(os.getpid()), encoding="utf-8")
        Path("stuck.part").rename("stuck")
        time.sleep(3600)
    return 10 * int(row["id"])


def counted(row: dict[str, Any]) -> int:
    """Notes each row that it measures in `counted`."""
    with open("counted", "a", encoding="utf-8") as file:
        file.write(f"{row['id']}\n")
    return 10 * int(row["id"])
