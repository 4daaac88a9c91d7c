"""`docs/packing.md` on what the producer splits and pads: its commands make the rows that it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.producer.commands import ROOT, environment

GUIDE = (ROOT / "docs" / "packing.md").read_text(encoding="utf-8")
SECTION = GUIDE[GUIDE.index("## Split and padded by the producer\n") : GUIDE.index("## At run time\n")]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)


def test_the_examples_are_what_the_page_says(tmp_path: Path) -> None:
    source, *expected = blocks("json")
    (tmp_path / "tokens.jsonl").write_text(source)
    for command, rows in zip(blocks("console"), expected, strict=True):
        arguments = shlex.split(command.removeprefix("$ "))[1:]
        made = subprocess.run(
            [sys.executable, "-m", "lazyshard_producer", *arguments, "--no-progress"],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        out = tmp_path / arguments[arguments.index("--out") + 1]
        chunks = [path.read_text() for path in sorted(out.glob("chunk_*.jsonl"))]
        assert len(chunks) == 2
        assert "".join(chunks) == rows
