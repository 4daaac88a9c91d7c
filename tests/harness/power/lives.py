"""Lives of the producer's command and of a consumer, some of which end with a power cut or a kill; called in forks.
What others were told by then is written down off the disk. A checkpoint of the consumer, `CHECKPOINTS/checkpoint-N/`
after N samples, holds which samples were trained: what is lost or trained twice shows in the last one."""

import importlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard import BadRows
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.format.cursor import Cursor
from lazyshard.format.state import RunState
from lazyshard.store.durable import publish_bytes, sync_directory
from lazyshard.stream import write_cursor
from lazyshard.stream.listing import read_manifest
from lazyshard_swift import checkpoints as swift_checkpoints
from lazyshard_swift.checkpoints import Position, load_if_there, save_position
from tests.harness.disks import cut_power
from tests.harness.planted import power as power_mutants
from tests.harness.power.checks import Told
from tests.harness.processes.kill_points import KillPoint, When
from tests.harness.scenes.table import CONSUMER

LAG: Final = 2  # Chunks that the consumer beside a producer has not acknowledged, the newest ones


@dataclass(frozen=True, slots=True)
class Stop:
    call: int  # number of the call that changes a file, from 1
    when: When = "before"  # where in it
    power_of: str | None = None  # the mount point whose power is cut; None for a kill only
    flush: bool = False  # see `cut_power`

    def __str__(self) -> str:
        how = "killed" if self.power_of is None else "power cut, journal written" if self.flush else "power cut"
        return f"{how} {self.when} call {self.call}"


@dataclass(frozen=True, slots=True)
class Progress:
    saved: int = 0  # samples in the newest checkpoint
    committed: int = 0  # samples up to which it has committed
    met: str = ""  # name of the call at which it ended


def installed(stop: Stop | None, mutant: str | None, told: str, tell: Callable[[str], Told | Progress]) -> None:
    """Makes this process one that ends so, with that mistake in it. `stop`: None for a life that nothing ends.
    `mutant`: one of `planted.power`. `told`: file in which is written, right before the end, what `tell` returns for
    the name of the call; no call of this counts as one that changes a file."""
    if mutant is not None:
        power_mutants.plant(mutant)
    if stop is None:
        return
    met = []

    def begin(number: int, name: str, begins: bool) -> None:
        if number == stop.call:
            met.append(name)

    def end() -> None:
        Path(told).write_text(json.dumps(asdict(tell(met[0]))))
        if stop.power_of is not None:
            cut_power(stop.power_of, flush=stop.flush)

    KillPoint(stop.call, stop.when, signal.SIGKILL, end, tell=begin).install()


def produce(
    arguments: list[str],
    stop: Stop | None = None,
    mutant: str | None = None,
    told: str = "",  # file in which to write what was told
    commits: bool = False,  # a consumer beside it acknowledges what is published, `LAG` chunks late
    chunks: int | None = None,  # it is killed when so many are published; only with a limit, for instance `--retain`
) -> int:
    out = Path(arguments[arguments.index("--out") + 1])
    committed = [0]
    _consume(out, committed, commits=commits, chunks=chunks)
    installed(stop, mutant, told, lambda met: Told.look(out, committed[0], met))
    main = importlib.import_module("lazyshard_producer.cli").main
    return int(main(arguments))


def _consume(out: Path, committed: list[int], *, commits: bool, chunks: int | None) -> None:
    holdback: Any = importlib.import_module("lazyshard_producer.holding")
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


TOTAL: Final = 24
BATCH: Final = 2
EVERY: Final = 4  # Samples in the stream, in a batch, and between two checkpoints
KEPT: Final = 2  # Checkpoints
COMMIT_FIRST = False  # What a mutant changes
_FILE: Final = "run.json"


class Checkpoint(NamedTuple):
    folder: Path  # where it is
    state: dict[str, Any]  # of the run
    ids: list[int]  # what was trained, in order


def train(stream: str, folder: Path, until: int, swift: bool, stop: Stop | None, mutant: str | None, told: str) -> None:
    """A life. `folder`: where to keep checkpoints, the newest of which it goes on from. `swift`: whether a checkpoint
    is kept as ms-swift's plug-in does. `told`: file in which to write its `Progress`."""
    folder.mkdir(exist_ok=True)
    progress = Progress()
    installed(stop, mutant, told, lambda met: replace(progress, met=met))
    kept = found(folder)
    rest: dict[str, Any] = {"max_total_samples": TOTAL, "max_wait": 5.0, "bad_rows": BadRows("raise")}
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=1, batch_size=BATCH, consumer=CONSUMER, **rest)
    ids = list(kept[0].ids) if kept else []
    if kept:
        dataset.load_state_dict(kept[0].state)
    consumed = dataset.consumed
    dataset.commit(consumed, last_epoch=True, keep=[one.state for one in kept])
    progress = Progress(consumed, consumed)
    for index in dataset.rank_indices[: until - consumed]:
        ids.append(dataset[index]["id"])
        if len(ids) % EVERY:
            continue
        consumed = len(ids)
        newest = Checkpoint(folder / f"checkpoint-{consumed}", dataset.state_dict(consumed), ids)
        if not COMMIT_FIRST:
            (_save_as_swift if swift else _save)(newest)
            progress = replace(progress, saved=consumed)
            _remove_old(folder)
        dataset.commit(consumed, last_epoch=True, keep=[one.state for one in found(folder)])
        progress = replace(progress, committed=consumed)
        if COMMIT_FIRST:
            _save(newest)
            _remove_old(folder)


def found(folder: Path) -> list[Checkpoint]:
    known = []
    for path in folder.glob("checkpoint-*"):
        position = load_if_there(path)
        try:
            content = json.loads((path / _FILE).read_bytes())
        except (OSError, ValueError):
            continue
        if position is not None:
            assert position.state is not None
            content["state"] = position.state.to_dict()
        if "state" in content:
            known.append(Checkpoint(path, content["state"], content["ids"]))
    return sorted(known, key=lambda one: -len(one.ids))


def _remove_old(folder: Path) -> None:
    # Before the commit: what it does not name, nobody may go on from.
    for old in found(folder)[KEPT:]:
        shutil.rmtree(old.folder)


def _save(checkpoint: Checkpoint) -> None:
    checkpoint.folder.mkdir(exist_ok=True)
    content = json.dumps({"state": checkpoint.state, "ids": checkpoint.ids}).encode()
    publish_bytes(content, checkpoint.folder / _FILE, checkpoint.folder / f".{_FILE}")
    sync_directory(checkpoint.folder.parent)


def _save_as_swift(checkpoint: Checkpoint) -> None:
    state = RunState.from_dict(checkpoint.state, "the state")
    part = state.parts[-1]
    assert state.stream_id is not None
    per_chunk = state.samples_per_chunk
    stream = {"stream": state.stream_id, "directory": "stream", "samples_per_chunk": per_chunk, "epoch_samples": TOTAL}
    ranks = {"dp_size": part.dp, "batch_size": part.batch_size, "layout": "strided", "consumer": CONSUMER}
    order = {"window": state.window // per_chunk, "seed": state.seed, "by_steps": False, "saved_at": 0.0}
    known: dict[str, Any] = {**stream, **ranks, **order, "consumed": state.consumed, "step": state.consumed // BATCH}
    position = Position(state=state, **known)
    # As there: the position first, then what the trainer saves, and all of it is made durable before the cursor moves.
    save_position(position, checkpoint.folder)
    (checkpoint.folder / _FILE).write_text(json.dumps({"ids": checkpoint.ids}))
    swift_checkpoints._make_durable(checkpoint.folder)
