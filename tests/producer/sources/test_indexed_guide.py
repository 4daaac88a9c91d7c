"""docs/indexed-dataset.md: its program and commands print what the page says, and its options are those there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from lazyshard.cli import export
from lazyshard.cli.main import main
from tests.conversion import megatron_core
from tests.producer.commands import ROOT, environment

GUIDE: Final = (ROOT / "docs" / "indexed-dataset.md").read_text("utf-8")

PROGRAMS: Final = {
    "python": [sys.executable],
    "lazyshard": [sys.executable, "-m", "lazyshard.cli"],
    "lazyshard-producer": [sys.executable, "-m", "lazyshard_producer"],
    "cat": ["cat"],
}


def test_commands_print_what_the_page_says(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    (session,) = re.findall(r"^```console\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    (tmp_path / "tokens.py").write_text(program)
    printed = ""
    for line in re.findall(r"^\$ (.*)$", session, re.MULTILINE):
        name, *arguments = line.split()
        command = [*PROGRAMS[name], *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True, check=True, timeout=60
        )
        printed += f"$ {line}\n{done.stdout}"
    assert re.sub(r"\(\d+\.\d s\)", "(0.0 s)", printed) == session
    rows = [[101, 7, 42, 102], [101, 102], [101, 9, 102]]
    assert megatron_core.read(tmp_path / "corpus").sequences == rows


def test_options_and_codes_are_those_of_the_command(capsys: Any) -> None:
    assert main(["export", "--help"]) == 0
    there = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    section = GUIDE[GUIDE.index("## `lazyshard export") :]
    assert set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE)) == there
    codes = set(re.findall(r"^ *(\d+)  ", export.EPILOG, re.MULTILINE))
    assert set(re.findall(r"^\| (\d+) \|", section, re.MULTILINE)) == codes - {"1", "70"}
