"""The wheel of this checkout, and virtual environments in which it is installed."""

import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.scripts.test_scripts import environment_script

ROOT: Final = Path(__file__).resolve().parents[2]
Completed = subprocess.CompletedProcess[str]
PYTHONS: Final = ("3.10", "3.11", "3.12", "3.13")


def run(command: Sequence[str | Path], cwd: Path, variables: Mapping[str, str] = os.environ) -> Completed:
    """Run outside the source tree, with no variable that could let it be imported from there."""
    env = {name: value for name, value in variables.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    env.update(COLUMNS="120", NO_COLOR="1", TERM="dumb")  # No wrapping and no colours in what the commands print
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def run_checked(command: Sequence[str | Path], cwd: Path, variables: Mapping[str, str] = os.environ) -> str:
    done = run(command, cwd, variables)
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(folder: Path) -> Path:
    run_checked([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT], folder)
    (path,) = folder.glob("*.whl")
    return path


@cache
def uv() -> Any:
    environment = environment_script().Environment("core")
    environment.prepare()
    return environment


class Environment:  # A virtual environment that holds the wheel, some of its extras, and what those require
    def __init__(self, folder: Path, *requirements: str | Path, python: Path | None = None) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        if python is None:
            venv.create(folder, symlinks=True)
        else:
            run_checked([uv().uv, "venv", "--python", python, folder], folder.parent, uv().variables)
        self.install("install", *requirements)

    def install(self, action: str, *arguments: str | Path) -> None:
        command = [uv().uv, "pip", action, "--quiet", "--python", self.bin / "python", *arguments]
        run_checked(command, self.folder, uv().variables)

    def python(self, code: str, *options: str) -> Completed:
        return run([self.bin / "python", "-I", *options, "-c", code], self.folder)

    def command(self, name: str, *arguments: str) -> Completed:
        return run([self.bin / name, *arguments], self.folder)
