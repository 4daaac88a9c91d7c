"""The section of `docs/packing.md` on run time: its commands and its program do what the page says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.producer.commands import ROOT, environment

GUIDE = (ROOT / "docs" / "packing.md").read_text(encoding="utf-8")
MODULES = {"lazyshard-producer": "lazyshard_producer", "lazyshard": "lazyshard.cli"}


def test_the_program_prints_what_the_page_says(tmp_path: Path) -> None:
    rows = re.findall(r"^```jsonl\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)[0]
    section = GUIDE[GUIDE.index("## At run time\n") :]
    length, commands, program, printed = (
        re.findall(rf"^```{kind}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[0]
        for kind in ("py", "console", "python", "text")
    )
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "my_rows.py").write_text(length)
    for line in commands.splitlines():
        name, *arguments = shlex.split(line.removeprefix("$ "))
        command = [sys.executable, "-m", MODULES[name], *arguments]
        made = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert found.stdout == printed, found.stderr
