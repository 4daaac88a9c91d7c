"""mypy --strict over code that uses the installed package, from outside the source tree and its configuration."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

PUBLIC_API: Final = Path(__file__).with_name("public_api.py")

# The first run reads all of torch's annotations; minutes on a slow machine.
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy_cache")


def mypy(file: Path, cache: Path) -> "subprocess.CompletedProcess[str]":
    options = ["--strict", "--config-file=", "--no-error-summary", "--hide-error-context", f"--cache-dir={cache}"]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *options, file.name],
        cwd=file.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_public_api_is_typed_as_a_user_writes_it(tmp_path: Path, cache: Path) -> None:
    file = Path(shutil.copy(PUBLIC_API, tmp_path))
    done = mypy(file, cache)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


WRONG_USES: Final = {
    "LazyShardedDataset(1)": "arg-type",
    "LazyShardedDataset('stream', dp_rank='0')": "arg-type",
    "LazyShardedDataset('stream', encode_fn=3)": "arg-type",
    "LazyShardedDataset('stream', lambda row: row, 0, 2)": "call-arg or misc",
    "ChunkWriter('stream', 1000).write('text')": "arg-type",
    "ChunkWriter('stream', 1000).write({}, tokens='4')": "arg-type",
    "ChunkWriter('stream', 1000).close(finish=True)": "call-arg",
    "StreamReader(1)": "arg-type",
}


def test_wrong_uses_are_reported(tmp_path: Path, cache: Path) -> None:
    """One error for each, with its code; so nothing of the API has silently become Any."""
    file = tmp_path / "wrong.py"
    lines = ["from lazyshard import ChunkWriter, LazyShardedDataset, StreamReader", *WRONG_USES]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = mypy(file, cache)
    assert done.stderr == ""
    reported = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if ": error: " in line}
    for number, (use, codes) in enumerate(WRONG_USES.items(), start=2):
        assert number in reported, f"not reported: {use}\n{done.stdout}"
        assert any(f"[{code}]" in reported[number] for code in codes.split(" or ")), reported[number]
    assert set(reported) == set(range(2, len(lines) + 1)), done.stdout
