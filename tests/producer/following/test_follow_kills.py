"""The command follows a directory that real processes write into, and is killed again and again: every row once."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.processes.environment import environment
from tests.harness.processes.producing import ids, killed_at_random, start, wait_until

pytestmark = pytest.mark.full

FILES = 6
ROWS = 300

WRITER = f"""
import gzip, json, os, random, sys, time
directory, finished_by, seed = sys.argv[1:]
dice = random.Random(int(seed))
names = [f"part-{{number}}.jsonl" for number in range({FILES})]
texts = [
    [
        json.dumps({{"id": number * {ROWS} + row, "text": "x" * dice.randrange(300)}}).encode()
        + dice.choice([b"\\n", b"\\r\\n", b"\\n\\n"])
        for row in range({ROWS})
    ]
    for number in range({FILES})
]
texts[2][-1] = texts[2][-1].strip()
def finish(name):
    if finished_by == "marker":
        open(f"{{directory}}/{{name}}.done", "wb").close()
if finished_by != "rename":
    # Two at a time grow. Only where a marker says so may a write end within a line.
    left = {{name: b"".join(text) if finished_by == "marker" else text for name, text in zip(names, texts)}}
    while left:
        name = dice.choice(list(left)[:2])
        count = dice.randrange(1, 2000 if finished_by == "marker" else 8)
        part, left[name] = left[name][:count], left[name][count:]
        with open(f"{{directory}}/{{name}}", "ab") as file:
            file.write(part if finished_by == "marker" else b"".join(part))
        time.sleep(dice.choice([0, 0, 0.001, 0.02]))
        if not left[name]:
            del left[name]
            finish(name)
else:
    for number, (name, text) in enumerate(zip(names, texts)):
        packed = number % 2 == 1
        with open(f"{{directory}}/.{{name}}", "wb") as file:
            for row in text:
                file.write(gzip.compress(row, 1) if packed else row)
        os.rename(f"{{directory}}/.{{name}}", f"{{directory}}/{{name}}" + ".gz" * packed)
        time.sleep(dice.choice([0, 0.1, 0.5]))
open(f"{{directory}}/_END", "wb").close()
"""


@contextmanager
def writing(directory: Path, finished_by: str, seed: int) -> Iterator[None]:
    command = [sys.executable, "-c", WRITER, str(directory), finished_by, str(seed)]
    with subprocess.Popen(command, env=environment()) as process:
        try:
            yield
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("finished_by", ["rename", "marker", "idle"])
def test_killed_at_random_while_files_are_written(finished_by: str, shuffled: bool, tmp_path: Path) -> None:
    directory, out = tmp_path / "in", tmp_path / "out"
    directory.mkdir()
    dice = random.Random(0)
    arguments: list[object] = ["run", "--follow", directory, "--finished-by", finished_by]
    arguments += ["--idle-seconds", 0.3] if finished_by == "idle" else []
    arguments += ["--out", out, "--samples-per-chunk", 30, "--rate", 1500]
    # Every third chunk ends where a block does: the next two have the same place in the sources.
    arguments += ["--shuffle", 90] if shuffled else []
    with writing(directory, finished_by, 1):
        for _ in killed_at_random(arguments, out, dice, 8):
            assert len(set(ids(out))) == len(ids(out))
    found = ids(out)
    assert sorted(found) == list(range(FILES * ROWS))
    if not shuffled:
        for number in range(FILES):
            mine = [row for row in found if row // ROWS == number]
            assert mine == sorted(mine)


def test_a_signal_is_answered_while_nothing_comes_and_waiting_is_told(tmp_path: Path) -> None:
    directory, out = tmp_path / "in", tmp_path / "out"
    directory.mkdir()
    (directory / "a.jsonl").write_bytes(b'{"id":0}\n{"id":1}\n{"id":2}\n')
    process = start("run", "--follow", directory, "--out", out, "--samples-per-chunk", 2)

    def waits() -> bool:
        head = json.loads((out / "head.json").read_bytes()) if (out / "head.json").exists() else {}
        return bool(head.get("note", "").startswith(f"new lines in {directory} (0 files unfinished)"))

    wait_until(waits, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert ids(out) == [0, 1]
    (directory / "_END").touch()
    process = start("run", "--follow", directory, "--out", out, "--samples-per-chunk", 2)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert ids(out) == [0, 1, 2]
