"""Rounds on two mounts: producer and consumer die, stop, are taken over, mounts hang or go, until all is consumed."""

import errno
import json
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from lazyshard import LazyShardedDataset, StreamReader
from lazyshard.stream.waiting import READERS
from tests.data.workers import loader
from tests.harness.network.mounts import CACHED, DEFAULT, Mount, Share, why_not
from tests.harness.points.sealed import SealedChunks
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import ids, run_arguments
from tests.harness.tally import Tally

PER_CHUNK: Final = 4
ROWS: Final = 42  # Ten chunks, and a last one of two rows
EVENT_S: Final = 60.0  # How long to wait for what must come; only a failing test ever waits so long
MARGIN_S: Final = 30.0  # What a busy machine may take in addition to the caches
ROW_LINES: Final = [b'{"id":%d,"text":"%s"}' % (number, b"x" * (number % 50)) for number in range(ROWS)]


def source(folder: Path) -> Path:
    path = folder / "source.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in ROW_LINES))
    return path


def arguments(out: Path, path: Path, *more: object) -> list[str]:
    return run_arguments(out, [path], PER_CHUNK, *more)


def check_whole(real: Path) -> None:
    assert ids(real) == list(range(ROWS))
    assert published(real) == -(-ROWS // PER_CHUNK)
    assert json.loads((real / "stream.end").read_bytes())["samples"] == ROWS
    assert not list((real / ".tmp").glob("*"))


class Sealed:  # Watches in a thread that what is sealed is whole, never changes, and stays until the mark says so
    def __init__(self, real: Path) -> None:
        rows = [line.decode() for line in ROW_LINES]
        self._chunks = SealedChunks(real, rows, PER_CHUNK, ordered=True, known={})
        self._over = threading.Event()
        self.wrong: list[str] = []

    def __enter__(self) -> "Sealed":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _look(self) -> None:
        try:
            self._chunks.look(acknowledged=ROWS)
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _run(self) -> None:
        while not self._over.wait(0.05):
            self._look()


@contextmanager
def readers(directory: Path, max_wait: float) -> Iterator[Callable[[], tuple[list[int], list[int]]]]:
    """Reads a stream in threads, whole and as two ranks; yields what waits for the end and gives the ids of both."""
    with ThreadPoolExecutor(3) as pool:
        whole: Future[list[int]] = pool.submit(read_whole, directory, max_wait)
        ranks = [pool.submit(read_rank, directory, max_wait, rank, 2, workers) for rank, workers in ((0, 0), (1, 2))]
        yield lambda: (whole.result(), [number for rank in ranks for number in rank.result()])


def read_whole(directory: Path, max_wait: float) -> list[int]:
    return [row["id"] for row in StreamReader(directory, max_wait=max_wait)]


def read_rank(directory: Path, max_wait: float, rank: int, dp: int, workers: int) -> list[int]:
    dataset = LazyShardedDataset(directory, dp_rank=rank, dp_size=dp, max_wait=max_wait, max_total_samples=ROWS)
    wait = {"timeout": max_wait + EVENT_S} if workers else {}
    batches = loader(dataset, dataset.rank_indices, workers, batch_size=1, **wait)
    return [number for batch in batches for number in batch]


class Child:
    """A function in a process that may hang; `work` is called with what sends to here. `said`: where it logs to."""

    def __init__(self, work: Callable[[Callable[[Any], None]], object], said: Path, no_answer_s: float = 0.3) -> None:
        self._work = work
        self._said = said
        self._no_answer_s = no_answer_s

    def __enter__(self) -> "Child":
        self._mine, theirs = multiprocessing.Pipe(False)
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(EVENT_S)
        self._mine.close()

    def get(self, seconds: float = EVENT_S) -> Any:
        assert self._mine.poll(seconds), f"nothing came within {seconds:.0f} s; it said: {self.said()}"
        return self._mine.recv()

    def ended(self) -> str | None:
        """Returns None while it runs; then the error that it has ended with, empty for none."""
        if self._process.is_alive():
            return None
        try:
            return str(self._mine.recv()) if self._mine.poll() else ""
        except EOFError:
            return ""

    def said(self) -> str:
        return self._said.read_text() if self._said.exists() else ""

    def _run(self, theirs: Connection) -> None:
        logging.getLogger("lazyshard").addHandler(logging.FileHandler(self._said))
        READERS.no_answer_s = self._no_answer_s
        try:
            self._work(theirs.send)
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}")
        theirs.close()


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + EVENT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {EVENT_S:.0f} s: {what}"
        time.sleep(0.01)


