"""The program of `docs/encode-cache.md` prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stream.streams import HERE

pytestmark = pytest.mark.full

GUIDE = (HERE / "docs" / "encode-cache.md").read_text(encoding="utf-8")


def test_program_prints_what_the_page_says(tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    [printed] = re.findall(r"^```text\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", program]
    environment = os.environ | {"PYTHONPATH": str(HERE), "TMPDIR": str(tmp_path)}
    # A second time too, in the same place.
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
