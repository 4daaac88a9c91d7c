"""What the network tests and the sweep run on two mounts: producers by the real command, and readers of each kind."""

from __future__ import annotations

import json
import logging
import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from lazyshard import LazyShardedDataset, StreamReader
from lazyshard.format.seal import Seal
from lazyshard.stream.watchdog import READERS
from tests.data.workers import ids as collate
from tests.data.workers import loader
from tests.producer.commands import ids, run_arguments

PER_CHUNK: Final = 4
ROWS: Final = 42
"""Ten chunks, and a last one of two rows."""

EVENT_S: Final = 60.0
"""How long to wait for what must come; only a failing test ever waits so long."""

MARGIN_S: Final = 30.0
"""What a busy machine may take in addition to the caches."""


def source(folder: Path, rows: int = ROWS) -> Path:
    path = folder / "source.jsonl"
    path.write_bytes(b"".join(b'{"id":%d,"text":"%s"}\n' % (number, b"x" * (number % 50)) for number in range(rows)))
    return path


def arguments(out: Path, path: Path, *more: object) -> list[str]:
    return run_arguments(out, [path], PER_CHUNK, *more)


def check_whole(real: Path, rows: int = ROWS) -> None:
    """Checks on the server that a stream has ended with each row once, in order, and nothing else is left."""
    assert ids(real) == list(range(rows))
    chunks = len(list(real.glob("chunk_*.completed")))
    assert chunks == -(-rows // PER_CHUNK)
    assert json.loads((real / "stream.end").read_bytes())["samples"] == rows
    assert not list((real / ".tmp").glob("*"))


class Sealed:
    """Watches on the server that what is sealed is whole, never changes, and is not deleted before the mark says so. A
    context manager: looks in a thread, and raises at its end what it has found. `real`: the stream's directory on the
    server."""

    def __init__(self, real: Path) -> None:
        self._real = real
        self._known: dict[str, bytes] = {}
        self._over = threading.Event()
        self.wrong: list[str] = []

    def __enter__(self) -> Sealed:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        try:
            names = [path.name for path in self._real.glob("chunk_*.completed")]
            for name in names:
                self._look_at(name)
            for name in [name for name in self._known if name.endswith(".completed")]:
                if not (self._real / name).exists() and int(name[6:11]) >= self._retired():
                    self.wrong.append(f"{name} has disappeared")
        except Exception:
            self.wrong.append(traceback.format_exc())

    def _look_at(self, name: str) -> None:
        data_name = name.removesuffix(".completed")
        try:
            found = {each: (self._real / each).read_bytes() for each in (name, data_name)}
        except FileNotFoundError:
            # Deleted meanwhile, or wrongly so, which the next look says.
            if int(name[6:11]) >= self._retired() and (self._real / name).exists():
                self.wrong.append(f"{data_name} is sealed but not there")
            return
        for each, data in found.items():
            if self._known.setdefault(each, data) != data:
                self.wrong.append(f"{each} has changed after it was sealed")
        if Seal.decode(found[name], int(name[6:11])).size != len(found[data_name]):
            self.wrong.append(f"{data_name} is not what was sealed")

    def _retired(self) -> int:
        try:
            mark: int = json.loads((self._real / "retired.json").read_bytes())["chunks_before"]
        except FileNotFoundError:
            return 0
        return mark

    def _run(self) -> None:
        while not self._over.wait(0.05):
            self.look()


@contextmanager
def readers(directory: Path, max_wait: float) -> Iterator[Callable[[], tuple[list[int], list[int]]]]:
    """Reads a stream in threads from here on: whole by `StreamReader`, and by two ranks, one with two workers. Yields A
    function that waits for the end and returns the ids: those of the one, and those of both ranks together."""
    with ThreadPoolExecutor(3) as pool:
        whole: Future[list[int]] = pool.submit(read_whole, directory, max_wait)
        ranks = [pool.submit(read_rank, directory, max_wait, rank, 2, workers) for rank, workers in ((0, 0), (1, 2))]
        yield lambda: (whole.result(), [number for rank in ranks for number in rank.result()])


def read_whole(directory: Path, max_wait: float) -> list[int]:
    return [row["id"] for row in StreamReader(directory, max_wait=max_wait)]


def read_rank(directory: Path, max_wait: float, rank: int, dp: int, workers: int) -> list[int]:
    """Reads what a rank is dealt, with so many DataLoader workers."""
    dataset = LazyShardedDataset(directory, dp_rank=rank, dp_size=dp, max_wait=max_wait, max_total_samples=ROWS)
    wait = {"timeout": max_wait + EVENT_S} if workers else {}
    return [
        number for batch in loader(dataset, dataset.rank_indices, workers, batch_size=1, **wait) for number in batch
    ]


class Child:
    """A function in a process of its own, which may hang without hanging the test. A context manager. `work`: is called
    there with a function that sends something here; what it raises is sent as its text. `no_answer_s`: after so many
    seconds without an answer of the filesystem it says so. `said`: the file that what it logs goes to."""

    def __init__(self, work: Callable[[Callable[[Any], None]], object], said: Path, no_answer_s: float = 0.3) -> None:
        self._work = work
        self._said = said
        self._no_answer_s = no_answer_s

    def __enter__(self) -> Child:
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


__all__ = [
    "EVENT_S",
    "MARGIN_S",
    "PER_CHUNK",
    "ROWS",
    "Child",
    "Sealed",
    "arguments",
    "check_whole",
    "collate",
    "published",
    "read_rank",
    "read_whole",
    "readers",
    "source",
    "wait_for",
]
