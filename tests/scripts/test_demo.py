"""`scripts/demo` as a newcomer runs it: on data that is still being produced, with its checks at the end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lazyshard import StreamReader

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "demo"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)


def test_every_sample_of_the_source_is_published_and_every_check_holds(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    samples, ranks, per_chunk = 1000, 2, 50
    done = demo(
        *("--samples", samples, "--rate", 100, "--samples-per-chunk", per_chunk, "--ranks", ranks, "--dir", folder)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    source = [json.loads(line) for line in (folder / "source.jsonl").read_bytes().splitlines()]
    reader = StreamReader(folder / "stream", max_wait=0)
    assert len(source) == samples
    assert [row["id"] for row in reader] == [row["id"] for row in source]
    assert reader.seen.ended and reader.samples_per_chunk == per_chunk


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    done = demo("--dir", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
