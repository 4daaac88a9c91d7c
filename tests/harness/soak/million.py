"""A stream of a million chunks: produced, killed and gone on with, read at both ends, resumed, looked at, verified. Run
by `scripts/soak --million`; each part is a process of its own, so that its time and memory are its own."""

import contextlib
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import orjson

from tests.harness.processes.environment import environment
from tests.harness.soak import rows as soak_rows
from tests.harness.soak.history import DeclaredOrder


@contextmanager
def room(place: Path, chunks: int) -> Iterator[Path]:
    """Gives a folder for the files, and removes it afterwards. Raises OSError: there is no room for so many files."""
    folder = place / "million"
    folder.mkdir()
    files, free = 2 * chunks + 1000, os.statvfs(place)
    if free.f_favail < files or free.f_bavail * free.f_frsize < files * 4096 * 2:
        folder.rmdir()
        raise OSError(f"{place}: {files:,} files do not fit: {free.f_favail:,} may still be made; name another --dir")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


PER_CHUNK: Final = 2
CHUNKS: Final = 1_000_000
BEFORE: Final = 8  # Ranks that the run began with
AFTER: Final = 6  # Ranks that go on in the middle
BATCH: Final = 2
WINDOW: Final = 4
SEED: Final = 7
STEPS: Final = 20  # Steps that are read after the resume

_COMMAND: Final = """
import os, sys
os.fsync = os.fdatasync = lambda fd: None
from lazyshard_producer.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""The real command, which waits for no disk: nobody cuts the power here, and five million waits would be most of it."""

_STUCK_S: Final = 300.0  # So long may the producer publish nothing at all


@dataclass
class Measured:
    chunks: int  # of the stream
    # by name: seconds of wall time, of processor time, and peak memory in MB of each part.
    parts: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)  # further numbers by name
    violations: list[str] = field(default_factory=list)  # what was not as it has to be
    # by what was read, files opened and folders listed up to the first sample.
    touched: dict[str, dict[str, int]] = field(default_factory=dict)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.chunks:,} chunks of {PER_CHUNK} rows"]
        lines += [
            f"  {name:24}{wall:>10.2f} s{cpu:>10.2f} s CPU{memory:>8.0f} MB"
            for name, (wall, cpu, memory) in self.parts.items()
        ]
        lines += [f"  {name:40}{number:>14,.1f}" for name, number in self.figures.items()]
        lines += [f"  VIOLATION: {violation}" for violation in self.violations]
        return "\n".join(lines)


def measure(
    place: Path, chunks: int, say: Callable[[str], object] = lambda line: None, ranks: Sequence[int] = range(AFTER)
) -> Measured:
    """Does all of it below a folder, which has room for the files; goes on in the middle as these ranks."""
    measured = Measured(chunks)
    stream = place / "stream"
    _produce(measured, stream, say)
    say(str(measured))
    _read(measured, stream, ranks)
    say(str(measured))
    _look(measured, stream)
    return measured


