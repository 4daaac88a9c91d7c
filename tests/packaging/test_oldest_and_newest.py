"""The wheel on the oldest and newest Python, with the lowest and the locked versions; data sets on the lowest torch."""

import os
import re
import shutil
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.packaging.installed import PYTHONS, ROOT, Environment, build_wheel, run, run_checked, uv
from tests.scripts.test_scripts import environment_script

TESTS: Final = (  # One file of each room, that which leans most on what changes between versions
    "tests/format/test_seal.py",
    "tests/plan/test_deal.py",
    "tests/stream/test_arrays.py",
    "tests/test_errors.py",
)

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
            if run([candidate, "-I", "-c", code], ROOT).stdout.strip() == version:
                found[version] = candidate
                break
    found.setdefault(f"{sys.version_info.major}.{sys.version_info.minor}", Path(sys.executable))  # At least this one
    return dict(sorted(found.items(), key=lambda one: PYTHONS.index(one[0])))


def patch_of(python: Path) -> list[int]:
    return [int(part) for part in python.parts[-3].split(".") if part.isdecimal()]


def lowest(wheel: Path) -> str:
    """Returns as pip's constraints the lowest versions that a wheel admits."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    found = re.findall(r"^Requires-Dist: ([\w-]+)>=([\d.]+)", metadata, re.MULTILINE)
    assert ("numpy", "1.24") in found
    return "".join(f"{package}=={version}\n" for package, version in sorted(set(found)))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_wheel_installs_runs_and_passes_tests(end: str, wheel: Path, tmp_path: Path) -> None:
    if end == "newest" and len(pythons()) == 1:
        pytest.skip(f"this machine has Python {next(iter(pythons()))} alone")
    versions = ROOT / "scripts/locked.txt"
    if end == "oldest":
        versions = tmp_path / "lowest.txt"
        versions.write_text(lowest(wheel))
    packages: list[str | Path] = ["-c", versions, f"{wheel}[producer,cli]", "hypothesis", "pytest", "pytest-timeout"]
    python = list(pythons().values())[0 if end == "oldest" else -1]
    environment = Environment(tmp_path / "environment", *packages, python=python)
    if end == "oldest":
        assert environment.python("import numpy; print(numpy.__version__)").stdout.startswith("1.24.")
    done = environment.python(SMOKE, "-W", "error")
    assert (done.stdout, done.stderr) == ("0 1 2 3 4\n", "")
    (environment.folder / "rows.jsonl").write_text("".join(f'{{"number":{number}}}\n' for number in range(5)))
    arguments = ["--source", "rows.jsonl", "--out", "again", "--samples-per-chunk", "2", "--no-progress"]
    for command in (["lazyshard-producer", "run", *arguments], ["lazyshard", "verify", "again"]):
        assert environment.command(*command).returncode == 0
    for name in ("chunk_00000.jsonl", "chunk_00002.jsonl"):
        again, first = (environment.folder / folder / name for folder in ("again", "stream"))
        assert again.read_bytes() == first.read_bytes()
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__", "written"))
    shutil.copytree(ROOT / "docs", copy / "docs")
    shutil.copy(ROOT / "pyproject.toml", copy)
    done = run([environment.bin / "python", "-m", "pytest", "-q", "--tier", "quick", *TESTS], copy)
    assert done.returncode == 0, f"{python}:\n{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout.splitlines()[-1]


@pytest.mark.timeout(900)
def test_data_sets_pass_their_tests_on_the_lowest_torch(tmp_path: Path) -> None:
    variables = uv().variables | {"UV_OFFLINE": "1"}
    python = tmp_path / "venv/bin/python"
    run_checked([uv().uv, "venv", tmp_path / "venv"], tmp_path, variables)
    packages = environment_script().LOWEST[1:]
    if run([uv().uv, "pip", "install", "--python", python, *packages], tmp_path, variables).returncode:
        pytest.skip("the lowest torch is not at hand: it, or a package that it needs, is not in uv's cache")
    done = run([ROOT / "scripts/test_pythons", "torch"], ROOT, variables)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
