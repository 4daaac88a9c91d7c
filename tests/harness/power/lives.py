"""Lives of command and consumer that end with a cut or a kill, and what has to be after. `checkpoint-N/`: trained."""

import importlib
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard import BadRows
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.errors import LazyShardError
from lazyshard.format.records import END, MANIFEST, QUARANTINE, End, arrays_name, chunk_name, seal_name
from lazyshard.format.seal import Seal
from lazyshard.format.state import Cursor, RunState
from lazyshard.inspection.verification import verify
from lazyshard.store.durable import publish_bytes, sync_directory
from lazyshard.stream import list_consumers, read_retired, write_cursor
from lazyshard.stream.listing import list_kept, read_manifest
from lazyshard_swift import checkpoints as swift_checkpoints
from lazyshard_swift.checkpoints import Position, load_if_there, save_position
from tests.harness.disks import cut_power
from tests.harness.planted import power as power_mutants
from tests.harness.points.sealed import SealedChunks
from tests.harness.processes.kill_points import KillPoint, When
from tests.harness.scenes.streams import lasting
from tests.harness.scenes.table import CONSUMER


@dataclass(frozen=True, slots=True)
class Told:
    chunks: int = 0  # published, by head.json
    ended: bool = False  # whether the stream has ended
    committed: int = 0  # chunks that a consumer has acknowledged, and was told that its cursor says so durably
    finished: bool = False  # whether the command that ended it has returned: nobody starts it again
    met: str = field(default="", compare=False)  # name of the call at which that was

    @staticmethod
    def look(out: Path, committed: int = 0, met: str = "") -> "Told":
        try:
            head = json.loads((out / "head.json").read_bytes())
        except (OSError, ValueError):
            return Told(committed=committed, met=met)
        return Told(head["chunks"], head["ended"], committed, met=met)

    def and_later(self, later: "Told") -> "Told":
        """Returns what was told by then: what was once told stays so."""
        chunks, committed = max(self.chunks, later.chunks), max(self.committed, later.committed)
        return Told(chunks, self.ended or later.ended, committed, self.finished or later.finished, later.met)


OPTIONAL: Final = {QUARANTINE, "retired.json", "cursors"}  # What an ended stream may have besides what all have


