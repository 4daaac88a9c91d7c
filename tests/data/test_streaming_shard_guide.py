"""The program of `docs/streaming-shard.md`: what it prints, and that each rank tokenizes its own rows alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stream.streams import HERE

pytestmark = pytest.mark.full

GUIDE = (HERE / "docs" / "streaming-shard.md").read_text(encoding="utf-8")


def test_two_ranks_do_what_the_page_says(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    printed = re.findall(r"^```text\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"id":{i}}}\n' for i in range(7)))
    for rank, (expected, own) in enumerate(zip(printed, [[0, 1, 4, 5], [2, 3, 6, 0]], strict=True)):
        command = [sys.executable, "-W", "ignore", "-c", program, str(rank)]
        done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=True)
        assert done.stdout == expected
        assert done.stderr.splitlines() == [f"tokenized {i}" for i in own]
