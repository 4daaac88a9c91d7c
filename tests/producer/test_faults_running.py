"""The list of what goes wrong while a producer runs, and what is said of it. Most has a test of its own already:

a second producer exits, naming the first       test_two_producers.test_the_second_one_changes_nothing_of_the_first
a stopped one that wakes is fenced              test_two_producers.test_stopped_at_any_call_and_taken_over,
                                                .test_one_that_wakes_while_the_other_is_at_work, ._deletes_nothing
clock jumps: no effect                          here; of readers: tests/stream/test_reader
read-only                                       test_full_disk.test_read_only,
                                                test_small_disk.test_a_filesystem_that_turns_read_only
disk full                                       test_full_disk.test_disk_full, test_small_disk (at any write)
no inodes                                       test_small_disk.test_no_inode_is_left_at_any_file
EIO at fsync: not sealed, written anew          here (each one); test_exactly_once_calls (any call)
a share hangs: "no answer for 60 s"             test_watchdog
the stream's directory is removed: stop         here; of readers: tests/stream/test_reader
names with `..`, absolute, NUL, too long        here; names in files: test_follow_resume, tests/format/test_names
a checkpoint that does not fit                  tests/stream/test_run_state, tests/data/test_state
a source was replaced or truncated; growth      test_sources.test_changed_sources_are_refused, .test_grown_and_*,
                                                test_jsonl, test_compressed, test_follow_resume (mended lines too)
bad rank or size                                tests/data/test_rank
the producer never returns                      here; with its fields: test_reader (as above), tests/data/test_live
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.errors import WaitTimeout
from lazyshard.stream import StreamReader
from lazyshard_producer.cli import main
from tests.harness.processes.producing import (
    assert_one_line,
    ids,
    published,
    rows,
    run,
    run_arguments,
    start,
    wait_until,
)

FAKETIME: Final = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


# Each is gone through by one fsync after another: of the directories made, of data, seal, head and end.
FSYNCS: Final = range(1, 60)


def test_every_fsync_that_fails_publishes_nothing_and_the_next_run_writes_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(rows(0, 5) + b"bad\n" + rows(5, 10))
    fsync, failures = os.fsync, 0
    for number in FSYNCS:
        out, left = tmp_path / str(number), [number]
        options = run_arguments(out, [source], 4, "--on-bad-row", "quarantine", "--no-progress")

        def failing(fd: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fsync(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            code = main(options)
        said = capsys.readouterr().err
        if left[0] > 0:
            assert (code, failures > 5) == (0, True)
            break
        if code != 0:
            # Else it was a hint to readers, which comes with the next chunk or at the end.
            assert code == 7
            assert_one_line(said, "Input/output error", str(out))
            failures += 1
            sealed = ids(out)
            assert sealed == list(range(len(sealed)))
        assert main(options) == 0
        capsys.readouterr()
        assert ids(out) == list(range(10))
        assert [json.loads(line)["row"] for line in (out / "quarantine.jsonl").read_bytes().splitlines()] == ["bad"]
        assert list((out / ".tmp").iterdir() if (out / ".tmp").exists() else []) == []
    else:
        raise AssertionError("there are more of them")


def test_the_stream_is_removed(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 200))
    with start(*run_arguments(out, [source], 10, "--rate", 100)) as process:
        wait_until(lambda: published(out) >= 1, process)
        out.rename(tmp_path / "away")
        shutil.rmtree(tmp_path / "away")
        _, said = process.communicate(timeout=60)
    assert process.returncode == 7
    assert_one_line(
        said,
        f"error: {out}: the stream's directory is gone, with what was published in it: it was removed, moved or "
        "unmounted meanwhile. Put it back and run the same command again to go on; without it that command begins anew",
    )
    assert not out.exists()
    assert run(*run_arguments(out, [source], 10)).returncode == 0
    assert ids(out) == list(range(200))


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
        head = json.loads((out / "head.json").read_bytes())
        return int(head["chunks"]) if time.gmtime(head["updated_at"]).tm_year == year else -1

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


PATHS: Final = {
    "nothing": ("", 2),
    "NUL": ("a\0b", 2),
    "300 characters": ("x" * 300, 2),
    "300 characters below": ("a/b/" + "x" * 300, 2),
    "6,001 characters": ("/x" * 3000 + "/", 2),
    "above the source": ("..", 4),
    "a file": ("../in/a.jsonl", 5),
    "below a file": ("../in/a.jsonl/x", 5),
    "a device": ("/dev/null", 5),
    "a link to nothing": ("link", 5),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_cannot_be_a_streams_is_refused_and_nothing_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, code = PATHS[name]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(rows(0, 5))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path / "here")
    assert main(run_arguments(Path("out"), [Path("../in/a.jsonl")], 5, "--out", path)) == code
    assert_one_line(capsys.readouterr().err)
    assert sorted(os.listdir(tmp_path)) == ["here", "in"]
    assert os.listdir(tmp_path / "here") == ["link"]
    assert os.listdir(tmp_path / "in") == ["a.jsonl"]


NAMES: Final = {
    "--consumers": ("../x", "/etc/x", "a\0b", "..", "x" * 300),
    # A file of the last name never comes: it would be waited for without end.
    "--end-marker": ("../x", "/etc/x", "..", "a\0b", "x" * 300),
    "--marker": ("../{name}", "a\0{name}", "x" * 300 + "{name}"),
    "--pattern": ("../*.jsonl", "a\0b"),
}


@pytest.mark.parametrize("option", NAMES)
def test_a_name_that_becomes_part_of_a_path_is_checked_first(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "--follow", "in", "--out", "out", "--samples-per-chunk", "5", "--finished-by", "marker"]
    for name in NAMES[option]:
        assert main([*arguments, option, name]) == 2
        assert_one_line(capsys.readouterr().err, f"{option}: ")
        assert os.listdir(tmp_path) == ["in"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def replace(path: Path) -> None:
    path.write_bytes(rows(500, 600))


def remove(path: Path) -> None:
    path.unlink()


def forbid_nothing(path: Path) -> None:
    path.write_bytes(rows(0, 60))


CHANGES: Final[dict[str, tuple[Callable[[Path], None], int, str]]] = {
    "cut": (cut, 4, "expected at least the 500 bytes that were read, found 480: the file was truncated or replaced"),
    "replaced": (replace, 4, "not the file whose rows are published: expected XXH3 "),
    "removed": (remove, 4, "expected a readable file, found no such file or directory"),
    "grown": (forbid_nothing, 0, ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_is_not_what_it_was(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 20) + b"bad\n")
    arguments = run_arguments(out, [source], 10, "--no-progress")
    assert main(arguments) == 3
    source.write_bytes(rows(0, 20))
    capsys.readouterr()
    way, code, said = CHANGES[change]
    way(source)
    assert main(arguments) == code
    if code == 0:
        assert ids(out) == list(range(60))
        return
    assert_one_line(capsys.readouterr().err, f"{source}: {said}")
    assert ids(out) == list(range(20))
    source.write_bytes(rows(0, 30))  # put back, and grown
    assert main(arguments) == 0
    assert ids(out) == list(range(30))


def test_a_producer_that_never_returns(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 15) + b"bad\n")
    assert run(*run_arguments(out, [source], 10)).returncode == 3
    head: dict[str, Any] = json.loads((out / "head.json").read_bytes())
    head["updated_at"] -= 3600
    (out / "head.json").write_text(json.dumps(head))
    reader = StreamReader(out, max_wait=0)
    assert reader.read(9) == {"id": 9, "text": "row 9"}
    with pytest.raises(WaitTimeout) as caught:
        reader.read(10)
    assert caught.value.state == "failed"
    assert caught.value.heartbeat_age is not None and caught.value.heartbeat_age >= 3600
    for part in (f"waiting for chunk 1 of {out}", "10 samples are published", "has failed", "a.jsonl:16: byte "):
        assert part in str(caught.value)
