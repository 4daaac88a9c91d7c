"""`scripts/test --all` says where the pictures of the pages are, or that there are none; the tests are made up."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

TEST: Final = Path(__file__).parents[2] / "scripts" / "test"

TOOLS: Final = (
    "bash",
    "dirname",
    "head",
    "grep",
    "mktemp",
    "find",
    "wc",
    "rm",
    "cat",
    "touch",
    "mkdir",
    "getconf",
    "env",
)

PYTHON: Final = """#!/usr/bin/env bash
# Takes two pictures when it is asked for the tests, as they would.
if [[ $2 == pytest ]]; then
    mkdir -p "$LAZYSHARD_SCREENSHOTS"
    touch "$LAZYSHARD_SCREENSHOTS/one.png" "$LAZYSHARD_SCREENSHOTS/two.png"
    exit "${TESTS_EXIT:-0}"
fi
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(folder: Path, *, chromium: bool, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `scripts/test --all` in a project in which there are no tests, on a machine with or without a browser."""
    program(folder / "scripts" / "environment", "#!/usr/bin/env bash\n")
    program(folder / "scripts" / "audit_dependencies", "#!/usr/bin/env bash\n")
    program(folder / ".venv" / "bin" / "python", PYTHON)
    shutil.copy(TEST, folder / "scripts" / "test")
    programs = folder / "programs"
    programs.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found, name
        (programs / name).symlink_to(found)
    if chromium:
        program(programs / "chromium", "#!/usr/bin/env bash\n")
    environment = {"PATH": str(programs), "HOME": os.environ.get("HOME", "/"), "TMPDIR": str(folder)} | variables
    return subprocess.run(
        [folder / "scripts" / "test", "--all"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_pictures_of_this_run_are_counted_and_kept(tmp_path: Path) -> None:
    old = tmp_path / "runs" / "screenshots" / "old.png"
    old.parent.mkdir(parents=True)
    old.touch()
    os.utime(old, (0, 0))
    done = run(tmp_path, chromium=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"\npictures of the pages: 2 of this run, in {old.parent}\n\nall passed\n")
    assert sorted(picture.name for picture in old.parent.iterdir()) == ["old.png", "one.png", "two.png"]


@pytest.mark.parametrize("code", ["0", "1"])
def test_missing_browser_is_told_whether_or_not_tests_fail(code: str, tmp_path: Path) -> None:
    done = run(tmp_path, chromium=False, TESTS_EXIT=code)
    assert done.returncode == int(code)
    assert "\nNO PICTURES: chromium is not installed, so no page was opened or looked at\n" in done.stdout


def test_folder_of_the_pictures_can_be_named(tmp_path: Path) -> None:
    done = run(tmp_path, chromium=True, LAZYSHARD_SCREENSHOTS=str(tmp_path / "kept"))
    assert f"\npictures of the pages: 2 of this run, in {tmp_path}/kept\n" in done.stdout
