"""The examples of the pages print what the pages say, and make the rows that they show."""

import re
import shlex
import subprocess
import sys
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
    """The text of a page, or the part between two headings."""
    text = (ROOT / "docs" / name).read_text("utf-8")
    return text[text.index(begin) : text.index(end) if end else None]


def blocks(kind: str, text: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell with the commands of this checkout, whether or not they are installed."""
    (tmp_path / "bin").mkdir()
    for name, module in (("lazyshard", "lazyshard.cli"), ("lazyshard-producer", "lazyshard_producer"), ("python", "")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module and f"-m {module} "}"$@"\n')
        command.chmod(0o755)
    variables = environment()
    return variables | {"PATH": f"{tmp_path / 'bin'}:{variables['PATH']}"}


def shell(script: str, folder: Path, programs: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euc", script], cwd=folder, env=programs, capture_output=True, text=True, timeout=60, check=True
    )


@pytest.mark.parametrize("name", ["encoding.md", *full("balance.md")])
def test_the_example_prints_what_the_page_says(name: str, programs: dict[str, str], tmp_path: Path) -> None:
    (script,), (printed,) = blocks("bash", page(name)), blocks("text", page(name))
    found = shell(script, tmp_path, programs)
    assert found.stdout == printed
    # Of the producer its first and last lines, and no warning.
    said = [re.sub(r"^time=\S+ ", "", line).split()[0] for line in found.stderr.splitlines()]
    assert said in (["event=start", "event=end"], ["event=end"])


@pytest.mark.full
def test_many_generators(programs: dict[str, str], tmp_path: Path) -> None:
    text = page("many-generators.md")
    (script,), (printed,) = blocks("bash", text), blocks("text", text)
    assert shell(script, tmp_path, programs).stdout == printed


@pytest.mark.full
def test_the_session_of_indexed_dataset(programs: dict[str, str], tmp_path: Path) -> None:
    text = page("indexed-dataset.md")
    (program,), (session,) = blocks("python", text), blocks("console", text)
    (tmp_path / "tokens.py").write_text(program)
    printed = ""
    for line in re.findall(r"^\$ (.*)$", session, re.MULTILINE):
        printed += f"$ {line}\n{shell(line, tmp_path, programs).stdout}"
    printed, said = (re.sub(r"\(\d+\.\d s\)", "", text) for text in (printed, session))
    assert printed == said
    assert megatron_core.read(tmp_path / "corpus").sequences == [[101, 7, 42, 102], [101, 102], [101, 9, 102]]


def produce(command: str) -> str:
    """Runs a command of a page; returns the text of its chunks, which are two."""
    arguments = shlex.split(command.removeprefix("$ "))[1:]
    assert producer([*arguments, "--no-progress"]) == 0
    first, second = sorted(Path(arguments[arguments.index("--out") + 1]).glob("chunk_*.jsonl"))
    return first.read_text() + second.read_text()


def test_the_rows_of_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
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
