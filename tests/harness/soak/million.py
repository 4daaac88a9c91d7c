"""A stream of a million chunks: made, killed, continued, read, resumed, looked at, verified; each part in a fork."""

import contextlib
import importlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import orjson

from tests.harness.processes.nursery import Nursery, has_ended, kill, leave
from tests.harness.soak import rows as soak_rows
from tests.harness.soak.history import DeclaredOrder

PER_CHUNK: Final = 2
BEFORE: Final = 8  # Ranks that the run began with
AFTER: Final = 6  # Ranks that continue in the middle
BATCH: Final = 2
WINDOW: Final = 4
SEED: Final = 7
STEPS: Final = 20  # Steps that are read after the resume
_ORDER: Final[dict[str, Any]] = {"batch_size": BATCH, "shuffle_window": WINDOW, "seed": SEED}
_STUCK_S: Final = 300.0  # So long may the producer publish nothing at all


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


class Left(Exception):
    """A part has failed, so what follows cannot be measured."""


@dataclass
class Measured:
    chunks: int  # of the stream
    parts: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # seconds, of them CPU, MB at the peak
    first_ms: dict[str, float] = field(default_factory=dict)  # by what was read, up to the first sample
    violations: list[str] = field(default_factory=list)  # what was not as it has to be
    touched: dict[str, dict[str, int]] = field(default_factory=dict)  # by part, files opened and folders listed

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)

    def __str__(self) -> str:
        lines = [f"{self.chunks:,} chunks of {PER_CHUNK} rows"]
        for name, (wall, cpu, memory) in self.parts.items():
            lines.append(f"  {name:24}{wall:>10.2f} s{cpu:>10.2f} s CPU{memory:>8.0f} MB")
        lines += [f"  {name}: {number:,.1f} ms to the first sample" for name, number in self.first_ms.items()]
        return "\n".join([*lines, *(f"  VIOLATION: {violation}" for violation in self.violations)])


def load() -> None:
    for name in ("torch.utils.data", "lazyshard.data.dataset", "lazyshard.cli.main", "lazyshard_producer.cli"):
        importlib.import_module(name)


def measure(
    place: Path, chunks: int, say: Callable[[str], object] = lambda line: None, ranks: Sequence[int] = range(AFTER)
) -> Measured:
    """Does all of it below a folder, which has room for the files; continues in the middle as these ranks."""
    measured = Measured(chunks)
    with Nursery(place / "forks", __name__) as forks, contextlib.suppress(Left):
        for part in (_produce, _read, _look):
            part(_Parts(forks, place / "stream", measured, say), ranks)
            say(str(measured))
    return measured


@dataclass(frozen=True)
class _Parts:
    forks: Nursery
    stream: Path
    measured: Measured
    say: Callable[[str], object]

    def run(self, name: str, work: Callable[..., object], *arguments: object) -> Any:
        """Returns what a part gives; its time and memory are counted, those of its own children as well."""
        return self.reap(name, time.monotonic(), self.forks.fork(_part, work, self.stream, *arguments))

    def reap(self, name: str, started: float, pid: int, *, killed: bool = False) -> Any:
        ended = self.forks.reap(pid, 7200.0)  # So long may a part take
        wall = time.monotonic() - started
        if ended.status != (-signal.SIGKILL if killed else 0):
            self.measured.violations.append(f"{name}: ended with {ended.status}: {ended.last_words}")
            raise Left
        found, self.measured.touched[name], cpu, memory = pickle.loads(ended.left) if ended.left else (None, {}, 0, 0)
        self.measured.parts[name] = wall, cpu, memory
        return found


def _part(work: Callable[..., object], stream: Path, *arguments: object) -> None:
    counts = count_touched(stream)
    found = work(stream, counts, *arguments)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in used)
    leave(pickle.dumps((found, dict(counts), cpu, max(one.ru_maxrss for one in used) / 1000)))


def count_touched(folder: Path) -> Counter[str]:
    """Counts from now on what this process opens and lists below a folder: busy machines do the same."""
    counts: Counter[str] = Counter(open=0, listings=0)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.listdir", "os.scandir") or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if os.fsdecode(arguments[0]).startswith(str(folder)):
            counts["open" if event == "open" else "listings"] += 1

    sys.addaudithook(count)
    return counts


