"""A real run of a setting: the producer's own command, and a process for each rank, which reads its batches, waits
for the others, and computes for as long as it is told. What is measured is what the simulation predicts. The clock
begins with the word in `head.json` that so many rows are published as the setting's head start says."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, Final, NamedTuple

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from lazyshard import LazyShardedDataset, Order
from lazyshard.errors import FileInvalid
from lazyshard.format.names import HEAD, RETIRED, SEAL_SUFFIX
from lazyshard.format.records import Head
from lazyshard.simulation import Setting
from lazyshard.stream.waiting import Waker

CONSUMER: Final = "simulated"
LONGEST_S: Final = 120.0  # No part of a real run takes as long


class Trained(NamedTuple):
    ids: list[int]  # of the rows, in order
    began: list[float]  # when each step began, by the monotonic clock, which all processes of a machine share
    waited: list[float]  # how many seconds it waited for rows before each step, by the reader's own word
    ended_s: float  # when the last step ended
    opens: dict[str, int]  # how often it opened files of each kind: head, chunk, retired


class Opens:
    """Counts the opens of this process, by kind of file, from when it is made to when the process ends."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            self.counts[kind(os.path.basename(os.fspath(arguments[0])))] += 1


def kind(name: str) -> str:
    if name in (HEAD, RETIRED):
        return name.partition(".")[0]
    return "chunk" if name.startswith("chunk_") and name.endswith((".jsonl", SEAL_SUFFIX)) else "other"


def rank_process(setting: Setting, directory: Path, rank: int, go: Event, barrier: Barrier, answer: Connection) -> None:
    """Does the work of one rank and answers with a `Trained`, or with the text of what went wrong."""
    try:
        answer.send(_train(setting, directory, rank, go, barrier))
    except BrokenBarrierError:
        answer.send(f"rank {rank}: another rank has failed, or did not come within {LONGEST_S:.0f} s")
    except BaseException as error:
        barrier.abort()
        answer.send(f"rank {rank}: {type(error).__name__}: {error}")


def _train(setting: Setting, directory: Path, rank: int, go: Event, barrier: Barrier) -> Trained:
    opens = Opens()
    if not setting.woken:
        # As on a network filesystem, where nobody hears of another machine's writes.
        Waker._refused = True
    if not go.wait(LONGEST_S):
        raise TimeoutError(f"no start within {LONGEST_S:.0f} s")
    order = Order(shuffle_window=setting.window, micro_batches_per_step=setting.micro_batches)
    ranks = {"dp_rank": rank, "dp_size": setting.ranks, "batch_size": setting.batch, "max_total_samples": setting.rows}
    rest: dict[str, Any] = {**ranks, "consumer": CONSUMER, "max_wait": LONGEST_S}
    dataset = LazyShardedDataset(directory, order=order, **rest)
    indices, every = dataset.rank_indices, setting.checkpoint_steps
    ids: list[int] = []
    began: list[float] = []
    waited: list[float] = []
    for step in range(setting.steps):
        before = dataset.reader.waited_s
        for first in range(step * setting.draws, (step + 1) * setting.draws, setting.batch):
            ids += [row["id"] for row in dataset.__getitems__(list(indices[first : first + setting.batch]))]
        waited.append(dataset.reader.waited_s - before)
        # Gradients are exchanged: no rank goes on before all have had their batch.
        barrier.wait(LONGEST_S)
        began.append(time.monotonic())
        time.sleep(max(0.0, began[-1] + setting.step_seconds - time.monotonic()))
        if every and (step + 1) % every == 0:
            dataset.commit((step + 1) * setting.step_rows, last_epoch=True)
    return Trained(ids=ids, began=began, waited=waited, ended_s=time.monotonic(), opens=dict(opens.counts))


_LOOK_S: Final = 0.002


class RealRunFailed(Exception):
    """A real run did not do its work; says what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a real run was like; see `lazyshard.simulation` for the meaning of each."""

    # what was run, with the head start that there was, and what a step took on average but for the waits: these ranks
    # sleep, and a busy machine lets them sleep for longer.
    setting: Setting
    first_step_s: float  # when the first step began
    end_s: float  # when the last step ended
    stalled_s: float  # seconds before the first step, and from then on those of whoever waited for longest
    peak_chunks: int  # the most chunks on disk at a time
    head_opens: int  # by all ranks
    chunk_opens: int  # likewise

    @property
    def stall_share(self) -> float:
        return self.stalled_s / self.end_s


class Stock(FileSystemEventHandler):
    def __init__(self) -> None:
        self.there: set[str] = set()
        self.peak = 0
        self._lock = threading.Lock()

    def on_any_event(self, event: FileSystemEvent) -> None:
        name = str(event.dest_path or event.src_path)
        if not name.endswith(SEAL_SUFFIX) or event.event_type not in ("created", "moved", "deleted"):
            return
        with self._lock:
            if event.event_type == "deleted":
                self.there.discard(name)
            else:
                self.there.add(name)
            self.peak = max(self.peak, len(self.there))


