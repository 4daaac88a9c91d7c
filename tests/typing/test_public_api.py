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


def test_public_api_is_typed_as_a_user_writes_it_and_wrong_uses_are_reported(tmp_path: Path) -> None:
    """One error for each, with its code; so nothing of the API has silently become Any."""
    lines = ["from lazyshard import ChunkWriter, LazyShardedDataset, StreamReader", *WRONG_USES]
    (tmp_path / "wrong.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    shutil.copy(PUBLIC_API, tmp_path)
    # Kept from one run to the next: it holds what torch is annotated with.
    cache = PUBLIC_API.parents[2] / ".mypy_cache" / "public_api"
    options = ["--strict", "--config-file=", "--no-error-summary", "--hide-error-context", f"--cache-dir={cache}"]
    command = [sys.executable, "-m", "mypy", *options, PUBLIC_API.name, "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    reported = {}
    for line in done.stdout.splitlines():
        place, found, message = line.partition(": error: ")
        assert place.startswith("wrong.py:"), line
        if found:
            reported[int(place.split(":")[1])] = message
    assert list(reported) == list(range(2, len(lines) + 1)), done.stdout
    for message, (use, codes) in zip(reported.values(), WRONG_USES.items(), strict=True):
        assert any(f"[{code}]" in message for code in codes.split(" or ")), use
