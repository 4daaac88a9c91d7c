"""Shortage of memory is a MemoryError and an exit code of its own, never a bad row; each in a process with a limit."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter
from tests.harness.processes.environment import DEADLINE_S, environment
from tests.harness.processes.producing import ids, run

pytestmark = pytest.mark.full

LIMIT: Final = 512 << 20
LONG: Final = 44 << 20
OUT_OF_MEMORY: Final = 71  # EX_OSERR of sysexits.h
ROWS: Final = (b'{"id":0}\n', b'{"id":1,"text":"%s"}\n' % (b"x" * LONG), b'{"id":2}\n')
RUN: Final = ("run", "--samples-per-chunk", "2", "--max-row-bytes", str(2 * LONG))


def limited(*command: object, limit: int = LIMIT) -> subprocess.CompletedProcess[str]:
    def limit_itself() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    arguments = [sys.executable, "-W", "ignore", *map(str, command)]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": False}
    return subprocess.run(arguments, env=environment(), preexec_fn=limit_itself, timeout=DEADLINE_S, **quiet)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "rows.jsonl"
    path.write_bytes(b"".join(ROWS))
    return path


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stream") / "stream"
    with ChunkWriter(path, samples_per_chunk=2) as writer:
        for row in ROWS:
            writer.write(row)
    return path


@pytest.mark.parametrize(
    "more",
    [("--on-bad-row", "quarantine"), ("--on-bad-row", "skip", "--transform", "builtins:dict", "--workers", "1")],
    ids=" ".join,
)
def test_a_producer_stops_and_goes_on(more: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = (*RUN, "--source", source, "--out", out, *more)
    done = limited("-m", "lazyshard_producer", *command)
    assert done.returncode == OUT_OF_MEMORY, done.stderr
    assert "Traceback" not in done.stderr
    assert not (out / "quarantine.jsonl").exists()
    head = json.loads((out / "head.json").read_text())
    assert (head["state"], head["ended"]) == ("failed", False)

    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "refused_rows=0\n" in done.stderr
    assert ids(out) == [0, 1, 2]


def test_a_long_bad_row_does_not_kill_a_producer(tmp_path: Path) -> None:
    text = tmp_path / "rows.jsonl"
    text.write_bytes(ROWS[0] + b"x" * (12 << 20) + b"\n" + ROWS[2])
    command = (*RUN, "--source", text, "--out", tmp_path / "out", "--on-bad-row", "quarantine")
    done = limited("-m", "lazyshard_producer", *command)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "out" / "quarantine.jsonl").read_bytes().splitlines()
    assert json.loads(line)["row"] == "x" * (12 << 20)


PROGRAM: Final = """
import resource, sys
from lazyshard import BadRows, EncodeCache, LazyShardedDataset, LazyShardedStream, StreamReader

stream, cache, late = sys.argv[1:]
if late == "late":
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (400 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

def dataset(**more):
    return LazyShardedDataset(stream, dp_rank=0, dp_size=1, bad_rows=BadRows(limit=None), **more)

for look in (
    lambda: StreamReader(stream).read(1),
    lambda: dataset()[1],
    lambda: dataset().__getitems__([0, 1]),
    lambda: dataset(encode_fn=dict)[1],
    lambda: dataset(encode_fn=dict, cache=EncodeCache(cache, fingerprint={'of': 'a test'}))[1],
    lambda: list(LazyShardedStream(dataset())),
):
    try:
        found = look()
    except BaseException as error:
        print(type(error).__name__)
    else:
        print("read", len(str(found)))
"""


@pytest.mark.parametrize("late", ["early", "late"])
def test_no_sample_is_substituted(late: str, stream: Path, tmp_path: Path) -> None:
    limit = 1 << 30 if late == "early" else resource.RLIM_INFINITY
    done = limited("-c", PROGRAM, stream, tmp_path, late, limit=limit)
    assert (done.returncode, done.stdout.split()) == (0, ["MemoryError"] * 6), done.stderr


@pytest.mark.parametrize("command", [("verify", "--jobs", "2"), ("inspect", "1")], ids=" ".join)
def test_commands_say_so(command: tuple[str, ...], stream: Path) -> None:
    done = limited("-m", "lazyshard.cli", command[0], stream, *command[1:])
    assert (done.returncode, done.stdout) == (OUT_OF_MEMORY, "")
    assert len(done.stderr.splitlines()) == 1


BOUND: Final = """
import os, resource
import orjson
from lazyshard.memory import LIMITED, dumps, loads

assert LIMITED
for text in (
    b'{"a":"' + b"x" * (2 << 20) + b'"}',
    b'{"a":[' + b"1000000000," * 200_000 + b"1]}",
    b'{"a":[' + b"[]," * 200_000 + b"1]}",
    b'{"a":[' + b'{"a":1},' * 100_000 + b"1]}",
    b"{" + b",".join(b'"%d":%d' % (i, i) for i in range(100_000)) + b"}",
    '{"a":"'.encode() + "\\u00e9".encode() * (1 << 20) + b'"}',
):
    for call, given in ((loads, text), (dumps, orjson.loads(text))):
        pages = int(open("/proc/self/statm").read().split()[0])
        codes = []
        for room in range(0, 140 << 20, 20 << 20):
            child = os.fork()
            if not child:
                limit = pages * resource.getpagesize() + room
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                try:
                    call(given)
                except MemoryError:
                    os._exit(1)
                os._exit(0)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        # With more room there is no shortage any more, and it never crashes.
        assert codes == sorted(codes, reverse=True) and set(codes) == {0, 1}, (call.__name__, text[:20], codes)
"""


def test_orjson_does_not_crash_however_much_there_is() -> None:
    done = limited("-c", BOUND, limit=1 << 40)
    assert done.returncode == 0, done.stderr
