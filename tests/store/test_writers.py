"""Several named writers of one stream in an object store: real commands, an S3 server, kills of everything."""

import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard.store.files import UrlPath
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import rows
from tests.store.producing import ids, objects, until
from tests.store.server import Server

SIZE = 3


class Writers:
    """Writers of a stream in a bucket, each on a machine of its own."""

    def __init__(self, nursery: Commands, server: Server, url: UrlPath, root: Path) -> None:
        self.nursery, self.server, self.url, self.root = nursery, server, url, root

    def arguments(self, name: str, first: int, stop: int, *more: object) -> list[object]:
        source = self.root / f"{name}.jsonl"
        source.write_bytes(rows(first, stop))
        spool = self.root / f"spool-{name}"
        given = ("--source", source, "--samples-per-chunk", SIZE, "--writer", name)
        return ["run", "--out", self.url, "--spool", spool, *given, *more]

    def start(self, name: str, first: int, stop: int, *more: object) -> int:
        return self.nursery.start(*self.arguments(name, first, stop, *more), most_s=60.0)

    def run(self, name: str, first: int, stop: int, *more: object) -> tuple[int, str]:
        return self.nursery.wait(self.start(name, first, stop, *more))

    def command(self, *arguments: object) -> tuple[int, str]:
        return self.nursery.wait(self.nursery.start(*arguments, most_s=60.0))

    def read(self, name: str) -> dict[str, Any]:
        """A record of the stream, empty while there is none."""
        try:
            return dict(json.loads(self.url.store.get(f"{self.url.key}/{name}")))
        except FileNotFoundError:
            return {}

    def ids(self) -> list[int]:
        return ids({name: data for name, data in objects(self.url).items() if "/" not in name})


@pytest.fixture
def writers(nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path) -> Writers:
    return Writers(nursery, server, bucket, tmp_path)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_two_writers_end_the_stream_together(writers: Writers) -> None:
    b = writers.start("b", 100, 107, "--writers", 2)
    code, said = writers.run("a", 0, 7, "--writers", 2)
    assert code == 0, said
    code, said = writers.nursery.wait(b)
    assert code == 0, said
    found = writers.ids()
    print(said, sorted(objects(writers.url)))
    for (m, k), n in sorted(writers.server.asked.items(), key=lambda x: x[0][1]): print(m, k, n)
    assert [one for one in found if one < 100] == list(range(7))
    assert [one for one in found if one >= 100] == list(range(100, 107))