def measure(setting: Setting, place: Path) -> Measured:
    stream, log, stock = place / "stream", place / "producer.log", Stock()
    stream.mkdir()
    source = _write_source(setting, place)
    producing = _producing(setting, source, stream, log)
    with _ranks(setting, stream) as start, _watched(stock, stream), producing as producer:
        head, began = _await_head(setting, stream, producer, log)
        trained = start()
        if producer.wait(LONGEST_S):
            raise RealRunFailed(f"the producer ended with {producer.returncode}: {_tail(log)}")
    return _judge(replace(setting, head_start=head.samples), trained, began, stock.peak)


@contextlib.contextmanager
def _ranks(setting: Setting, stream: Path) -> Iterator[Callable[[], list[Trained]]]:
    """Makes the processes of all ranks, before there is any thread; gives what starts them and awaits their answers."""
    context = multiprocessing.get_context("fork")
    go, barrier = context.Event(), context.Barrier(setting.ranks)
    pipes = [context.Pipe(duplex=False) for _ in range(setting.ranks)]
    ranks = [
        context.Process(target=rank_process, args=(setting, stream, rank, go, barrier, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()

    def start() -> list[Trained]:
        go.set()
        return [_answer(pipe[0]) for pipe in pipes]

    try:
        yield start
    except BaseException:
        for rank in ranks:
            rank.terminate()
        raise
    finally:
        for rank in ranks:
            rank.join(LONGEST_S)


def _judge(setting: Setting, trained: list[Trained], started: float, peak: int) -> Measured:
    ids = sorted(number for one in trained for number in one.ids)
    wanted = setting.steps * setting.step_rows
    if len(ids) != wanted or len(set(ids)) != wanted or ids[0] < 0 or ids[-1] >= setting.rows:
        raise RealRunFailed(f"expected {wanted} different rows of [0, {setting.rows}), found {len(set(ids))}")
    first = max(one.began[0] for one in trained) - started
    end = max(one.ended_s for one in trained) - started
    # At each step the slowest rank decides.
    stalled = first + sum(map(max, zip(*(one.waited[1:] for one in trained), strict=True)))
    setting = replace(setting, step_seconds=(end - stalled) / setting.steps)
    opens = {f"{name}_opens": sum(one.opens.get(name, 0) for one in trained) for name in ("head", "chunk")}
    return Measured(setting=setting, first_step_s=first, end_s=end, stalled_s=stalled, peak_chunks=peak, **opens)


def _write_source(setting: Setting, place: Path) -> Path:
    path = place / "rows.jsonl"
    with path.open("wb") as file:
        for number in range(setting.rows):
            file.write(_row(setting, number) + b"\n")
    return path


def _row(setting: Setting, number: int) -> bytes:
    row = b'{"id":%d,"text":"' % number
    return row + b"x" * max(0, setting.row_bytes - len(row) - 3) + b'"}'


@contextlib.contextmanager
def _watched(stock: Stock, directory: Path) -> Iterator[None]:
    observer = Observer()
    observer.schedule(stock, str(directory), recursive=False)
    observer.start()
    try:
        yield
    finally:
        observer.stop()
        observer.join()


@contextlib.contextmanager
def _producing(setting: Setting, source: Path, stream: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "lazyshard_producer", "run", "--source", str(source), "--out", str(stream)]
    command += ["--samples-per-chunk", str(setting.samples_per_chunk), "--rate", str(setting.producer_rate)]
    command += ["--retain", setting.retain, "--no-progress"]
    if setting.retain == "consumed":
        command += ["--consumers", CONSUMER]
    if setting.max_ahead is not None:
        command += ["--max-ahead", setting.max_ahead.replace(" ", "")]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def _await_head(setting: Setting, stream: Path, producer: subprocess.Popen[bytes], log: Path) -> tuple[Head, float]:
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError, FileInvalid):
            head = Head.decode((stream / HEAD).read_bytes())
            if head.samples >= setting.head_start:
                return head, time.monotonic() - (time.time() - head.updated_at)
        if producer.poll():
            break
        time.sleep(_LOOK_S)
    raise RealRunFailed(f"the producer published no {setting.head_start} rows: {_tail(log)}")


def _answer(pipe: Connection) -> Trained:
    if not pipe.poll(LONGEST_S):
        raise RealRunFailed(f"a rank did not finish within {LONGEST_S:.0f} s")
    found = pipe.recv()
    if isinstance(found, Trained):
        return found
    raise RealRunFailed(str(found))


def _tail(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split()[-60:])
