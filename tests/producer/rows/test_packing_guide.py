"""The example of `docs/packing.md`: its command makes the packs that it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.producer.commands import ROOT, environment

GUIDE = (ROOT / "docs" / "packing.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def test_the_example_is_what_the_page_says(tmp_path: Path) -> None:
    rows, packs = blocks("jsonl")
    (tmp_path / "rows.jsonl").write_text(rows)
    command = next(block for block in blocks("") if block.startswith("lazyshard-producer run"))
    made = subprocess.run(
        [sys.executable, "-m", "lazyshard_producer", *shlex.split(command)[1:], "--no-progress"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    chunks = [(tmp_path / "packs" / f"chunk_0000{number}.jsonl").read_text() for number in range(2)]
    assert "".join(chunks) == packs
