"""The program of `docs/choosing.md`, on two ranks: what it prints is what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stream.streams import HERE, produce

pytestmark = pytest.mark.full

GUIDE = (HERE / "docs" / "choosing.md").read_text(encoding="utf-8")


PROGRAMS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
PRINTED = re.findall(r"^```text\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def test_two_ranks_print_what_the_page_says(tmp_path: Path) -> None:
    (program,) = PROGRAMS
    produce(tmp_path / "stream", 48, 4)
    for rank, expected in enumerate(PRINTED):
        command = [sys.executable, "-c", program, str(rank)]
        assert subprocess.check_output(command, cwd=tmp_path, text=True) == expected
    assert len(PRINTED) == 2
