"""Programs in processes of their own: what they print, how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parents[3]
DEADLINE_S: Final = 60.0

_RANKS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")


def environment(**variables: str) -> dict[str, str]:
    """Returns the environment of a process outside of `torchrun`, but for the variables."""
    inherited = {name: value for name, value in os.environ.items() if name not in _RANKS}
    path = os.pathsep.join([str(HERE), str(HERE / "integrations" / "swift")])
    return inherited | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | variables


def python(program: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
