"""The environment of processes that tests start from this checkout, and runs of commands."""

import os
import subprocess
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]
DEADLINE_S: Final = 110.0


def environment() -> dict[str, str]:
    # The plain terminal: no colours, no wrapping. One thread for numpy: the processes are many and the cores few.
    paths = [str(ROOT), str(ROOT / "producer"), str(ROOT / "integrations" / "swift")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OPENBLAS_NUM_THREADS": "1",
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }


def run_command(*command: object, timeout: float = DEADLINE_S, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs a command to its end, with nothing on its standard input, and keeps what it prints."""
    options |= {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": False}
    return subprocess.run([*map(str, command)], timeout=timeout, **options)
