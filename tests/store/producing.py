"""A producer's command that publishes to a bucket, and what is to hold of what it leaves there."""

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import xxhash

from lazyshard.format.records import chunk_name, seal_name
from lazyshard.format.seal import Seal
from lazyshard.store.files import UrlPath
from lazyshard_producer.shipping.shipper import Shipper
from lazyshard_producer.shipping.store import Spool, StreamStore, next_owner, read_stream
from lazyshard_producer.stop import Stop
from tests.harness.processes.commands import Commands
from tests.harness.processes.environment import DEADLINE_S
from tests.store.server import BUSY, Server

LASTING = {"head.json", "stream.end", "stream.json", "stream.owner"}  # what an ended stream has besides its chunks
CHANGES = ("PUT", "DELETE", "POST")
HASTE = ["tests.store.producer_haste:install"]
When = Literal["before", "after"]
Fault = Callable[[str, str], Any]  # what a server calls for each request, see `Server.fault`


def until(condition: Callable[[], object]) -> None:
    """Waits for something that others bring about."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Run:
    """A command line that publishes to a URL, with a spool."""

    def __init__(self, nursery: Commands, server: Server, url: UrlPath, root: Path, *options: object) -> None:
        self.nursery = nursery
        self.server = server
        self.url = url
        self.root = root
        self.spool = root / "spool-0"
        self.options = options
        # What the last run has asked the store to change, in order: method and name.
        self.changes: list[tuple[str, str]] = []
        self._spools = itertools.count(1)

    def move(self) -> None:
        """To another machine: one with an empty spool."""
        self.spool = self.root / f"spool-{next(self._spools)}"

    def beside(self, name: object) -> "Run":
        """The run of another stream of the bucket."""
        return Run(self.nursery, self.server, self.url / str(name), self.root / str(name), *self.options)

    def elsewhere(self, name: str, nursery: Commands | None = None) -> "Run":
        """The run of the same stream on another machine."""
        return Run(nursery or self.nursery, self.server, self.url, self.root / name, *self.options)

    def arguments(self, *options: object) -> list[object]:
        return ["run", "--out", self.url, "--spool", self.spool, *self.options, *options]

    def start(self, *options: object, **more: Any) -> int:
        self.changes = []
        return self.nursery.start(*self.arguments(*options), most_s=60.0, **more)

    def stopped(self, condition: Callable[[], object], *options: object, by: int = signal.SIGKILL) -> tuple[int, str]:
        """Sends a signal to a run as soon as something is so."""
        pid = self.start(*options)
        until(condition)
        os.kill(pid, by)
        return self.nursery.wait(pid)

    def run(self, *options: object, fault: Fault | None = None, **more: Any) -> tuple[int, str]:
        with watched(self.server, fault or self.note):
            return self.nursery.wait(self.start(*options, **more))

    def ends(self, code: int, *options: object, **more: Any) -> str:
        """Runs up to this exit code."""
        found, said = self.run(*options, **more)
        assert found == code, said
        return said

    def finish(self, *options: object, **more: Any) -> str:
        return self.ends(0, *options, **more)

    def wait(self, pid: int, code: int = 0, words: str = "") -> str:
        """Waits for a command that ends with this exit code and says this; returns all that it said."""
        found, said = self.nursery.wait(pid)
        assert (found, words in said) == (code, True), said
        return said

    def note(self, method: str, key: str) -> None:
        if method in CHANGES:
            self.changes.append((method, key.removeprefix(f"{self.url.key}/")))

    def kill_at(self, number: int, when: When, *options: object) -> tuple[int, str]:
        """Runs until the request of that number (from 0) to change something, and kills it before or after that."""
        started, pid = threading.Event(), 0

        def fault(method: str, key: str) -> Any:
            if method not in CHANGES:
                return None
            self.note(method, key)
            if len(self.changes) != number + 1:
                return None
            started.wait()
            if when == "before":
                os.kill(pid, signal.SIGKILL)
                return 503, b""

            def kill(body: bytes) -> list[bytes]:
                os.kill(pid, signal.SIGKILL)
                return [body]

            return kill

        with watched(self.server, fault):
            pid = self.start(*options)
            started.set()
            return self.nursery.wait(pid)

    def read(self, name: str) -> bytes:
        """An object of the stream, nothing where it is not there."""
        try:
            return self.url.store.get(f"{self.url.key}/{name}")
        except FileNotFoundError:
            return b""

    def record(self, name: str) -> dict[str, Any]:
        return dict(json.loads(self.read(name) or b"{}"))

    def objects(self) -> dict[str, bytes]:
        return objects(self.url)


@contextlib.contextmanager
def watched(server: Server, fault: Fault) -> Iterator[None]:
    """Has a server call a function for each request."""
    before, server.fault = server.fault, fault
    try:
        yield
    finally:
        server.fault = before


def refusing(part: str = "chunk_") -> Fault:
    """A store that takes no object with this in its name."""
    return lambda method, key: (503, BUSY) if method in CHANGES and part in key else None


def objects(url: UrlPath, folder: str = "") -> dict[str, bytes]:
    """All objects under a URL, by name."""
    found: dict[str, bytes] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in url.store.list("/".join(filter(None, (url.key, folder)))):
            path = f"{folder}/{name}" if folder else name
            try:
                found[path] = url.store.get(f"{url.key}/{path}".lstrip("/"))
            except FileNotFoundError:
                found |= objects(url, path)
    return found


def ids(found: dict[str, bytes]) -> list[int]:
    """Ids of all published rows, in order, each checked against its seal."""
    rows: list[int] = []
    for chunk in range(sum(name.endswith(".completed") for name in found)):
        seal = Seal.decode(found[seal_name(chunk)], chunk)
        lines = found[chunk_name(chunk)].splitlines(keepends=True)
        assert [xxhash.xxh3_64_intdigest(line) for line in lines] == seal.digests.tolist()
        rows += [json.loads(line)["id"] for line in lines]
    return rows


def chunk_names(chunks: int) -> set[str]:
    return {name for chunk in range(chunks) for name in (chunk_name(chunk), seal_name(chunk))}


def check_ended(found: dict[str, bytes], rows: int, per_chunk: int, *more: str) -> None:
    """Whether the stream holds the rows, each once and in order, says so, and nothing else is there."""
    assert ids(found) == list(range(rows))
    chunks = -(-rows // per_chunk)
    assert set(found) == LASTING | chunk_names(chunks) | set(more)
    end = json.loads(found["stream.end"])
    assert (end["format"], end["chunks"], end["samples"]) == (1, chunks, rows)
    head = json.loads(found["head.json"])
    assert (head["chunks"], head["samples"], head["ended"], head["state"]) == (chunks, rows, True, "finished")


class Shipping:
    """What puts a spool to the store, and deletes there, without a command."""

    def __init__(self, url: UrlPath, folder: Path) -> None:
        self.url, self.store, self.spool = url, taken(url), Spool(folder, str(url))
        self.shelf = Shipper(self.store, self.spool, read_stream(self.store, None), 1 << 30, Stop(), print)

    def left(self) -> set[str]:
        return {name for name in objects(self.url) if name.startswith("chunk_")}


def taken(url: UrlPath) -> StreamStore:
    """Returns a stream's store, of which this process has become the owner."""
    store = StreamStore(str(url), 0.0, "", pause=lambda seconds: False)
    before, tag = store.find_owner()
    store.take(next_owner(before), tag)
    return store
