"""A stream that is made by one run or by many, most of which are killed, and what is to hold of it all the time."""

import json
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from lazyshard.cli.main import main as lazyshard
from lazyshard.format.records import END, QUARANTINE, End, arrays_name, chunk_name, seal_name
from lazyshard.format.seal import Seal
from lazyshard.inspection.verification import verify
from lazyshard_producer.following.journal import DIRECTORY as JOURNALS
from lazyshard_producer.following.journal import named_journals
from tests.harness.processes.commands import Commands
from tests.harness.processes.kill_points import WHENS
from tests.harness.processes.producing import ids, rows_of, run_arguments
from tests.harness.scenes.sources import FedSource

PER_CHUNK: Final = 7
MOST_LIVES: Final = 300
LASTING: Final = {".producer.lock", "head.json", "stream.end", "stream.json", "stream.owner"}


def lasting(out: Path) -> set[str]:
    """Returns what an ended stream has besides its chunks: of followed directories, the journals its end names only."""
    named = named_journals(End.decode((out / END).read_bytes()).source)
    there = {path.name for path in out.glob(f"{JOURNALS}/*")}
    return LASTING | ({JOURNALS} if named and there in (named, set()) else set())


class Stream:
    def __init__(
        self,
        nursery: Commands,
        out: Path,
        sources: Sequence[FedSource],
        options: Sequence[object],
        per_chunk: int = PER_CHUNK,
    ) -> None:
        self.out = out  # the stream's directory
        self._nursery = nursery
        self._sources = sources
        of_sources = [argument for source in sources for argument in source.arguments]
        # The sources last: what follows one is a further file of it.
        self.arguments = [*run_arguments(out, [], per_chunk, *options), *of_sources]  # the command line

    def run(self, **kill: Any) -> tuple[int, str]:
        with self.fed():
            return self._nursery.wait(self.start(**kill))

    @contextmanager
    def fed(self) -> Iterator[None]:
        with ExitStack() as feeding:
            for number, source in enumerate(self._sources):
                feeding.enter_context(source.fed(self._entry(number)))
            yield

    def start(self, **kill: Any) -> int:
        """Starts the command, its sources not fed; returns its process id."""
        stdin = next((source.stdin for source in self._sources if source.stdin is not None), None)
        return self._nursery.start(*self.arguments, stdin=stdin, **kill)

    def run_killed(self, seed: str, most_calls: int) -> int:
        """Kills the command at random calls until it has finished; returns how often."""
        dice = random.Random(seed)
        for kills in range(MOST_LIVES):
            before = self.chunk_bytes()
            status, err = self.run(kill_at=dice.randint(1, most_calls), when=dice.choice(WHENS))
            self.check(before)
            if status == 0:
                return kills
            assert status == -signal.SIGKILL, err
        raise AssertionError(f"not finished after {MOST_LIVES} kills")

    def check(self, before: dict[str, bytes]) -> None:
        now = self.chunk_bytes()
        assert {name: now.get(name) for name in before} == before
        numbers = sorted(int(name[6:11]) for name in now if name.endswith(".completed"))
        assert numbers == list(range(len(numbers)))
        ids(self.out)

    def check_ended(self) -> None:
        names = {path.name for path in self.out.iterdir()}
        chunks = {name(chunk) for chunk in range(self.chunks) for name in (chunk_name, seal_name, arrays_name)}
        assert names - chunks == lasting(self.out) | ({QUARANTINE} & names)
        assert verify(self.out, jobs=1).findings == ()
        assert lazyshard(["verify", str(self.out), "--jobs", "1"]) == 0

    @property
    def chunks(self) -> int:
        return len(list(self.out.glob("chunk_*.completed")))

    def chunk_bytes(self) -> dict[str, bytes]:
        found = {}
        for path in self.out.glob("chunk_*.completed"):
            for file in (path, path.with_suffix(""), self.out / arrays_name(int(path.name[6:11]))):
                if file.exists():
                    found[file.name] = file.read_bytes()
        return found

    def seals(self) -> list[dict[str, Any]]:
        found = [json.loads((self.out / seal_name(chunk)).read_bytes()) for chunk in range(self.chunks)]
        for seal in found:
            del seal["sealed_at"]
        return found

    def lines(self) -> list[bytes]:
        data = [(self.out / chunk_name(chunk)).read_bytes() for chunk in range(self.chunks)]
        return b"".join(data).splitlines()

    def rows(self) -> list[tuple[int, int | None]]:
        return [(row["id"], row.get("copy")) for line in self.lines() for row in rows_of(line)]

    def refused(self) -> list[dict[str, Any]]:
        path = self.out / QUARANTINE
        entries = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        assert all(entry.endswith(b"\n") for entry in entries)
        return [{name: value for name, value in json.loads(entry).items() if name != "at"} for entry in entries]

    def _entry(self, number: int) -> dict[str, Any] | None:
        # The first ones may have been deleted.
        chunk = max((int(path.name[6:11]) for path in self.out.glob("chunk_*.completed")), default=None)
        if chunk is None:
            return None
        seal = Seal.decode((self.out / seal_name(chunk)).read_bytes(), chunk)
        entry: dict[str, Any] = seal.source["sources"][number]
        return entry