def _produce(measured: Measured, stream: Path, say: Callable[[str], object]) -> None:
    command = ["run", "--source", soak_rows.SOURCE, "--out", str(stream), "--samples-per-chunk", str(PER_CHUNK)]
    arguments = [sys.executable, "-c", _COMMAND, *command, "--no-progress"]
    rows = {soak_rows.TOTAL: str(measured.chunks * PER_CHUNK)}
    for name, until, code in (
        ("produce, first half", measured.chunks // 2, -signal.SIGKILL),
        ("produce, after kill -9", measured.chunks, 0),
    ):
        started = time.monotonic()
        with subprocess.Popen(arguments, env=environment() | rows, stderr=subprocess.PIPE) as process:
            _wait_for(stream, until, process, lambda line, name=name: say(f"{name}: {line}"))  # type: ignore[misc]
            if code:
                process.kill()
            assert process.stderr is not None
            words = process.stderr.read()[-2000:].decode()
            _part(measured, name, started, process)
        if process.returncode != code:
            measured.violations.append(f"{name}: ended with {process.returncode}: {words}")
            raise SystemExit(str(measured))
    measured.check(_published(stream) == measured.chunks, f"{_published(stream)} chunks are published")


def _wait_for(stream: Path, until: int, process: subprocess.Popen[bytes], say: Callable[[str], object]) -> None:
    said = moved = time.monotonic()
    seen = 0
    # Not reaped: wait4 is to tell what it took.
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        now, published = time.monotonic(), _published(stream)
        if published > seen:
            seen, moved = published, now
        if published >= until:
            return
        if now - moved > _STUCK_S:
            process.kill()
        if now - said > 30:
            said = now
            say(f"{published:,} chunks")
        time.sleep(0.05)


def _read(measured: Measured, stream: Path, ranks: Sequence[int]) -> None:
    samples = measured.chunks * PER_CHUNK
    tasks = ["first", "last", "state", *map(str, ranks)]
    command = [sys.executable, "-m", "tests.harness.soak.million_reading", str(stream), *tasks]
    told = _run(measured, "read", command).splitlines()
    found: dict[str, Any] = {task: orjson.loads(line) for task, line in zip(tasks, told, strict=True)}
    order = DeclaredOrder(PER_CHUNK, WINDOW * PER_CHUNK, SEED, BEFORE)
    order.total = samples
    # Where 8 ranks stand that have drawn as much, without drawing it.
    order.go_on(replace(order.standing, at=found.pop("state")["consumed"] // BEFORE), AFTER)
    declared = [order.draw(BATCH) for _ in range(STEPS)]
    expected = {"first": [0], "last": [samples - 1]}
    expected |= {str(rank): [sample for step in declared for sample in step[rank]] for rank in ranks}
    for task, one in found.items():
        name = f"resume as rank {task} of {AFTER}" if task.isdecimal() else f"the {task} sample"
        measured.figures[f"{name}: ms to the first sample"] = one["first_ms"]
        measured.figures[f"{name}: MB, torch included"] = one["mb"]
        measured.touched[task] = one["touched"]
        read, right = one["samples"], expected[task]
        measured.check(read == right, f"{name}: {read[:6]} are read, not {right[:6]}")


def _look(measured: Measured, stream: Path) -> None:
    status = json.loads(_run(measured, "status", _command("status", stream, "--json")))
    told = status["published_chunks"], status["published_samples"], status["ended"]
    measured.check(told == (measured.chunks, measured.chunks * PER_CHUNK, True), f"status tells {told}")
    _run(measured, "inspect", _command("inspect", stream, "--json"))
    shown = _run(measured, "inspect, one sample", _command("inspect", stream, str(measured.chunks)))
    text = json.dumps(soak_rows.row(measured.chunks)["text"])
    measured.check(f'"id": {measured.chunks}' in shown and text in shown, f"inspect shows {shown!r}")
    for name, options in (("verify --quick", ["--quick"]), ("verify", [])):
        verified = json.loads(_run(measured, name, _command("verify", stream, "--json", *options)))
        measured.check(not verified["findings"], f"{name} finds {verified['findings'][:3]}")
        measured.check(verified["chunks"] == measured.chunks, f"{name} tells of {verified['chunks']} chunks")


def _command(name: str, stream: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "lazyshard.cli", name, str(stream), *arguments]


def _run(measured: Measured, name: str, command: Sequence[str]) -> str:
    """Returns what a command printed; its time and memory are counted, those of its own children as well."""
    started = time.monotonic()
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        out, err = process.stdout.read().decode(), process.stderr.read().decode()
        _part(measured, name, started, process)
    if process.returncode:
        measured.violations.append(f"{name}: ended with {process.returncode}: {err[-2000:]}")
        raise SystemExit(str(measured))
    return out


def _part(measured: Measured, name: str, started: float, process: subprocess.Popen[bytes]) -> None:
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall, cpu = time.monotonic() - started, used.ru_utime + used.ru_stime
    measured.parts[name] = wall, cpu, used.ru_maxrss / 1000


def _published(stream: Path) -> int:
    try:
        chunks: int = json.loads((stream / "head.json").read_bytes())["chunks"]
    except FileNotFoundError:
        return 0
    return chunks


def count_touched(folder: Path) -> Counter[str]:
    """Begins to count what this process opens and lists below a folder: numbers that do not depend on how busy the
    machine is. Returns the counts: `open` of files, `listings` of folders."""
    counts: Counter[str] = Counter(open=0, listings=0)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.listdir", "os.scandir") or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if os.fsdecode(arguments[0]).startswith(str(folder)):
            counts["open" if event == "open" else "listings"] += 1

    sys.addaudithook(count)
    return counts


def main() -> int:
    """Runs a module as `python -m` would, its output left out, and prints those counts as a JSON line."""
    folder, module, *arguments = sys.argv[1:]
    counts = count_touched(Path(folder))
    sys.argv = [module, *arguments]
    code: Any = 0
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code
    print(orjson.dumps(counts).decode())
    return int(code or 0)


if __name__ == "__main__":
    raise SystemExit(main())
