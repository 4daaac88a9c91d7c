"""A real run of a setting: the command, and a process a rank. The clock begins when the head start is published.

A run of more ranks than a machine can hold is read in slices: those of some nodes, each as in the whole run, from a
stream that is produced anew for each slice. Each node has its own memory, in which its processes share their polls.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, Final, NamedTuple

from lazyshard import LazyShardedDataset, Order
from lazyshard.errors import FileInvalid
from lazyshard.format.records import HEAD, SEAL_SUFFIX, Head
from lazyshard.simulation import Setting, outcome
from lazyshard.stream import waiting
from lazyshard.stream.waiting import Waker
from tests.harness.processes.producing import run_arguments, running

_CONSUMER: Final = "simulated"
_LONGEST_S: Final = 120.0  # No part of a real run takes as long
_LOOK_S: Final = 0.002


class RealRunFailed(Exception):
    """A real run did not do its work; says what happened."""


class Trained(NamedTuple):
    ids: list[int]  # of the rows, in order
    began: list[float]  # when each step began, by the monotonic clock, which all processes of a machine share
    waited: list[float]  # how many seconds it waited for rows before each step, by the reader's own word
    ended_s: float  # when the last step ended
    opens: Counter[str]  # how often it opened files of each kind: head, chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    setting: Setting  # with the head start that there was, and what a step took on average but for the waits
    first_step_s: float  # when the first step began
    end_s: float  # when the last step ended
    stalled_s: float  # seconds before the first step, and from then on those of whoever waited for longest
    peak_chunks: int  # the most chunks on disk at a time
    head_opens: int  # by all ranks that there were
    chunk_opens: int  # likewise
    ids: frozenset[int]  # of the rows that they read

    @property
    def stall_share(self) -> float:
        return self.stalled_s / self.end_s


def measure(setting: Setting, place: Path, ranks: range | None = None) -> Measured:
    """Runs some of the ranks, all by default."""
    stream = place / "stream"
    stream.mkdir(parents=True)
    source = _write_source(setting, place)
    producing = running(*run_arguments(stream, [source], setting.samples_per_chunk, *_options(setting)))
    own = range(setting.ranks) if ranks is None else ranks
    with _ranks(setting, stream, own) as (go, runs), _watched(stream) as counts, producing as producer:
        head, began = _await_head(setting, stream, producer)
        go.set()
        errors = [error for error in (run.exception(_LONGEST_S) for run in runs) if error is not None]
        for error in sorted(errors, key=lambda one: isinstance(one, BrokenBarrierError)):
            raise RealRunFailed(f"a rank failed: {type(error).__name__}: {error}") from error
        if producer.wait(_LONGEST_S):
            raise RealRunFailed(f"the producer ended with {producer.returncode}: {producer.communicate()}")
    return _judge(replace(setting, head_start=head.samples), [run.result() for run in runs], began, max(counts))


@contextlib.contextmanager
def _ranks(setting: Setting, stream: Path, own: range) -> Iterator[tuple[Any, list[Future[Trained]]]]:
    """The processes of the ranks, made before there is any thread; and what starts them."""
    context = multiprocessing.get_context("fork")
    shared = context.Event(), context.Barrier(len(own))
    with ProcessPoolExecutor(len(own), context, initializer=_share, initargs=shared) as pool:
        ranks = [pool.submit(_train, setting, stream, rank) for rank in own]
        try:
            yield shared[0], ranks
        finally:
            shared[0].set()


_shared: list[Any] = []  # In a rank: what it waits for before it begins, and before each step


def _share(*shared: Any) -> None:
    _shared[:] = shared


def _train(setting: Setting, directory: Path, rank: int) -> Trained:
    go, barrier = _shared
    try:
        return _steps(setting, directory, rank, go, barrier)
    except BaseException:
        barrier.abort()
        raise


def _steps(setting: Setting, directory: Path, rank: int, go: Any, barrier: Any) -> Trained:
    opens: Counter[str] = Counter()

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            name = os.path.basename(os.fspath(arguments[0]))
            opens["chunk" if name.startswith("chunk_") else name.removesuffix(".json")] += 1

    sys.addaudithook(hear)
    waiting.MEMORY = str(directory.with_name(f"node-{rank // setting.ranks_a_node}"))  # type: ignore[misc]
    Path(waiting.MEMORY).mkdir(exist_ok=True)
    if not setting.woken:
        Waker._refused = True  # As on a network filesystem, where nobody hears of another machine's writes
    go.wait(_LONGEST_S)
    order = Order(shuffle_window=setting.window, micro_batches_per_step=setting.micro_batches)
    ranks = {"dp_rank": rank, "dp_size": setting.ranks, "batch_size": setting.batch, "max_total_samples": setting.rows}
    rest: dict[str, Any] = {**ranks, "consumer": _CONSUMER, "max_wait": _LONGEST_S}
    dataset = LazyShardedDataset(directory, order=order, **rest)
    indices, every = dataset.rank_indices, setting.checkpoint_steps
    found = Trained([], [], [], 0.0, opens)
    for step in range(setting.steps):
        before = dataset.reader.waited_s
        for first in range(step * setting.draws, (step + 1) * setting.draws, setting.batch):
            found.ids.extend(row["id"] for row in dataset.__getitems__(list(indices[first : first + setting.batch])))
        found.waited.append(dataset.reader.waited_s - before)
        barrier.wait(_LONGEST_S)  # Gradients are exchanged: no rank continues before all have had their batch
        found.began.append(time.monotonic())
        time.sleep(max(0.0, found.began[-1] + setting.step_seconds - time.monotonic()))
        if every and (step + 1) % every == 0:
            dataset.commit((step + 1) * setting.step_rows, last_epoch=True)
    return found._replace(ended_s=time.monotonic())


def _judge(setting: Setting, trained: list[Trained], started: float, peak: int) -> Measured:
    ids = sorted(number for one in trained for number in one.ids)
    wanted = setting.steps * setting.draws * len(trained)
    if len(ids) != wanted or len(set(ids)) != wanted or ids[0] < 0 or ids[-1] >= setting.rows:
        raise RealRunFailed(f"expected {wanted} different rows of [0, {setting.rows}), found {len(set(ids))}")
    first = max(one.began[0] for one in trained) - started
    end = max(one.ended_s for one in trained) - started
    # At each step the slowest rank decides.
    stalled = first + sum(map(max, zip(*(one.waited[1:] for one in trained), strict=True)))
    setting = replace(setting, step_seconds=(end - stalled) / setting.steps)
    found: dict[str, Any] = {"first_step_s": first, "end_s": end, "stalled_s": stalled, "peak_chunks": peak}
    found |= {f"{name}_opens": sum(one.opens[name] for one in trained) for name in ("head", "chunk")}
    return Measured(setting=setting, ids=frozenset(ids), **found)


def _write_source(setting: Setting, place: Path) -> Path:
    path = place / "rows.jsonl"
    with path.open("wb") as file:
        for number in range(setting.rows):
            row = b'{"id":%d,"text":"' % number
            file.write(row + b"x" * max(0, setting.row_bytes - len(row) - 3) + b'"}\n')
    return path


@contextlib.contextmanager
def _watched(directory: Path) -> Iterator[list[int]]:
    counts, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            counts.append(sum(name.endswith(SEAL_SUFFIX) for name in os.listdir(directory)))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield counts
    finally:
        over.set()
        watching.join()


def _options(setting: Setting) -> list[str]:
    """Of the producer."""
    options = ["--rate", str(setting.producer_rate), "--retain", setting.retain, "--no-progress"]
    if setting.retain == "consumed":
        options += ["--consumers", _CONSUMER]
    if setting.max_ahead is not None:
        options += ["--max-ahead", setting.max_ahead.replace(" ", "")]
    return options


def _await_head(setting: Setting, stream: Path, producer: "subprocess.Popen[str]") -> tuple[Head, float]:
    until = time.monotonic() + _LONGEST_S
    while time.monotonic() < until and not producer.poll():
        with contextlib.suppress(FileNotFoundError, FileInvalid):
            head = Head.decode((stream / HEAD).read_bytes())
            if head.samples >= setting.head_start:
                return head, time.monotonic() - (time.time() - head.updated_at)
        time.sleep(_LOOK_S)
    producer.kill()
    raise RealRunFailed(f"the producer published no {setting.head_start} rows: {producer.communicate()}")


_BUSY: Final = 1.25  # Where sleeping takes so many times as long, other people's work is measured

_COMMON: Final[dict[str, Any]] = {
    **{"batch": 4, "step_seconds": 0.1, "workers": 0, "latency_s": 0.0, "row_bytes": 200},
    **{"retain": "consumed", "checkpoint_steps": 10},
}


def _case(ranks: int, per_chunk: int, rows: int, rate: float, **more: Any) -> Setting:
    return Setting(ranks=ranks, samples_per_chunk=per_chunk, rows=rows, producer_rate=rate, **(_COMMON | more))


CASES: Final = (
    _case(2, 20, 640, 200.0, max_ahead="6 chunks"),
    _case(2, 20, 400, 50.0),
    _case(4, 20, 1280, 400.0, max_ahead="16 chunks", window=2),
    _case(4, 25, 800, 100.0, woken=True),
    _case(8, 20, 2560, 800.0, head_start=320),
    _case(8, 10, 1600, 200.0, window=2),
)


def run_nodes(nodes: int, slices: int, folder: Path) -> Measured:
    """Runs 8 ranks on each node, a slice of the nodes at a time; returns sums of the counts, and means of the times."""
    ranks = 8 * nodes
    more = {"retain": "all", "checkpoint_steps": 0, "ranks_a_node": 8}
    setting = _case(ranks, 4, 4 * ranks * 4, ranks * 0.8, **more)
    found = []
    for number in range(slices):
        own = range(ranks * number // slices, ranks * (number + 1) // slices)
        found.append(measure(setting, folder / str(number), own))
        opens = (found[-1].head_opens, found[-1].chunk_opens)
        print(f"ranks {own.start} to {own.stop - 1}: {opens[0]} opens of head.json, {opens[1]} of chunks", flush=True)
    rows = list(itertools.chain.from_iterable(one.ids for one in found))
    if len(rows) != len(set(rows)) or len(rows) != setting.steps * setting.step_rows:
        raise RealRunFailed(f"expected {setting.steps * setting.step_rows} different rows, found {len(set(rows))}")
    means = {name: sum(getattr(one, name) for one in found) / slices for name in ("first_step_s", "end_s", "stalled_s")}
    sums = {name: sum(getattr(one, name) for one in found) for name in ("head_opens", "chunk_opens")}
    seconds = sum(one.setting.step_seconds for one in found) / slices
    whole = replace(found[0], setting=replace(found[0].setting, step_seconds=seconds), **means, **sums)
    rate = sum(sums.values()) / nodes / whole.end_s
    print(f"opens a second and node: {rate:.2f}; each of {len(rows)} rows was read once")
    return whole


def compare(measured: Measured, tolerance: float) -> list[bool]:
    """Prints prediction and measurement; returns which figures fit, within the tolerance and one event more or less."""
    predicted, ranks = outcome(measured.setting), measured.setting.ranks
    print(f"\n{measured.setting}\n  {'':20}{'predicted':>11}{'measured':>11}")
    fits = []
    for name, wanted, real, besides in (
        ("first step, s", predicted["first_step_s"], measured.first_step_s, 0.5),
        ("last step, s", predicted["end_s"], measured.end_s, 0.5),
        ("stalled, s", predicted["stalled_s"], measured.stalled_s, 0.05 * measured.end_s),
        ("share stalled", predicted["stall_share"], measured.stall_share, 0.05),
        ("disk peak, chunks", predicted["peak_chunks"], measured.peak_chunks, 2.0),
        ("opens of head.json", predicted["head_opens"], measured.head_opens, 10.0 + 2.0 * ranks),
        ("opens of chunks", predicted["chunk_opens"], measured.chunk_opens, 0.0),
    ):
        allowed = tolerance * real + besides
        fits.append(abs(wanted - real) <= allowed)
        verdict = "" if fits[-1] else f"   more than {allowed:.3g} apart"
        print(f"  {name:20}{wanted:>11,.3f}{real:>11,.3f}{verdict}", flush=True)
    return fits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4, 8), choices=(2, 4, 8), help="only those")
    parser.add_argument("--tolerance", type=float, default=0.15, help="share by which predictions may be off (0.15)")
    parser.add_argument("--nodes", type=int, default=0, help="instead one run of 8 ranks on each of so many nodes")
    parser.add_argument("--slices", type=int, default=8, help="with --nodes: how many parts are run in turn (8)")
    parser.add_argument("--dir", type=Path, help="where to put the streams (a temporary folder)")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    fits: list[bool] = []
    cases = CASES[:1] if args.nodes else [one for one in CASES if one.ranks in args.ranks]
    for case in cases:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            try:
                real = run_nodes(args.nodes, args.slices, Path(folder)) if args.nodes else measure(case, Path(folder))
            except RealRunFailed as error:
                print(f"a real run failed: {error}", file=sys.stderr)
                return 1
        fits += compare(real, args.tolerance)
        if real.setting.step_seconds > _BUSY * case.step_seconds:
            print(f"  this machine is busy: a step of {1000 * case.step_seconds:.0f} ms took longer; so may all else")
    print(f"\n{sum(fits)} of {len(fits)} predictions are within {args.tolerance:.0%} and what each may be off besides")
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    return 0 if all(fits) else 1


if __name__ == "__main__":
    sys.exit(main())
