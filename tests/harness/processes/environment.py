"""The environment of processes that tests start from this checkout."""

import os
from pathlib import Path
from typing import Final

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
