"""The example of `docs/encoding.md` prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.producer.commands import ROOT, environment

GUIDE = (ROOT / "docs" / "encoding.md").read_text("utf-8")


def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```bash\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(r"^```text\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
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
    # The last line of the producer, and no warning.
    assert re.fullmatch(r"time=\S+ event=end result=finished out=stream samples=5 .*\n", found.stderr)
