"""Runs the command, in a process of its own or in this one, and reads what it has published."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from lazyshard.format.records import chunk_name, seal_name
from lazyshard.format.seal import Seal
from lazyshard_producer.configuration.settings import SourceSettings
from tests.harness.processes.commands import run_apart
from tests.harness.processes.environment import DEADLINE_S, environment


def start(
    *arguments: object, stdin: int = subprocess.DEVNULL, cwd: Path | None = None, **options: Any
) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "lazyshard_producer", *map(str, arguments)]
    options |= {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment(), cwd=cwd, **options)


@contextmanager
def running(*arguments: object, **options: Any) -> "Iterator[subprocess.Popen[str]]":
    with start(*arguments, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def run(*arguments: object, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return run_apart([str(argument) for argument in arguments], environment(), cwd or Path.cwd(), DEADLINE_S)


def run_arguments(out: Path, sources: Sequence[Path], samples_per_chunk: int = 10, *more: object) -> list[str]:
    pairs = [part for source in sources for part in ("--source", str(source))]
    return ["run", *pairs, "--out", str(out), "--samples-per-chunk", str(samples_per_chunk), *map(str, more)]


def plain_sources(paths: Iterable[str]) -> tuple[SourceSettings, ...]:
    return tuple(SourceSettings(path=path) for path in paths)


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def catches(pid: int, number: int) -> bool:
    caught = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)


def head(out: Path) -> dict[str, Any]:
    """The stream's head; empty where there is none yet."""
    try:
        found: dict[str, Any] = json.loads((out / "head.json").read_bytes())
    except FileNotFoundError:
        return {}
    return found


def published(out: Path) -> int:
    chunks: int = head(out).get("chunks", 0)
    return chunks


def refused(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_bytes().splitlines()]


def rows(first: int, last: int) -> bytes:
    return b"".join(b'{"id":%d,"text":"row %d"}\n' % (number, number) for number in range(first, last))


def ids(out: Path) -> list[int]:
    """Ids of all published rows, each checked against its seal; nothing but sealed chunks may be there."""
    found = []
    for chunk in range(len(list(out.glob("chunk_*.completed")))):
        seal = Seal.decode((out / seal_name(chunk)).read_bytes(), chunk)
        lines = (out / chunk_name(chunk)).read_bytes().splitlines(keepends=True)
        assert [xxhash.xxh3_64_intdigest(line) for line in lines] == seal.digests.tolist()
        assert all(line.endswith(b"}\n") for line in lines)
        found += [row["id"] for line in lines for row in rows_of(line)]
    return found


def rows_of(line: bytes) -> list[dict[str, Any]]:
    """The rows of a pack, or the row that a line is; of a sequence of `scenes.rows.tokenized` a row for each token."""
    row = json.loads(line)
    if "position_ids" in row:
        pairs = zip(row["input_ids"], row["labels"], strict=True) if isinstance(row["labels"], list) else ()
        return [{"id": token, "copy": None if label < 0 else label} for token, label in pairs]
    pack: list[dict[str, Any]] = row.get("pack", [row])
    return pack


def seal(out: Path, chunk: int) -> Any:
    return json.loads((out / seal_name(chunk)).read_bytes())


def lengths(out: Path) -> list[int]:
    found: list[int] = []
    for chunk in range(len(list(out.glob("chunk_*.completed")))):
        tokens = Seal.decode((out / seal_name(chunk)).read_bytes(), chunk).tokens
        assert tokens is not None
        found += tokens.tolist()
    return found


def chunk_files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("chunk_*.jsonl")}


def assert_one_line(text: str, *parts: str) -> None:
    """Whether there is one line of error and nothing of a traceback; lines of the log may be around it."""
    errors = [line for line in text.splitlines() if "error: " in line]
    assert len(errors) == 1 and "Traceback" not in text, text
    assert all(part in errors[0] for part in parts), text
