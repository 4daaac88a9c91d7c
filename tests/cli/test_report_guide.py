"""The example of `docs/report.md`: what it prints is what the page says; and the page names every option and field."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from lazyshard.cli import report
from tests.cli.commands import DEADLINE_S, environment
from tests.stream.streams import HERE

GUIDE = (HERE / "docs" / "report.md").read_text(encoding="utf-8")

(MODULE,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
(COMMANDS,) = re.findall(r"^```bash\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
SAID, CHANGES = re.findall(r"^```text\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)

MODULES = {"python": [], "lazyshard-producer": ["-m", "lazyshard_producer"], "lazyshard": ["-m", "lazyshard.cli"]}


def test_example_prints_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "my_rows.py").write_text(MODULE, encoding="utf-8")
    paths = f"{HERE}:{HERE / 'producer'}:{tmp_path}"

    def run(command: str) -> str:
        words = shlex.split(command.partition(" > ")[0])
        return subprocess.check_output(
            [sys.executable, *MODULES[words[0]], *words[1:]],
            cwd=tmp_path,
            env=environment() | {"PYTHONPATH": paths},
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=DEADLINE_S,
        )

    for command in COMMANDS.splitlines():
        said = run(command)
        if target := command.partition(" > ")[2]:
            (tmp_path / target).write_text(said)
    # How large the file is depends on the times in it.
    assert said.replace(re.findall(r"[\d.]+ kB", said)[0], "28.0 kB") == SAID
    found = json.loads(run(command.replace("-o report.html", "--json")))
    assert "".join(f"{one['text']}\n  {one['command']}\n" for one in found["changes"]) == CHANGES
    fields = {
        field for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", GUIDE, re.MULTILINE) for field in row.split(", ")
    }
    assert {f"`{name}`" for name in found} <= fields


def test_the_page_names_every_option() -> None:
    options = set(re.findall(r'"(--[a-z-]+)"', Path(report.__file__).read_text(encoding="utf-8")))
    assert len(options) >= 10
    assert [name for name in sorted(options) if f"`{name}" not in GUIDE] == []
