"""The examples of the pages print what the pages say, and make the rows that they show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.cli import export
from lazyshard.cli.main import main
from tests.conversion import megatron_core
from tests.harness.processes.environment import ROOT, environment
from tests.harness.processes.producing import run

PACKING: Final = (ROOT / "docs" / "packing.md").read_text("utf-8")
INDEXED: Final = (ROOT / "docs" / "indexed-dataset.md").read_text("utf-8")

PROGRAMS: Final = {
    "python": [sys.executable],
    "lazyshard": [sys.executable, "-m", "lazyshard.cli"],
    "lazyshard-producer": [sys.executable, "-m", "lazyshard_producer"],
    "cat": ["cat"],
}


def blocks(kind: str, text: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["balance.md", "encoding.md"])
def test_the_example_prints_what_the_page_says(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    (script,) = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    folder = tmp_path / "bin"
    folder.mkdir()
    # The commands of this checkout, whether or not they are installed.
    for name, module in (("lazyshard", "lazyshard.cli"), ("lazyshard-producer", "lazyshard_producer"), ("python", "")):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module and f"-m {module} "}"$@"\n')
        command.chmod(0o755)
    found = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env=environment() | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout == printed
    # Of the producer its first and last lines, and no warning.
    said = [re.sub(r"^time=\S+ ", "", line).split()[0] for line in found.stderr.splitlines()]
    assert said in (["event=start", "event=end"], ["event=end"])


def produce(command: str, folder: Path) -> str:
    """Runs a command of a page; returns the text of its chunks, which are two."""
    arguments = shlex.split(command.removeprefix("$ "))[1:]
    made = run(*arguments, "--no-progress", cwd=folder)
    assert made.returncode == 0, made.stderr
    chunks = sorted((folder / arguments[arguments.index("--out") + 1]).glob("chunk_*.jsonl"))
    assert len(chunks) == 2
    return "".join(path.read_text() for path in chunks)


def test_the_packs_of_packing(tmp_path: Path) -> None:
    rows, packs = blocks("jsonl", PACKING)
    (tmp_path / "rows.jsonl").write_text(rows)
    command = next(block for block in blocks("", PACKING) if block.startswith("lazyshard-producer run"))
    assert produce(command, tmp_path) == packs


def test_the_sequences_of_packing(tmp_path: Path) -> None:
    section = PACKING[PACKING.index("## Split and padded by the producer\n") : PACKING.index("## At run time\n")]
    source, *expected = blocks("json", section)
    (tmp_path / "tokens.jsonl").write_text(source)
    assert [produce(command, tmp_path) for command in blocks("console", section)] == expected


def test_the_session_of_indexed_dataset(tmp_path: Path) -> None:
    (program,) = blocks("python", INDEXED)
    (session,) = blocks("console", INDEXED)
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


def test_options_and_codes_of_export(capsys: Any) -> None:
    assert main(["export", "--help"]) == 0
    there = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    section = INDEXED[INDEXED.index("## `lazyshard export") :]
    assert set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE)) == there
    codes = set(re.findall(r"^ *(\d+)  ", export.EPILOG, re.MULTILINE))
    assert set(re.findall(r"^\| (\d+) \|", section, re.MULTILINE)) == codes - {"1", "70"}
