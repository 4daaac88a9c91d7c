"""The examples of `docs/balance.md` and `docs/encoding.md` print what the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.producer.commands import ROOT, environment


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
