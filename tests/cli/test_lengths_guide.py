"""The example of `docs/lengths.md`: what it prints is what the page says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lazyshard import ChunkWriter
from tests.harness.processes.environment import DEADLINE_S, environment
from tests.stream.streams import HERE

GUIDE = (HERE / "docs" / "lengths.md").read_text(encoding="utf-8")

MODULE, PROGRAM = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
(COMMAND,) = re.findall(r"^```console\n\$ lazyshard-producer (.*?)\n```", GUIDE, re.MULTILINE | re.DOTALL)
(PRINTED,) = re.findall(r"^```text\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.mark.full
def test_example_prints_what_the_page_says(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "raw", 7) as writer:
        for number in range(40):
            writer.write({"id": number, "text": " ".join(["word"] * (1 + 13 * number % 37))})
    (tmp_path / "my_rows.py").write_text(MODULE, encoding="utf-8")

    def python(*arguments: str) -> str:
        return subprocess.check_output(
            [sys.executable, *arguments], cwd=tmp_path, env=environment(), text=True, timeout=DEADLINE_S
        )

    python("-m", "lazyshard_producer", *shlex.split(COMMAND))
    assert python("-c", PROGRAM) == PRINTED
