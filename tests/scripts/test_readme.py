"""`scripts/README.md` lists what can be run, once each, and says to which command a module belongs."""

import os
import re
from pathlib import Path
from typing import Final

SCRIPTS: Final = Path(__file__).resolve().parents[2] / "scripts"
COMMANDS: Final = sorted(path.name for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK))


def page() -> str:
    return (SCRIPTS / "README.md").read_text(encoding="utf-8")


def test_every_command_is_listed_once() -> None:
    assert len(COMMANDS) >= 12
    assert sorted(re.findall(r"^\| `(\w+)` \|", page(), re.MULTILINE)) == COMMANDS


def test_every_module_belongs_to_a_command_or_is_named() -> None:
    named = set(re.findall(r"`(\w+\.py)`", page()))
    strays = [
        path.name
        for path in sorted(SCRIPTS.rglob("*.py"))
        if path.name not in named and not any(path.name.startswith(command) for command in COMMANDS)
    ]
    assert strays == []
    assert [name for name in sorted(named) if not list(SCRIPTS.rglob(name))] == []


def test_every_folder_is_named_and_only_commands_lie_beside_them() -> None:
    folders = {path.name for path in SCRIPTS.iterdir() if path.is_dir()} - {"__pycache__"}
    assert [name for name in sorted(folders) if f"`{name}`" not in page()] == []
    files = {path.name for path in SCRIPTS.iterdir() if path.is_file()}
    assert sorted(files - set(COMMANDS)) == ["README.md", "locked.txt"]
