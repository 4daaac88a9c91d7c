"""`docs/getting-started.md`: its commands, run one after the other, print what the page says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.producer.commands import DEADLINE_S, ROOT, environment

pytestmark = pytest.mark.full

PAGE: Final = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
PROGRAMS: Final = {"python": "", "lazyshard": "-m lazyshard.cli", "lazyshard-producer": "-m lazyshard_producer"}


class Block(NamedTuple):
    kind: str
    text: str


def blocks() -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]


def dialogue(text: str) -> list[tuple[str, str]]:
    return [(command, printed) for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)]


def settled(printed: str) -> str:
    """What a command prints, without what differs from one machine and moment to the next."""
    for pattern in (r"\(\d[^)]*/s\)", r"\d+ on \S+, heartbeat .* old", r"; .* old$", r"disk .* free$", r"rate .*/s$"):
        printed = re.sub(pattern, "...", printed, flags=re.MULTILINE)
    return printed


def test_the_page_prints_what_it_says(tmp_path: Path) -> None:
    found = blocks()
    assert [block.kind for block in found] == ["bash", "bash", "python", "console", "console", "console"]
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, arguments in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    env = environment() | {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(found[2].text)

    def run(command: str) -> str:
        # A shell would add to the output that its child was killed.
        words = shlex.split(command)
        return subprocess.run(
            words, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S,
            check=False,
        ).stdout  # fmt: skip

    subprocess.run(["bash", "-c", found[0].text], cwd=folder, env=env, check=True, timeout=DEADLINE_S)
    background = found[1].text.removesuffix("&\n")
    assert background != found[1].text
    with subprocess.Popen(
        ["bash", "-c", f"exec {background}"], cwd=folder, env=env, stdin=subprocess.DEVNULL
    ) as producer:
        asked = [turn for block in found[3:5] for turn in dialogue(block.text)]
        assert [command for command, _ in asked] == ["python train.py 3", "python train.py 100"]
        answers = [(command, run(command)) for command, _ in asked]
        assert producer.wait(DEADLINE_S) == 0, (folder / "producer.log").read_text()
    assert answers == asked
    looks = dialogue(found[5].text)
    assert len(looks) == 3
    for command, printed in looks:
        assert settled(run(command)) == settled(printed), command
