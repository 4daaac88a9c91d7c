"""The wheel on the oldest Python of this machine with the lowest versions that it admits, and on the newest with the
locked ones: installed, run and tested.

`scripts/test_pythons` runs all tests that need no torch, on all Pythons.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.packaging.test_publishing import PYTHONS, ROOT, build_wheel, run, run_checked
from tests.scripts.test_scripts import environment_script

TESTS: Final = (
    *(f"tests/format/test_{name}.py" for name in ("records", "names", "seal", "specification")),
    *(f"tests/plan/test_{name}.py" for name in ("deal", "layout")),
    *(f"tests/stream/test_{name}.py" for name in ("reader", "writer")),
    "tests/test_errors.py",
)
"""Quick ones that lean on what changes between versions of Python: data classes, enumerations, errors, pickles."""

SMOKE: Final = """
import sys
from pathlib import Path
import lazyshard
assert Path(lazyshard.__file__).is_relative_to(sys.prefix), lazyshard.__file__
with lazyshard.ChunkWriter("stream", samples_per_chunk=2) as writer:
    for number in range(5):
        writer.write({"number": number})
print(*(row["number"] for row in lazyshard.StreamReader("stream")))
"""

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@cache
def pythons() -> dict[str, Path]:
    """Interpreters of this machine by version, pyenv's newest first, as scripts/test_pythons looks for them."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found: dict[str, Path] = {}
    for version in PYTHONS:
        candidates = sorted(versions.glob(f"{version}.*/bin/python{version}"), key=patch_of, reverse=True)
        on_path = shutil.which(f"python{version}")
        for candidate in [*candidates, *([Path(on_path)] if on_path else [])]:
            code = "import sys, ensurepip, venv; print(*sys.version_info[:2], sep='.')"
            done = run([candidate, "-I", "-c", code], ROOT)
            if done.stdout.strip() == version:
                found[version] = candidate
                break
    # The one that runs this, where no other of its version is.
    found.setdefault(f"{sys.version_info.major}.{sys.version_info.minor}", Path(sys.executable))
    return found


def patch_of(python: Path) -> list[int]:
    return [int(part) for part in python.parts[-3].split(".") if part.isdecimal()]


def chosen() -> list[str]:
    there = [version for version in PYTHONS if version in pythons()]
    return list(dict.fromkeys([there[0], there[-1]]))


def lowest(wheel: Path) -> str:
    """Returns as pip's constraints the lowest versions that a wheel admits."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    found = re.findall(r"^Requires-Dist: ([\w-]+)>=([\d.]+)", metadata, re.MULTILINE)
    assert ("numpy", "1.24") in found
    return "".join(f"{package}=={version}\n" for package, version in sorted(set(found)))


@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_wheel_installs_runs_and_passes_tests(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = build_wheel(tmp_path / "wheel")
    version = chosen()[0 if end == "oldest" else -1]
    if end == "newest" and len(chosen()) == 1:
        pytest.skip(f"this machine has Python {version} alone")
    environment = environment_script().Environment("core")
    environment.prepare()
    for name, value in environment.variables.items():
        monkeypatch.setenv(name, value)
    run_checked([environment.uv, "venv", "--python", pythons()[version], tmp_path / "environment"], tmp_path)
    bin = tmp_path / "environment" / "bin"
    versions = ROOT / "scripts/locked.txt"
    if end == "oldest":
        versions = tmp_path / "lowest.txt"
        versions.write_text(lowest(wheel))
    packages = [f"{wheel}[producer,cli]", "hypothesis", "pytest", "pytest-timeout"]
    run_checked([environment.uv, "pip", "install", "--python", bin / "python", "-c", versions, *packages], tmp_path)
    if end == "oldest":
        told = "import numpy; print(numpy.__version__)"
        assert run_checked([bin / "python", "-I", "-c", told], tmp_path).startswith("1.24.")
    assert run_checked([bin / "python", "-I", "-W", "error", "-c", SMOKE], tmp_path) == "0 1 2 3 4\n"
    # The same rows by the two commands.
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"number":{number}}}\n' for number in range(5)))
    arguments = ["--source", "rows.jsonl", "--out", "again", "--samples-per-chunk", "2", "--no-progress"]
    run_checked([bin / "lazyshard-producer", "run", *arguments], tmp_path)
    run_checked([bin / "lazyshard", "verify", "again"], tmp_path)
    for name in ("chunk_00000.jsonl", "chunk_00002.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "stream" / name).read_bytes()
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", copy / "docs")
    shutil.copy(ROOT / "pyproject.toml", copy)
    done: subprocess.CompletedProcess[str] = run([bin / "python", "-m", "pytest", "-q", *TESTS], copy)
    assert done.returncode == 0, f"{version}:\n{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout.splitlines()[-1]
