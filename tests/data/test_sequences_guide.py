"""The section of `docs/packing.md` on run time: its commands and its programs do what the page says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.processes.environment import ROOT, environment

pytestmark = pytest.mark.full

GUIDE = (ROOT / "docs" / "packing.md").read_text(encoding="utf-8")
MODULES = {"lazyshard-producer": "lazyshard_producer", "lazyshard": "lazyshard.cli"}


def test_the_programs_print_what_the_page_says(tmp_path: Path) -> None:
    rows = re.findall(r"^```jsonl\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)[0]
    section = GUIDE[GUIDE.index("## At run time\n") :]
    modules, commands, programs, printed = (
        re.findall(rf"^```{kind}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        for kind in ("py", "console", "python", "text")
    )
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "my_rows.py").write_text(modules[0])
    for line in "".join(commands).splitlines():
        name, *arguments = shlex.split(line.removeprefix("$ "))
        run(tmp_path, "-m", MODULES[name], *arguments)
    assert len(programs) == 2
    # Each by itself, but torch is imported once; unbuffered, so that log lines stand where they are written.
    each = "import sys\nfor program in sys.argv[1:]:\n    exec(program, {})"
    assert run(tmp_path, "-W", "error", "-u", "-c", each, *programs) == "".join(printed)


def run(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
