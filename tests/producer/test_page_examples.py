"""The examples of the pages print what the pages say, and make the rows that they show."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard.cli import export
from lazyshard.cli.main import main
from lazyshard.cli.output import help_of
from lazyshard_producer.cli import main as producer
from tests.conversion import megatron_core
from tests.harness.processes.environment import ROOT, environment
from tests.tiers import full


def page(name: str, begin: str = "", end: str = "") -> str:
    text = (ROOT / "docs" / name).read_text("utf-8")
    return text[text.index(begin) : text.index(end) if end else None]


def blocks(kind: str, text: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


Shell = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Runs a script with the commands of this checkout, whether or not they are installed."""
    (tmp_path / "bin").mkdir()
    for name, module in (("lazyshard", "lazyshard.cli"), ("lazyshard-producer", "lazyshard_producer"), ("python", "")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module and f"-m {module} "}"$@"\n')
        command.chmod(0o755)
    variables = environment()
    options: Any = {"cwd": tmp_path, "env": variables | {"PATH": f"{tmp_path / 'bin'}:{variables['PATH']}"}}
    options |= {"capture_output": True, "text": True, "timeout": 60, "check": True}
    return lambda script: subprocess.run(["bash", "-euc", script], **options)


@pytest.mark.parametrize("name", ["encoding.md", *full("balance.md", "many-generators.md")])
def test_the_example_prints_what_the_page_says(name: str, shell: Shell) -> None:
    (script,), (printed,) = blocks("bash", page(name)), blocks("text", page(name))
    found = shell(script)
    assert found.stdout == printed
    # Of the producer its first and last lines, and no warning.
    said = [re.sub(r"^time=\S+ ", "", line).split()[0] for line in found.stderr.splitlines()]
    assert name == "many-generators.md" or said in (["event=start", "event=end"], ["event=end"])


@pytest.mark.full
def test_the_session_of_indexed_dataset(shell: Shell, tmp_path: Path) -> None:
    text = page("indexed-dataset.md")
    (program,), (session,) = blocks("python", text), blocks("console", text)
    (tmp_path / "tokens.py").write_text(program)
    printed = ""
    for line in re.findall(r"^\$ (.*)$", session, re.MULTILINE):
        printed += f"$ {line}\n{shell(line).stdout}"
    printed, said = (re.sub(r"\(\d+\.\d s\)", "", text) for text in (printed, session))
    assert printed == said
    assert megatron_core.read(tmp_path / "corpus").sequences == [[101, 7, 42, 102], [101, 102], [101, 9, 102]]


def produce(command: str) -> str:
    """Runs a command of a page; returns the text of its chunks, which are two."""
    arguments = shlex.split(command.removeprefix("$ "))[1:]
    assert producer([*arguments, "--no-progress"]) == 0
    first, second = sorted(Path(arguments[arguments.index("--out") + 1]).glob("chunk_*.jsonl"))
    return first.read_text() + second.read_text()


def test_the_rows_of_packing(here: Path) -> None:
    rows, packs = blocks("jsonl", page("packing.md"))
    Path("rows.jsonl").write_text(rows)
    command = next(block for block in blocks("", page("packing.md")) if block.startswith("lazyshard-producer run"))
    assert produce(command) == packs
    section = page("packing.md", "## Split and padded by the producer\n", "## At run time\n")
    source, *expected = blocks("json", section)
    Path("tokens.jsonl").write_text(source)
    assert [produce(command) for command in blocks("console", section)] == expected


def test_options_and_codes_of_export(capsys: Any) -> None:
    assert main(["export", "--help"]) == 0
    there = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    section = page("indexed-dataset.md", "## `lazyshard export")
    assert set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE)) == there
    codes = set(re.findall(r"^ *(\d+)  ", help_of(export.command)[1], re.MULTILINE))
    assert set(re.findall(r"(?:: |; )(\d+) ", " ".join(section.partition("Exit codes")[2].split()))) == codes - {"70"}