def _produce(parts: _Parts, ranks: Sequence[int]) -> None:
    chunks, stream = parts.measured.chunks, parts.stream
    for name, until, killed in (("first half", chunks // 2, True), ("after kill -9", chunks, False)):
        started, pid = time.monotonic(), parts.forks.fork(_part, _command_of_producer, stream, chunks * PER_CHUNK)
        _wait_for(parts, pid, until)
        if killed:
            kill(pid)
        parts.reap(f"produce, {name}", started, pid, killed=killed)
    parts.measured.check(_published(stream) == chunks, f"{_published(stream)} chunks are published")


def _command_of_producer(stream: Path, counts: object, rows: int) -> None:
    os.fsync = os.fdatasync = lambda fd: None  # Waits for no disk: five million waits would be most of it
    os.environ[soak_rows.TOTAL] = str(rows)
    command = ["run", "--source", soak_rows.SOURCE, "--out", str(stream), "--samples-per-chunk", str(PER_CHUNK)]
    assert importlib.import_module("lazyshard_producer.cli").main([*command, "--no-progress"]) == 0


def _wait_for(parts: _Parts, pid: int, until: int) -> None:
    said = moved = time.monotonic()
    seen = 0
    while not has_ended(pid, 0.05):
        now, published = time.monotonic(), _published(parts.stream)
        if published > seen:
            seen, moved = published, now
        if published >= until:
            return
        if now - moved > _STUCK_S:
            kill(pid)
        if now - said > 30:
            said = now
            parts.say(f"{published:,} chunks")


def _published(stream: Path) -> int:
    try:
        chunks: int = json.loads((stream / "head.json").read_bytes())["chunks"]
    except FileNotFoundError:
        return 0
    return chunks


def _read(parts: _Parts, ranks: Sequence[int]) -> None:
    measured, samples = parts.measured, parts.measured.chunks * PER_CHUNK
    order = DeclaredOrder(PER_CHUNK, WINDOW * PER_CHUNK, SEED, BEFORE)
    order.total = samples
    consumed = parts.run("state", _write_state)  # Where 8 ranks stand that have drawn as much, without drawing it
    order.go_on(replace(order.standing, at=consumed // BEFORE), AFTER)
    declared = [order.draw(BATCH) for _ in range(STEPS)]
    expected = {"first": [0], "last": [samples - 1]}
    expected |= {str(rank): [sample for step in declared for sample in step[rank]] for rank in ranks}
    for task, right in expected.items():
        read, measured.first_ms[task], measured.touched[task] = parts.run(task, _read_as, task)
        measured.check(read == right, f"{task}: {read[:6]} are read, not {right[:6]}")


def _write_state(stream: Path, counts: object) -> int:
    """Writes the state of 8 ranks that stand in the middle; returns its samples: whole steps, but no whole stripes."""
    dataset, step = _opened(stream, 0, BEFORE), BEFORE * BATCH * 2
    consumed = dataset.published().samples // 2 // step * step + step // 2
    stream.with_name("state.json").write_bytes(orjson.dumps(dataset.state_dict(consumed)))
    return int(consumed)


def _opened(stream: Path, rank: int, ranks: int) -> Any:
    from lazyshard import LazyShardedDataset
    from tests.data.options import grouped

    return LazyShardedDataset(stream, dp_rank=rank, dp_size=ranks, **grouped(_ORDER if ranks > 1 else {}))


def _read_as(stream: Path, counts: Counter[str], task: str) -> tuple[list[int], float, dict[str, int]]:
    """Reads the first or the last sample, or on as this one of 6 ranks; returns them, and what the first took."""
    from torch.utils.data import DataLoader

    started = time.perf_counter()
    resumes = task.isdecimal()
    dataset = _opened(stream, int(task), AFTER) if resumes else _opened(stream, 0, 1)
    if resumes:
        dataset.load_state_dict(orjson.loads(stream.with_name("state.json").read_bytes()))
        indices = dataset.rank_indices[: STEPS * BATCH]
    else:
        indices = dataset.rank_indices[:1] if task == "first" else dataset.rank_indices[-1:]
    found = [dataset[indices[0]]]
    first_ms, touched = (time.perf_counter() - started) * 1000, dict(counts)
    if resumes:
        loader = DataLoader(dataset, sampler=indices[1:], batch_size=BATCH, num_workers=1, collate_fn=list)
        found += [one for batch in loader for one in batch]
    assert all(one == soak_rows.row(one["id"]) for one in found), found
    return [one["id"] for one in found], first_ms, touched


def _look(parts: _Parts, ranks: Sequence[int]) -> None:
    measured, chunks = parts.measured, parts.measured.chunks
    status = json.loads(parts.run("status", _command, "status", "--json"))
    told = status["published_chunks"], status["published_samples"], status["ended"]
    measured.check(told == (chunks, chunks * PER_CHUNK, True), f"status tells {told}")
    parts.run("inspect", _command, "inspect", "--json")
    shown = parts.run("sample", _command, "inspect", str(chunks))
    text = json.dumps(soak_rows.row(chunks)["text"])
    measured.check(f'"id": {chunks}' in shown and text in shown, f"inspect shows {shown!r}")
    for options in ([], ["--quick"]):
        verified = json.loads(parts.run(" ".join(["verify", *options]), _command, "verify", "--json", *options))
        measured.check(not verified["findings"], f"verify {options} finds {verified['findings'][:3]}")
        measured.check(verified["chunks"] == chunks, f"verify {options} tells of {verified['chunks']} chunks")


def _command(stream: Path, counts: object, name: str, *arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = importlib.import_module("lazyshard.cli.main").main([name, str(stream), *arguments])
    assert code == 0, code
    return out.getvalue()
