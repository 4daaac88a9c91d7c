"""The programs of `docs/blending.md`, on two ranks: what they print is what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from lazyshard import BlendedDataset, ChunkWriter, LazyShardedDataset, Order
from tests.stream.streams import HERE

GUIDE = (HERE / "docs" / "blending.md").read_text(encoding="utf-8")


PROGRAMS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
PRINTED = re.findall(r"^```text\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def test_two_ranks_print_what_the_page_says(tmp_path: Path) -> None:
    for name, rows in (("chat", 18), ("code", 6)):
        with ChunkWriter(tmp_path / name, 3) as writer:
            for number in range(rows):
                writer.write({"id": f"{name}{number}"})
    for rank, expected in enumerate(PRINTED):
        command = [sys.executable, "-c", PROGRAMS[0], str(rank)]
        assert subprocess.check_output(command, cwd=tmp_path, text=True) == expected
    assert len(PRINTED) == 2


def test_the_schedule_is_what_the_page_says(tmp_path: Path) -> None:
    (scheduled,) = [program for program in PROGRAMS if "schedule=" in program]
    known: dict[str, Any] = {"BlendedDataset": BlendedDataset, "Order": Order}
    for name in ("web", "maths"):
        with ChunkWriter(tmp_path / name, 3) as writer:
            writer.write({"id": name})
        known[name] = LazyShardedDataset(tmp_path / name, dp_rank=0, dp_size=1)
    exec(scheduled, known)
    shares = [known["blend"].shares_at(step)[1] for step in (0, 500, 1000, 3000, 5000, 9000)]
    assert [round(share, 2) for share in shares] == [0.0, 0.05, 0.1, 0.3, 0.5, 0.5]
