"""One stream on a disk whose power is cut, made by one life of the command after the other."""

from __future__ import annotations

import shutil
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from lazyshard.storage import list_consumers
from tests.harness.disks.power import Disk
from tests.harness.power.checks import Found, Violation, Whole, check, check_ended, read_whole
from tests.harness.power.lives import CONSUMER, Stop, produce
from tests.harness.power.told import Told
from tests.harness.processes.nursery import Nursery
from tests.harness.scenes.sources import FedSource
from tests.producer.commands import run_arguments


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is produced.

    Attributes:
        name: for messages.
        source: where rows come from, the same ones in each life.
        per_chunk: rows in a chunk.
        options: of the command.
        commits: whether a consumer acknowledges what is published.
        journal: whether seals name a journal, which has another name in each run.
    """

    name: str
    source: FedSource
    per_chunk: int
    options: tuple[str, ...] = ()
    commits: bool = False
    journal: bool = False

    def arguments(self, out: Path) -> list[str]:
        """Returns the command line."""
        return [*run_arguments(out, [], self.per_chunk, *self.options), *self.source.arguments]


RETAINS: Final = ("--retain", "consumed", "--consumers", CONSUMER)


class Trial:
    """A stream on a disk.

    Args:
        forks: where lives are lived.
        disk: where the stream is.
        out: its directory there.
        scenario: what it is made from.
        whole: what is to come of it.
        mutant: what is wrong with the producer.

    Attributes:
        out: see above.
        stopped: whether the last life was ended as it was to be.
    """

    def __init__(
        self, forks: Nursery, disk: Disk, out: Path, scenario: Scenario, whole: Whole, mutant: str | None = None
    ) -> None:
        self._forks, self._disk, self.out = forks, disk, out
        self._scenario, self._whole, self._mutant = scenario, whole, mutant
        self._told_file = disk.point.parent / "told"
        self._told = Told()
        self._found = Found()
        self.stopped = False

    def live(self, stop: Stop) -> None:
        """Lives once, up to a kill or a power cut, and checks what is left; cut after the end if it gets there.

        Raises:
            Violation: something is not as promised, or the command has failed.
        """
        self._told_file.unlink(missing_ok=True)
        ended = self._forks.call(produce, **self._request(stop))
        status = ended.status
        self.stopped = status == -signal.SIGKILL
        if status not in (0, -signal.SIGKILL):
            raise Violation(f"the command exits with {status}: {ended.last_words}")
        if status == 0:
            committed = max((one.chunks_before for one in list_consumers(self.out)), default=0)
            self._told = replace(self._told.and_later(Told.look(self.out, committed)), finished=True)
            if not self._told.ended:
                raise Violation("the command has finished, and readers are not told that the stream has ended")
            if stop.power_of is not None:
                # Nothing is left to be stopped: what is told now is all of it.
                self._disk.cut(flush=stop.flush)
        else:
            self._told = self._told.and_later(Told.read(self._told_file))
            if stop.power_of is not None:
                self._disk.restart()
        found = check(self.out, self._whole, self._told, self._found)
        if stop.power_of is not None:
            # After a kill that may be there only for as long as the power stays.
            self._found = found

    @property
    def met(self) -> str:
        """Name of the call at which the last life was stopped; empty where it was not."""
        return self._told.met

    def finish(self) -> None:
        """Runs the command until it is through, which is at once, and checks the whole.

        Raises:
            Violation: something is not as promised.
        """
        ended = self._forks.call(produce, **self._request(None))
        if ended.status:
            raise Violation(f"the last run exits with {ended.status}: {ended.last_words}")
        check_ended(self.out, self._whole, self._told, self._found)

    def remove(self) -> None:
        """Removes the stream and the folder in which it was: the disk has room for some thousand names."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self._disk.sync()

    def _request(self, stop: Stop | None) -> dict[str, Any]:
        return {
            "arguments": self._scenario.arguments(self.out),
            "stop": None if stop is None else asdict(stop),
            "mutant": self._mutant,
            "told": str(self._told_file),
            "commits": self._scenario.commits,
        }


def make_whole(forks: Nursery, folder: Path, scenario: Scenario) -> Whole:
    """Makes the stream without a fault, keeping all of it, and reads it."""
    out = folder / f"whole {scenario.name}"
    arguments = scenario.arguments(out)
    if "--retain" in arguments:
        arguments[arguments.index("--retain") + 1] = "all"
    ended = forks.call(produce, arguments=arguments, stop=None, mutant=None, told="")
    if ended.status:
        raise RuntimeError(f"{scenario.name}: without any fault the command exits with {ended.status}: {ended.said}")
    return read_whole(out, seals=not scenario.journal)
