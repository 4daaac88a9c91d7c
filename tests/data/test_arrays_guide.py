"""The program of `docs/arrays.md` prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.stream.streams import HERE

GUIDE = (HERE / "docs" / "arrays.md").read_text(encoding="utf-8")


def test_program_prints_what_the_page_says(tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    [printed] = re.findall(r"^```text\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", program]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