def published(real: Path) -> int:
    return len(list(real.glob("chunk_*.completed")))


ROUNDS: Final = 60
FAULTS: Final = 60  # At most so many a round
_STUCK_S: Final = 120.0  # A round that continues for longer after its last fault is stuck

_BY_THE_FILESYSTEM: Final = (  # How a consumer may end, by its mount or name; the next one continues
    *(f"[Errno {number}]" for number in (errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT, errno.EPERM)),
    "StreamMissing: ",
    "CursorTaken: ",
)


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    if (reason := why_not()) is not None:
        tally.notes.append(f"not done: {reason}")
        return
    run_rounds(tally, place, seed, max(1, round(ROUNDS * scale)))


def run_rounds(tally: Tally, place: Path, seed: int, rounds: int) -> None:
    with ExitStack() as stack:
        for name in ("share", "nursery"):
            (place / name).mkdir()
        share = Share(place / "share")
        nursery = stack.enter_context(Commands(place / "nursery"))
        options = {"cached": CACHED, "default": DEFAULT}
        mounts = [stack.enter_context(share.mount(*each)) for each in options.items()]
        for number in range(rounds):
            dice = random.Random(f"{seed}-{number}")
            folder = place / f"round-{number}"
            folder.mkdir()
            one = Round(tally, nursery, share, mounts, folder, dice)
            try:
                one.run()
            except Exception as error:
                one.wrong.append(f"{type(error).__name__}: {error}")
            for wrong in one.wrong:
                tally.violation(f"round {number} of --seed {seed} ({', '.join(one.done)}): {wrong}")
            tally.trial(len(one.done), points=len(set(one.done)))