class Whole(NamedTuple):
    lines: tuple[str, ...]  # the rows, in order
    per_chunk: int
    seals: tuple[dict[str, Any], ...]  # the seals, but for the time in them; none if they differ from run to run
    refused: tuple[tuple[str, int], ...]  # the rows in quarantine, as `(source, line)`, in order
    arrays: tuple[bytes, ...] | None  # the bytes of each row's arrays; None where rows hold none

    @property
    def chunks(self) -> int:
        return -(-len(self.lines) // self.per_chunk)


@dataclass(frozen=True, slots=True)
class Found:
    first: int = 0  # chunks below this one are retired
    files: dict[str, bytes] = field(default_factory=dict)  # chunks, seals and side files, by name
    committed: int = 0  # the chunks that the consumer is done with


def read_whole(out: Path, per_chunk: int, *, seals: bool) -> Whole:
    """Reads a stream that was made without a fault, and all of which is there; `seals`: whether they are to be kept."""
    count = End.decode((out / END).read_bytes()).chunks
    lines, arrays = [], []
    for chunk in range(count):
        lines += (out / chunk_name(chunk)).read_bytes().decode().splitlines()
        sealed = Seal.decode((out / seal_name(chunk)).read_bytes(), chunk).arrays
        if sealed is not None:
            data, ends = (out / arrays_name(chunk)).read_bytes(), sealed.offsets.tolist()
            arrays += [data[begin:end] for begin, end in itertools.pairwise(ends)]
    found = tuple(_seal(out, chunk) for chunk in range(count)) if seals else ()
    return Whole(tuple(lines), per_chunk, found, refused(out), tuple(arrays) or None)


def refused(out: Path) -> tuple[tuple[str, int], ...]:
    path = out / QUARANTINE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    found = []
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            raise AssertionError(f"line {number + 1} of {QUARANTINE} is {line[:50]!r}") from None
        found.append((str(entry["source"]), int(entry["line"])))
    return tuple(found)


def check(out: Path, whole: Whole, told: Told, before: Found) -> Found:
    """Checks what every moment must keep, by what was told before the cut, and was there after the one before."""
    try:
        return _check(out, whole, told, before)
    except (LazyShardError, OSError) as error:
        raise AssertionError(f"a file cannot be used: {type(error).__name__}: {error}") from error


def check_ended(out: Path, whole: Whole, told: Told, before: Found) -> None:
    found = check(out, whole, told, before)
    assert (out / END).exists(), f"finished, and there is no {END}"
    end = End.decode((out / END).read_bytes())
    if (end.chunks, end.samples) != (whole.chunks, len(whole.lines)):
        raise AssertionError(f"{END} says {end}, there are {whole.chunks} chunks with {len(whole.lines)} samples")
    order = list if whole.seals else sorted
    assert order(refused(out)) == order(whole.refused), f"in quarantine are {refused(out)}, expected {whole.refused}"
    there = {name for name in found.files if int(name[6:11]) >= found.first}
    left = {path.name for path in out.iterdir()} - there - lasting(out) - OPTIONAL
    assert not left, f"left over: {sorted(left)}"
    findings = verify(out, jobs=1).findings
    assert not findings, f"`lazyshard verify` finds {findings[0]}"


def _check(out: Path, whole: Whole, told: Told, before: Found) -> Found:
    if not out.is_dir():
        assert not (told != Told() or before.files), f"the directory is gone, {told} was told"
        return Found()
    sealed = SealedChunks(  # Followed rows, whose seals differ, come in any order
        out, whole.lines, whole.per_chunk, ordered=bool(whole.seals), known=before.files, arrays=whole.arrays
    )
    committed = _check_consumers(out, told, before, list_kept(out).complete)
    sealed.look(committed)
    chunks, first = sealed.chunks, read_retired(out)
    assert chunks >= told.chunks, f"{told.chunks} chunks were told, {chunks} are there"
    assert first >= before.first, f"chunks below {before.first} were retired, now only those below {first} are"
    for chunk in range(first, chunks):
        _check_seal(out, chunk, whole)
    assert not (told.ended and not (out / END).exists()), f"the end was told, {END} is gone"
    sealed.check_claims()
    if (out / MANIFEST).exists():
        seen = sealed.read_through()
        if told.finished and not seen.ended:  # The next start tells it, where there is one
            raise AssertionError(f"the command has finished, a reader is told of {seen.chunks} chunks and of no end")
    elif told.chunks or chunks:
        raise AssertionError(f"{MANIFEST} is gone, {told} was told, {chunks} chunks are there")
    return Found(first, sealed.known, committed)


def _check_seal(out: Path, chunk: int, whole: Whole) -> None:
    seal = _seal(out, chunk)
    kept = seal["source"].get("quarantine_bytes", 0)
    refused_rows = (out / QUARANTINE).read_bytes() if kept and (out / QUARANTINE).exists() else b""
    if len(refused_rows) < kept or (kept and not refused_rows[:kept].endswith(b"\n")):
        size = len(refused_rows)
        raise AssertionError(
            f"the seal of chunk {chunk} counts {kept} bytes of {QUARANTINE}, which has {size} or is torn"
        )
    if whole.seals and seal != whole.seals[chunk]:
        raise AssertionError(f"the seal of chunk {chunk} is {seal}, expected {whole.seals[chunk]}")


def _check_consumers(out: Path, told: Told, before: Found, published: int) -> int:
    done = 0
    for consumer in list_consumers(out, published):
        assert consumer.problem is None, f"a cursor does not count: {consumer.problem}"
        done = consumer.chunks_before
    if done < max(told.committed, before.committed):
        raise AssertionError(f"{max(told.committed, before.committed)} chunks were committed, the cursor says {done}")
    return done


def _seal(out: Path, chunk: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / seal_name(chunk)).read_bytes())
    del found["sealed_at"]
    return found


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
    """Has this process end so, with a mistake in it. `told`: where it writes, right before, what `tell` returns."""
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
    holdback: Any = importlib.import_module("lazyshard_producer.limits")
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
    """A life. `folder`: of the checkpoints, kept as ms-swift does or not. `told`: where to write its `Progress`."""
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
    for old in found(folder)[KEPT:]:  # Before the commit: what it does not name, nobody may continue from
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
    save_position(position, checkpoint.folder)  # All of it is durable before the cursor moves
    (checkpoint.folder / _FILE).write_text(json.dumps({"ids": checkpoint.ids}))
    swift_checkpoints._make_durable(checkpoint.folder)
