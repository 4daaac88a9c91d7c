"""Cuts of a consumer: at each call of a run that keeps checkpoints and commits, then the producer deletes behind it."""

from __future__ import annotations

import itertools
import json
import secrets
import shutil
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lazyshard.stream import list_consumers, read_cursor, read_retired
from tests.harness.disks import Disk
from tests.harness.power.lives import Stop, produce
from tests.harness.power.training import EVERY, TOTAL, Checkpoint, Progress, found, train
from tests.harness.power.trials import ORDER, PlayedScene
from tests.harness.processes.nursery import Ended, Nursery
from tests.harness.scenes.table import CONSUMED, CONSUMER
from tests.harness.tally import Tally, Violation

PER_CHUNK: Final = CONSUMED.per_chunk
LIVE: Final = 4
"""Chunks of the stream that are published when the run starts."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A stream that is being produced, and what is to come of it."""

    folder: Path  # the stream as it is when the run starts
    played: PlayedScene  # what is produced


def begin(forks: Nursery, folder: Path) -> Beginning:
    played = PlayedScene("consumer", CONSUMED, CONSUMED.make(folder))
    out = folder / "live"
    ended = forks.call(produce, arguments=played.arguments(out), stop=None, mutant=None, told="", chunks=LIVE)
    if ended.status != -signal.SIGKILL:
        raise RuntimeError(f"the producer was not killed but exits with {ended.status}: {ended.said}")
    return Beginning(out, played)


class ConsumerTrial:
    """A stream and a run on it, on a disk. `swift`: whether checkpoints are kept as ms-swift's plug-in does. `mutant`:
    what is wrong with the consumer."""

    def __init__(
        self, forks: Nursery, disk: Disk, folder: Path, beginning: Beginning, *, swift: bool, mutant: str | None = None
    ) -> None:
        self._forks, self._disk, self._beginning = forks, disk, beginning
        self._swift, self._mutant = swift, mutant
        self._folder, self._stream, self._checkpoints = folder, folder / "stream", folder / "checkpoints"
        self._told_file = disk.point.parent / "progress"
        self.met = ""  # name of the call at which that was
        self.stopped = False  # whether the life was ended as it was to be
        folder.mkdir()
        shutil.copytree(beginning.folder, self._stream)
        self._checkpoints.mkdir()
        disk.sync()

    def live(self, stop: Stop) -> None:
        """Trains what is published, up to a power cut; cut after the end if it gets there."""
        self._told_file.unlink(missing_ok=True)
        ended = self._train(LIVE * PER_CHUNK, asdict(stop))
        status = ended.status
        self.stopped = status == -signal.SIGKILL
        if status not in (0, -signal.SIGKILL):
            raise Violation(f"the run exits with {status}: {ended.last_words}")
        if status:
            told = Progress(**json.loads(self._told_file.read_text()))
            self._disk.restart()
        else:
            told = Progress(LIVE * PER_CHUNK, LIVE * PER_CHUNK)
            self._disk.cut(flush=stop.flush)
        self.met = told.met
        self._check(told)

    def finish(self, *, producer_first: bool) -> None:
        """Goes on: the producer deletes by the cursor and finishes the stream, the run trains the rest.
        `producer_first`: whether the producer starts before the run does."""
        if not producer_first:
            self._finish_training(LIVE * PER_CHUNK)
        self._produce()
        self._finish_training(TOTAL)
        newest = self._newest()
        if newest is None or newest.ids != list(range(TOTAL)):
            raise Violation(f"trained in the end: {newest and newest.ids}")

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._disk.sync()

    def _train(self, until: int, stop: object = None) -> Ended:
        return self._forks.call(
            train,
            stream=str(self._stream),
            checkpoints=str(self._checkpoints),
            until=until,
            swift=self._swift,
            stop=stop,
            mutant=self._mutant,
            told=str(self._told_file),
        )

    def _finish_training(self, until: int) -> None:
        ended = self._train(until)
        if ended.status:
            raise Violation(f"the run that goes on exits with {ended.status}: {ended.last_words}")
        self._check(Progress(until, until))

    def _produce(self) -> None:
        arguments = self._beginning.played.arguments(self._stream)
        ended = self._forks.call(produce, arguments=arguments, stop=None, mutant=None, told="")
        if ended.status:
            raise Violation(f"the producer exits with {ended.status}: {ended.last_words}")
        newest = self._newest()
        mark, needed = read_retired(self._stream), 0 if newest is None else len(newest.ids) // PER_CHUNK
        if mark > needed:
            raise Violation(f"chunks below {mark} are deleted, the newest checkpoint needs chunk {needed}")

    def _newest(self) -> Checkpoint | None:
        return next(iter(found(self._checkpoints)), None)

    def _check(self, told: Progress) -> None:
        newest = self._newest()
        saved = 0 if newest is None else len(newest.ids)
        if newest is not None and newest.ids != list(range(saved)):
            raise Violation(f"trained, by the newest checkpoint: {newest.ids}")
        if saved < told.saved:
            raise Violation(f"a checkpoint at {told.saved} was saved, the newest is at {saved}")
        for consumer in list_consumers(self._stream, TOTAL):
            if consumer.problem is not None:
                raise Violation(f"the cursor does not count: {consumer.problem}")
        cursor = read_cursor(self._stream, CONSUMER)
        if cursor is None:
            if told.committed or (self.met == "" and told.saved):
                raise Violation(f"committed up to {told.committed}, and there is no cursor")
            return
        if cursor.consumed < told.committed:
            raise Violation(f"committed up to {told.committed}, the cursor says {cursor.consumed}")
        if cursor.consumed % EVERY or cursor.chunks_before * PER_CHUNK > saved:
            raise Violation(
                f"the cursor stands at {cursor.consumed} and is done with {cursor.chunks_before} chunks, the newest "
                f"checkpoint is at {saved}"
            )


def cut_consumer_at_each_call(
    tally: Tally,
    forks: Nursery,
    disk: Disk,
    beginning: Beginning,
    every: int = 1,
    offset: int = 0,
    *,
    first: int = 1,
    swift: bool = False,
    mutant: str | None = None,
) -> None:
    """Cuts the power at every so-many-th point of a run from call `first` on, with and without the journal written.
    What a mutant breaks is looked for until it shows."""
    points = itertools.count(offset)
    for call in itertools.count(first):
        met, finished = "", False
        for when, flush in itertools.product(ORDER, (False, True)):
            if when == "before" and met not in ("", "write"):
                continue
            point = next(points)
            if point % every:
                continue
            stop = Stop(call, when, str(disk.point), flush)
            trial = ConsumerTrial(forks, disk, disk.point / secrets.token_hex(8), beginning, swift=swift, mutant=mutant)
            try:
                trial.live(stop)
                trial.finish(producer_first=bool(point // every % 2))
            except Violation as violation:
                wrong = f", mutant {mutant}" if mutant else ""
                kind = "consumer as ms-swift's" if swift else "consumer"
                tally.violation(f"{disk.filesystem}, {kind}{wrong}: {stop}: {violation}")
            finally:
                trial.remove()
            finished |= not trial.stopped
            met = trial.met
            tally.trial(points=1)
            if mutant and tally.violations:
                return
        if finished:
            return