class Round:
    def __init__(
        self, tally: Tally, nursery: Commands, share: Share, mounts: list[Mount], folder: Path, dice: random.Random
    ) -> None:
        self.wrong: list[str] = []  # what was broken
        self.done: list[str] = []  # the faults that came about, in order
        self._tally, self._nursery, self._mounts, self._dice = tally, nursery, mounts, dice
        self._name = folder.name
        self._real = share.real / folder.name
        self._source = source(folder)
        self._checkpoint = folder / "checkpoint.json"
        self._said = folder / "said"
        self._retains = dice.random() < 0.5
        self._producer: int | None = None
        self._consumer: Child | None = None

    def run(self) -> None:
        try:
            with Sealed(self._real) as sealed:
                last_fault = time.monotonic()
                while not (self._is_produced() and self._is_consumed()):
                    if self.wrong:
                        return
                    if time.monotonic() > last_fault + _STUCK_S:
                        raise AssertionError(f"not finished within {_STUCK_S:.0f} s after the last fault")
                    self._start_who_is_missing()
                    time.sleep(self._dice.uniform(0.02, 0.4))
                    if len(self.done) < FAULTS and self._dice.random() < 0.6:
                        fault = self._dice.choice(self.faults())
                        fault()
                        self.done.append(fault.__name__.strip("_").replace("_", " "))
                        last_fault = time.monotonic()
            self.wrong += sealed.wrong
            self._check()
        finally:
            self._end_consumer()
            if self._producer is not None:
                self._signal(signal.SIGKILL)
                self._nursery.wait(self._producer)

    def faults(self) -> list[Callable[[], None]]:
        return [self._kill_producer, self._take_over, self._kill_consumer, self._hang, self._lose_mount]

    def _kill_producer(self) -> None:
        if self._producer is not None:
            self._signal(signal.SIGKILL)
            self._end_producer()

    def _take_over(self) -> None:
        """The producer stops for a while; another one runs meanwhile, and is killed or stays."""
        if self._producer is None:
            return
        self._signal(signal.SIGSTOP)
        first, self._producer = self._producer, None
        self._start_producer()
        time.sleep(self._dice.uniform(0.1, 1.0))
        os.kill(first, signal.SIGCONT)
        second = self._producer
        assert second is not None
        deadline = time.monotonic() + EVENT_S  # The first one is fenced, or the second one was refused
        while _is_alive(first) and _is_alive(second):
            if time.monotonic() > deadline:
                self.wrong.append(f"two producers have continued beside each other for {EVENT_S:.0f} s")
                os.kill(first, signal.SIGKILL)
            time.sleep(0.02)
        ended, stays = (second, first) if _is_alive(first) else (first, second)
        self._producer = ended
        self._end_producer()
        self._producer = stays

    def _kill_consumer(self) -> None:
        self._end_consumer()

    def _hang(self) -> None:
        with self._dice.choice(self._mounts).hanging():
            time.sleep(self._dice.uniform(0.05, 1.0))

    def _lose_mount(self) -> None:
        mount = self._dice.choice(self._mounts)
        mount.kill()
        time.sleep(self._dice.uniform(0.0, 0.2))
        mount.revive()

    def _start_who_is_missing(self) -> None:
        if self._producer is not None and not _is_alive(self._producer):
            self._end_producer()
        if self._producer is None and not self._is_produced():
            self._start_producer()
        if self._consumer is not None and (error := self._consumer.ended()) is not None:
            if error:
                self._tally.count("consumers that lost their mount or name")
            if error and not any(known in error for known in _BY_THE_FILESYSTEM):
                self.wrong.append(f"the consumer has ended with {error}")
            self._end_consumer()
        if self._consumer is None and not self._is_consumed():
            point = self._dice.choice(self._mounts).point / self._name
            self._consumer = Child(lambda send: _consume(point, self._checkpoint), self._said).__enter__()

    def _start_producer(self) -> None:
        options: list[object] = ["--rate", self._dice.choice((20, 60, 200))]
        if self._retains:
            options += ["--retain", "consumed", "--max-ahead", "4 chunks", "--consumers", "sft"]
        out = self._dice.choice(self._mounts).point / self._name
        self._producer = self._nursery.start(*arguments(out, self._source, *options), no_answer_s=0.3)

    def _end_producer(self) -> None:
        assert self._producer is not None
        status, err = self._nursery.wait(self._producer)
        self._producer = None
        self._tally.count(f"producers that ended with {status}")
        if status not in (0, 5, 6, 7, -signal.SIGKILL) or "Traceback" in err or (status > 0 and "error: " not in err):
            self.wrong.append(f"a producer has ended with {status}: {err[-2000:]}")

    def _end_consumer(self) -> None:
        if self._consumer is not None:
            self._consumer.__exit__()
            self._consumer = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._producer is not None
        with suppress(ProcessLookupError):
            os.kill(self._producer, number)

    def _is_produced(self) -> bool:
        return (self._real / "stream.end").exists()

    def _is_consumed(self) -> bool:
        return len(_restored(self._checkpoint)["ids"]) >= ROWS

    def _check(self) -> None:
        found = _restored(self._checkpoint)["ids"]
        if found != list(range(ROWS)):
            self.wrong.append(f"the consumer has trained {found}")
        if json.loads((self._real / "stream.end").read_bytes())["samples"] != ROWS:
            self.wrong.append("the stream has ended with another number of samples")
        if not (self._real / "retired.json").exists() and ids(self._real) != list(range(ROWS)):
            self.wrong.append(f"the stream holds {ids(self._real)}")


def _consume(point: Path, checkpoint: Path) -> None:
    kept = _restored(checkpoint)
    dataset = LazyShardedDataset(point, dp_rank=0, dp_size=1, max_wait=EVENT_S, max_total_samples=ROWS, consumer="sft")
    if kept["state"] is not None:
        dataset.load_state_dict(kept["state"])
    for index in dataset.rank_indices:
        kept["ids"].append(dataset[index]["id"])
        consumed = len(kept["ids"])
        if consumed % PER_CHUNK == 0 or consumed == ROWS:
            kept["state"] = dataset.state_dict(consumed)
            temporary = checkpoint.with_suffix(".part")
            temporary.write_text(json.dumps(kept))
            os.replace(temporary, checkpoint)
            dataset.commit(consumed, last_epoch=True)


def _restored(checkpoint: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(checkpoint.read_text())
    except FileNotFoundError:
        return {"ids": [], "state": None}
    return found


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
