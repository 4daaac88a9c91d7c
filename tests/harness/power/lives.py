"""Lives of the producer's command, some of which end with a power cut or a kill; called in forks. What readers and
consumers were told by then is written down off the disk, so that it can be asked of the disk later."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lazyshard.format.cursor import Cursor
from lazyshard.stream import write_cursor
from lazyshard.stream.manifest import read_manifest
from tests.harness.disks import cut_power
from tests.harness.planted import power as power_mutants
from tests.harness.power.checks import Told
from tests.harness.processes.kill_points import KillPoint, When
from tests.harness.scenes.table import CONSUMER

LAG: Final = 2  # Chunks that the consumer beside a producer has not acknowledged, the newest ones


@dataclass(frozen=True, slots=True)
class Stop:
    """How a life ends, if it comes to that."""

    call: int  # number of the call that changes a file, from 1
    when: When = "before"  # where in it
    power_of: str | None = None  # the mount point whose power is cut; None for a kill only
    flush: bool = False  # see `cut_power`

    def __str__(self) -> str:
        how = "killed" if self.power_of is None else "power cut, journal written" if self.flush else "power cut"
        return f"{how} {self.when} call {self.call}"


def installed(stop: dict[str, Any] | None, mutant: str | None, at_last: Callable[[str], object]) -> None:
    """Makes this process one that ends so, with that mistake in it. `stop`: a `Stop` as a dict; None for a life that
    nothing ends. `mutant`: one of `planted.power`. `at_last`: is called right before, with the name of
    the call."""
    if mutant is not None:
        power_mutants.plant(mutant)
    if stop is None:
        return
    given = Stop(**stop)
    met = []

    def tell(number: int, name: str, begins: bool) -> None:
        if number == given.call:
            met.append(name)

    def end() -> None:
        at_last(met[0])
        if given.power_of is not None:
            cut_power(given.power_of, flush=given.flush)

    KillPoint(given.call, given.when, signal.SIGKILL, end, tell=tell).install()


def produce(
    arguments: list[str],
    stop: dict[str, Any] | None,
    mutant: str | None,
    told: str,  # file in which to write what was told
    commits: bool = False,  # a consumer beside it acknowledges what is published, `LAG` chunks late
    chunks: int | None = None,  # it is killed when so many are published; only with a limit, for instance `--retain`
) -> int:
    out = Path(arguments[arguments.index("--out") + 1])
    committed = [0]
    _consume(out, committed, commits, chunks)
    installed(stop, mutant, lambda met: Told.look(out, committed[0], met).write(Path(told)))
    main = importlib.import_module("lazyshard_producer.cli").main
    return int(main(arguments))


def _consume(out: Path, committed: list[int], commits: bool, chunks: int | None) -> None:
    """Has the producer look at its consumers at each chunk, and does what they do before it looks."""
    holdback: Any = importlib.import_module("lazyshard_producer.holding.holdback")
    holdback.LOOK_S = 0.0
    look = holdback.Holdback.after_publish

    def after_publish(self: object, published: int) -> None:
        if published == chunks:
            os.kill(os.getpid(), signal.SIGKILL)
        if commits and published > LAG:
            manifest = read_manifest(out, None)
            assert manifest is not None
            done = published - LAG
            samples = done * manifest.samples_per_chunk
            write_cursor(out, Cursor(CONSUMER, manifest.stream_id, samples, done, {}, time.time()))
            committed[0] = done
        look(self, published)

    holdback.Holdback.after_publish = after_publish
