"""`lazyshard verify` in a process of its own; what it finds: tests/inspection/test_verification*.py."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lazyshard.stream.listing import retire
from tests.cli.commands import DEADLINE_S, contents, lazyshard, on_terminal, started
from tests.stream.damage import each, flip, put, stream
from tests.stream.streams import foreign

EFFORT = re.compile(r" \(\d+\.\d s, ([0-9.,]+ (bytes|kB|MB|GB)/s|rows not read)\)\n")

C1, C2 = "chunk_00001.jsonl", "chunk_00002.jsonl"
OF_ANOTHER = "2 chunks, 3 samples, 9 bytes, ended, without stream.json, so digests are not checked"


def report(*arguments: object) -> tuple[int, list[str]]:
    done = lazyshard("verify", *arguments)
    assert done.stderr == ""
    assert len(EFFORT.findall(done.stdout)) == 1
    return done.returncode, EFFORT.sub("\n", done.stdout).splitlines()


def another(directory: Path) -> None:
    foreign(directory, b"{}\n{}\n", b"{}\n", end=True)


def flipped(directory: Path) -> None:
    each(flip(C1, 1), flip(C1, 10))(stream(directory))


def deleted(directory: Path) -> None:
    retire(stream(directory, 6, end=False), 2, 3)


@pytest.mark.parametrize(
    ("make", "options", "code", "summary"),
    [
        (stream, [], 0, "3 chunks, 5 samples, 45 bytes, ended: no damage"),
        (lambda at: put(C2, b"x")(stream(at, 4, end=False)), [], 0, "2 chunks, 4 samples, 36 bytes, open: 1 left over"),
        (deleted, [], 0, "1 chunk, from 2 on, 2 samples, 18 bytes, open: no damage"),
        (another, [], 0, f"{OF_ANOTHER}: no damage"),
        (another, ["--samples-per-chunk", "3"], 5, f"{OF_ANOTHER}: 1 damaged"),
        (flipped, ["--jobs", "2"], 5, "3 chunks, 5 samples, 45 bytes, ended: 1 damaged"),
        (flipped, ["--quick"], 0, "3 chunks, 5 samples, 45 bytes, ended: no damage"),
    ],
)
def test_summary(make: Callable[[Path], object], options: list[str], code: int, summary: str, tmp_path: Path) -> None:
    make(tmp_path / "stream")
    before = contents(tmp_path / "stream")
    found, lines = report(tmp_path / "stream", *options)
    assert (found, lines[-1]) == (code, f"{tmp_path}/stream: {summary}")
    assert make != flipped or code == 0 or lines[0].startswith("damage: chunk_00001.jsonl: row 0 (byte 0) and 1 more: ")
    assert contents(tmp_path / "stream") == before


JSON = r"""
{"ok": false, "damage": 1, "unchecked": 0, "leftovers": 0, "native": true, "samples_per_chunk": 2, "retired": 0,
 "chunks": 3, "samples": 5, "bytes": 45, "ended": true, "running": false, "quick": false, "findings": [
  {"severity": "damage", "kind": "digest", "file": "chunk_00001.jsonl", "expected": "XXH3 dabf1e4ca7f659b6 as sealed",
   "found": "d9fd6f4cf524f861", "remedy": "restore the file from a copy", "chunk": 1, "field": null, "row": 1,
   "byte": 9, "rows": 1}], "pieces": 0}
"""


def test_json(tmp_path: Path) -> None:
    flip(C1, 10)(stream(tmp_path))
    done = lazyshard("verify", tmp_path, "--json")
    assert (done.returncode, done.stdout.count("\n")) == (5, 1)
    values = json.loads(done.stdout)
    assert values.pop("seconds") >= 0
    assert values.pop("stream_id") == json.loads((tmp_path / "stream.json").read_bytes())["stream_id"]
    assert values == {"stream": str(tmp_path)} | json.loads(JSON)


@pytest.mark.parametrize(("samples", "bar"), [(80, True), (6, False)])
def test_bar_on_a_terminal_where_chunks_are_many(samples: int, bar: bool, tmp_path: Path) -> None:
    code, shown = on_terminal("verify", stream(tmp_path / "stream", samples))
    assert code == 0
    assert ("verifying" in shown and "40/40" in shown) is bar
    assert "no damage" in shown.replace("\r\n", "\n").rstrip("\n").rpartition("\n")[2]


BEGUN = """
import os, sys
from lazyshard.inspection import verification
check = verification.check_in_order

def check_by_others(directory, quick, batches, jobs):
    for found in check(directory, quick, batches * 1000, 2, alone_s=0.0):
        os.write(1, b"begun\\n")  # not by print, which an interrupt may have write a part once more
        yield found

verification.check_in_order = check_by_others
from lazyshard.cli.main import main
sys.exit(main(["verify", sys.argv[1]]))
"""


def test_interrupt(tmp_path: Path) -> None:
    with started("-c", BEGUN, stream(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert (error.count("\n"), "interrupted" in error) == (1, True)
    assert set(out.splitlines()) <= {"begun"}
