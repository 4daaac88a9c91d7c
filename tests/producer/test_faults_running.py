"""What goes wrong while a producer runs, and is no affair of another file here.

Disks: limits/test_small_disk; two producers: test_two_producers; a share that hangs: test_loop.
Sources that were changed: rows/test_going_on, test_check, sources/test_sources.
"""

import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.errors import WaitTimeout
from lazyshard.stream import StreamReader
from lazyshard_producer.cli import main
from tests.harness.processes.producing import assert_one_line, head, ids, rows, run_arguments, start, wait_until

FAKETIME: Final = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


def removes(row: dict[str, Any]) -> dict[str, Any]:
    """At the 50th row removes the stream's directory, which is told in the rows."""
    if row["id"] == 50:
        Path("out").rename("away")
        shutil.rmtree("away")
    return row


def test_stream_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(rows(0, 200))
    arguments = run_arguments(Path("out"), [Path("a.jsonl")], 10, "--no-progress")
    assert main([*arguments, "--transform", f"{__name__}:removes"]) == 7
    assert_one_line(capsys.readouterr().err, "error: out: the stream's directory is gone")
    assert not Path("out").exists()
    assert main(arguments) == 0
    assert ids(Path("out")) == list(range(200))


@pytest.mark.skipif(not FAKETIME, reason="needs libfaketime")
def test_clock_jumps_have_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, out, clock = tmp_path / "pipe", tmp_path / "out", tmp_path / "clock"
    os.mkfifo(pipe)

    def jump(year: int) -> None:
        """The file is looked at for every call, so it is replaced whole."""
        new = clock.with_suffix(".new")
        new.write_text(f"@{year}-07-01 00:00:00")
        new.replace(clock)

    def published_in(year: int) -> int:
        told = head(out)
        return int(told["chunks"]) if time.gmtime(told["updated_at"]).tm_year == year else -1

    jump(2030)
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(FAKETIME[0]))
        patch.setenv("FAKETIME_TIMESTAMP_FILE", str(clock))
        patch.setenv("FAKETIME_NO_CACHE", "1")
        patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        # A pipe is waited for by poll: libfaketime 0.9.10 breaks time.sleep of Python 3.11.
        process = start(*run_arguments(out, [pipe], 10, "--log-every-seconds", "0.1"))
    with process, pipe.open("wb", buffering=0) as writer:
        wait_until((out / "head.json").exists, process)
        for number, year in enumerate((2030, 2001, 2036, 1971)):
            jump(year)
            writer.write(rows(10 * number, 10 * number + 10))
            wait_until(partial(lambda year, chunks: published_in(year) == chunks, year, number + 1), process)
            reader = StreamReader(out, max_wait=0)
            assert reader.read(10 * number)["id"] == 10 * number
            with pytest.raises(WaitTimeout):
                reader.read(10 * number + 10)
        writer.close()
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert [line for line in said.splitlines() if "warning" in line] == []
    assert ids(out) == list(range(40))


def test_path_of_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(rows(0, 5))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path / "here")
    for path, code in (
        ("", 2),
        ("a\0b", 2),
        ("x" * 300, 2),
        ("a/b/" + "x" * 300, 2),
        ("/x" * 3000 + "/", 2),
        ("..", 4),  # above the source
        ("../in/a.jsonl", 5),
        ("../in/a.jsonl/x", 5),
        ("/dev/null", 5),
        ("link", 5),
    ):
        assert main(run_arguments(Path("out"), [Path("../in/a.jsonl")], 5, "--out", path)) == code
        assert_one_line(capsys.readouterr().err)
        assert [os.listdir(tmp_path / name) for name in ("in", "here")] == [["a.jsonl"], ["link"]]
        assert sorted(os.listdir(tmp_path)) == ["here", "in"]
