"""`lazyshard status` in processes of its own; what it says of looks that are made up: test_status_view.py."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lazyshard.stream.listing import retire
from tests.cli.commands import environment, lazyshard, terminal
from tests.inspection.surveyed import checkpoint, edit_head, reads
from tests.stream.streams import produce, wait_until

TWO_HOURS_S = 7201.0  # Two hours, and nearly a minute until that is said otherwise


def looked(*arguments: object) -> Any:
    done = lazyshard("status", *arguments, "--json")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    return json.loads(done.stdout)


def test_live_stream_is_looked_at_and_left_as_it_is(tmp_path: Path) -> None:
    stream = produce(tmp_path / "stream", 20, end=False)
    then = time.time() - TWO_HOURS_S
    checkpoint(stream, "sft", 11, 5, then)
    reads(stream, "sft", 7, then)
    retire(stream, 4, 10)
    os.utime(stream / "chunk_00005.jsonl.completed", (then, then))
    edit_head(stream, host="node7", pid=12345, updated_at=then)
    before = {str(path): path.stat().st_mtime_ns for path in (stream, *stream.rglob("*"))}
    done = lazyshard("status", stream)
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        "published     10 chunks, 20 samples (2 a chunk); live",
        "  process     12345 on node7, heartbeat 2 h 0 min old",
        "  checkpoint  11 samples, done with 5 chunks; 2 h 0 min old",
        "  lag         9 samples not in a checkpoint",
        "  keeps       5 chunks from deletion, the oldest 2 h 0 min old",
        "  reading     needs 7 chunks, 3 chunks ahead of it; 2 h 0 min old",
    ):
        assert line in done.stdout.splitlines()
    assert {str(path): path.stat().st_mtime_ns for path in (stream, *stream.rglob("*"))} == before


PRODUCER = """
import sys, time
from lazyshard import ChunkWriter
writer = ChunkWriter(sys.argv[1], 2)
writer.write({}), writer.write({})
print("published", flush=True)
time.sleep(3600)
"""


def test_killed_producer_is_dead_at_once_or_once_its_heartbeats_are_missed(tmp_path: Path) -> None:
    def producer(**head: Any) -> tuple[str, bool, bool]:
        if head:
            edit_head(tmp_path, **head)
        found = looked(tmp_path)["producer"]
        return found["state"], found["process_is_gone"], found["process_has_ended"]

    command = [sys.executable, "-c", PRODUCER, str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"published\n"
        assert producer(updated_at=time.time() - 30) == ("running", False, False)
        child.kill()
        child.wait()
    assert producer() == ("dead", True, True)
    # Of another machine, by what it says, only that it is silent can be told.
    assert producer(updated_at=time.time(), process="elsewhere")[0] == "running"
    assert producer(updated_at=time.time() - 30, process="elsewhere") == ("dead", True, False)
    assert producer(updated_at=time.time() + 1)[:2] == ("running", True)


class Watch(NamedTuple):
    process: "subprocess.Popen[str]"

    def line(self) -> str:
        assert self.process.stdout is not None
        found: str = self.process.stdout.readline()
        assert found, self.process.communicate()
        return found

    def look_until(self, condition: Callable[[Any], bool]) -> Any:
        found: Any = None
        while found is None or not condition(found):
            found = json.loads(self.line())
        return found


@contextlib.contextmanager
def watching(stream: Path, *arguments: str, stdout: int = subprocess.PIPE, **variables: str) -> Iterator[Watch]:
    words = ["status", "--watch", "--interval", "0.1", str(stream), *arguments]
    command = [sys.executable, "-m", "lazyshard.cli", *words]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment() | variables, text=True, **pipes) as process:
        try:
            yield Watch(process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert (process.returncode, err) == (130, "")
        finally:
            process.kill()


def test_watch_as_json_follows_the_stream(tmp_path: Path) -> None:
    with watching(tmp_path, "--json") as watch:
        assert json.loads(watch.line())["error"].startswith(f"{tmp_path}: ")
        produce(tmp_path, 20, end=False)
        edit_head(tmp_path, state="running", rate=4.0)
        now = time.time()
        reads(tmp_path, "sft", 2, now)
        first = watch.look_until(lambda found: found["error"] is None and bool(found["consumers"]))
        assert (first["consumers"][0]["read_chunks_per_s"], first["published_chunks_per_s"]) == (None, 2.0)
        reads(tmp_path, "sft", 6, now + 1)
        reader = watch.look_until(lambda found: found["consumers"][0]["needs_chunks"] == 6)["consumers"][0]
        assert (reader["read_chunks_per_s"], reader["read_samples_per_s"]) == (4.0, 8.0)
        assert (reader["ahead_chunks"], reader["supply"], reader["starving_in_s"]) == (4, "shrinking", 2.0)
        produce(tmp_path, 22)
        assert watch.look_until(lambda found: found["ended"])["published_chunks"] == 11


def test_watch_without_a_terminal_prints_pages_once_the_stream_has_come(tmp_path: Path) -> None:
    stream = tmp_path / "to come"
    with watching(stream) as watch:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\n", watch.line())
        assert watch.line().startswith(f"{stream}: no stream yet")
        produce(stream, 4)
        while not watch.line().startswith("band          ++"):
            pass


def test_watch_on_a_terminal_keeps_the_page_in_its_place(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    with terminal() as (fd, shown), watching(tmp_path, stdout=fd, TERM="xterm", COLUMNS="60", LINES="40"):
        wait_until(lambda: shown.count(b"Ctrl-C to quit") >= 2, "two pages")
        edit_head(tmp_path, state="failed")
        wait_until(lambda: b"has failed" in shown, "a page that says otherwise")
    text = bytes(shown)
    # The cursor goes up over the old page and is there again in the end; nothing is cleared as a whole.
    assert b"\x1b[1A" in text
    assert b"\x1b[2J" not in text
    assert text.rstrip().endswith(b"\x1b[?25h")
    lines = re.sub(rb"\x1b\[[0-9?]*[a-zA-Z]", b"", text).split(b"\n")
    assert max(len(line.strip()) for line in lines) <= 60 + len(str(tmp_path))
