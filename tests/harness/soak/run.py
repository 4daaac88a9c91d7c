"""Soaks: a producer at full speed and a training job, with things killed in storms and calms; each sample is seen."""

import contextlib
import os
import pickle
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from lazyshard.inspection.verification import verify
from tests.harness.processes.nursery import Nursery, adopt_orphans, has_children, leave, reap_group
from tests.harness.runs import checkpoints as run_checkpoints
from tests.harness.soak import rows as soak_rows
from tests.harness.soak import watch
from tests.harness.soak.history import History
from tests.harness.soak.job import CONSUMER, Job, Producer, Rules, Shape, Step
from tests.harness.soak.watch import children
from tests.harness.tally import RunViolation, Tally

_PAUSE_S: Final = 3.0  # Mean time from one fault of a storm to the next
STOP_S: Final = 3.0  # The longest time for which somebody is stopped, or the disk is full
DISK_FULL: Final = "disk full for a while"


class Chaos:
    def __init__(self, soak: "Soak", settings: "Settings", dice: random.Random) -> None:
        self.options: tuple[str, ...] = ()  # of the command, besides those that never change
        self._soak, self._dice = soak, dice
        self._half_cycle_s = settings.half_cycle_s
        self._next_s, self._wake_at = _PAUSE_S, 0.0
        self._stopped: list[int] = []
        self._full_until, self._full = -float("inf"), False
        self._faults: list[tuple[str, int, bool, Callable[[], bool]]] = [  # (name, weight, ends ranks, what is done)
            ("producer killed (SIGKILL)", 3, False, self._kill_producer),
            ("producer asked to end (SIGTERM)", 1, False, lambda: self._signal_producer(signal.SIGTERM)),
            ("producer stopped for a while (SIGSTOP, SIGCONT)", 1, False, lambda: self._stop([soak.producer.pid])),
            ("all ranks killed at once (SIGKILL)", 3, True, lambda: self._end(lambda job: job.pids)),
            ("all ranks asked to end (SIGTERM)", 1, True, lambda: self._end(lambda job: job.pids, signal.SIGTERM)),
            ("one rank killed, then the others (SIGKILL)", 2, True, lambda: self._end(lambda job: self._one(job.pids))),
            ("one DataLoader worker killed (SIGKILL)", 2, True, lambda: self._end(self._worker)),
            ("one rank or worker stopped for a while", 1, False, self._stop_rank),
            ("producer and ranks killed at once (SIGKILL)", 1, True, self._kill_all),
            (DISK_FULL, 2, False, self._fill_disk),
        ]

    def is_full(self, after_s: float) -> bool:
        return time.monotonic() < self._full_until + after_s

    def tick(self, elapsed_s: float) -> None:
        self._go_on()
        if elapsed_s < self._next_s:
            return
        cycle_s = 2 * self._half_cycle_s
        if elapsed_s % cycle_s >= self._half_cycle_s:
            self._next_s = (elapsed_s // cycle_s + 1) * cycle_s
            return
        self._next_s = elapsed_s + self._dice.expovariate(1 / _PAUSE_S)
        job = self._soak.job  # Ranks that have only just begun are hit now and then; always, and they would get nowhere
        hits_ranks = job is not None and (job.steps > 0 or self._dice.random() < 0.2)
        faults = [one for one in self._faults if hits_ranks or not one[2]]
        name, _, _, do = self._dice.choices(faults, [one[1] for one in faults])[0]
        if do():
            self._soak.report.done[name] += 1
            self._soak.report.kills += 1
            self._soak.moved()

    def calm_down(self) -> None:
        self._wake_at = 0.0
        self._full_until = min(self._full_until, time.monotonic())
        self._go_on()

    def _go_on(self) -> None:
        now = time.monotonic()
        if self._stopped and now >= self._wake_at:
            for pid in self._stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self._stopped.clear()
            self._soak.moved()
        if self._full and self._soak.ballast is not None:
            self._soak.moved()
            self._full = now < self._full_until
            (self._soak.ballast.fill if self._full else self._soak.ballast.drop)()

    def _one(self, of: list[int]) -> list[int]:
        return [self._dice.choice(of)] if of else []

    def _signal_producer(self, number: signal.Signals) -> bool:
        self._soak.producer.signal(number, self._dice.choice([0.0, self._dice.random()]))
        return self._soak.producer.pid != 0

    def _kill_producer(self) -> bool:
        self.options = ("--min-free-disk", "1MB") if self._dice.random() < 0.5 else ()  # It waits for a full disk then
        return self._signal_producer(signal.SIGKILL)

    def _end(self, which: Callable[[Job], list[int]], number: signal.Signals = signal.SIGKILL) -> bool:
        job = self._soak.job
        if job is None or job.ended or not (pids := which(job)):
            return False
        job.signal(pids, number)
        return True

    def _worker(self, job: Job) -> list[int]:
        return self._one([child for pid in job.pids for child in children(pid)])

    def _kill_all(self) -> bool:
        self._soak.producer.signal(signal.SIGKILL)
        return self._end(lambda job: job.pids)

    def _stop_rank(self) -> bool:
        job = self._soak.job
        return job is not None and not job.ended and self._stop(self._one([pid for pid, _ in job.processes()]))

    def _fill_disk(self) -> bool:
        if self._soak.ballast is None:
            return False
        self._full, self._full_until = True, time.monotonic() + self._dice.uniform(0.2, STOP_S)
        return True

    def _stop(self, pids: list[int]) -> bool:
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self._stopped.append(pid)
                self._wake_at = max(self._wake_at, time.monotonic() + self._dice.uniform(0.2, STOP_S))
                return True
        return False


_MAX_AHEAD: Final = 512  # Chunks: of less the ranks would wait for the producer's looks at them, see docs/retention.md
_SEAL_BYTES: Final = 27  # Of a seal, for each row; see docs/retention.md


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: float  # how long things are killed; to end the stream takes a little longer
    seed: int = 0  # of what is drawn by chance
    ranks: int = 8  # of the life that begins, and the most of any
    rules: Rules = field(default_factory=Rules)
    patience_s: float = 120.0  # so long may nothing continue

    @property
    def half_cycle_s(self) -> float:
        return min(240.0, max(8.0, self.seconds / 6))

    def max_disk(self, batch_size: int, row_bytes: int) -> int:
        """Twice what docs/retention.md says is the least, and what may be ahead. `row_bytes`: with the seal's part."""
        rules = self.rules
        interval = rules.every * batch_size * self.ranks / rules.per_chunk
        window = self.ranks * max(1, rules.window)
        ahead = 2 * 2 * batch_size * self.ranks / rules.per_chunk
        chunks = (rules.keep + 2) * interval + 2 * window + ahead  # One more for what is written, one for its start
        return int((2 * chunks + _MAX_AHEAD) * (row_bytes * rules.per_chunk + 512))


@dataclass
class Report:
    minutes: float = 0.0  # how long it took
    seed: int = 0
    kills: int = 0  # how often anything was killed or stopped, or the disk filled
    done: Counter[str] = field(default_factory=Counter)  # by name: kills by kind, lives, resumes
    counts: dict[str, float] = field(default_factory=dict)  # by name: samples, chunks, bytes, the most that there was
    held: dict[str, dict[str, int]] = field(default_factory=dict)  # by kind of process, the most that one of them held
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was not done and why

    def most(self, name: str, number: float) -> None:
        self.counts[name] = max(self.counts.get(name, 0), number)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"done": dict(self.done)}

    def __str__(self) -> str:
        lines = [f"{self.minutes:.1f} minutes, seed {self.seed}: {self.kills} faults"]
        counted = *sorted(self.done.items()), *self.counts.items()
        lines += [f"  {name:58}{number:>16,.10g}" for name, number in counted]
        lines += [f"  the most that one {kind} held: {held}" for kind, held in self.held.items()]
        lines += [f"  not done: {note}" for note in self.notes]
        lines += [f"  VIOLATION: {violation}" for violation in self.violations]
        return "\n".join([*lines, f"  {len(self.violations)} violations"])


_BATCHES: Final = (16, 32)
_ORPHAN_S: Final = 30.0  # DataLoader workers whose rank was killed are gone by then: torch has them look every 5 s
_DISK_S: Final = 0.25
_SERVE_S: Final = 0.05
_MOST_TEMPORARY: Final = 5  # Under .tmp: two chunks, their seals, room for a head


class Soak:
    def __init__(self, settings: Settings, place: Path, say: Callable[[str], object]) -> None:
        self.report = Report(seed=settings.seed)
        self.job: Job | None = None
        self.ballast: watch.Ballast | None = None
        self._settings, self._rules, self._say = settings, settings.rules, say
        self._disk, self._checkpoints, self._said = place / "disk", place / "checkpoints", place / "said"
        self._stream, self._stop, self._decided = self._disk / "stream", place / "stop", place / "stop.at"
        for folder in (self._disk, self._checkpoints, self._said):
            folder.mkdir()
        self._limit = settings.max_disk(max(_BATCHES), soak_rows.longest(10**10) + _SEAL_BYTES)
        options = ["--samples-per-chunk", self._rules.per_chunk, "--retain", "consumed", "--consumers", CONSUMER]
        options += ["--max-ahead", _MAX_AHEAD, "--max-disk", self._limit]
        self.producer = Producer(self._stream, list(map(str, options)), self._said / "producer.log", self._stop)
        self._dice = random.Random(f"soak {settings.seed}")
        self._chaos = Chaos(self, settings, self._dice)
        self._history = History(self._rules, settings.ranks)
        self._watch = watch.Watch()
        self._largest = 0
        self._orphans: list[tuple[int, float]] = []
        self._job_at = self._looked_at = self._measured_at = 0.0
        self._moved_at = self._begun = self._said_at = time.monotonic()

    def run(self) -> Report:
        adopt_orphans()
        # Twice the limit: room for what is deleted and still open, and for what is being written.
        missing = watch.own_namespace(self._disk, max(16 << 20, 4 * self._limit))
        if missing is None:
            self.ballast = watch.Ballast(self._disk)
        else:
            self.report.notes.append(f"{DISK_FULL}: {missing}")
        try:
            self._soak()
        except RunViolation as error:
            self.report.violations.append(f"{error.kind}: {error.text}")
        except TimeoutError as error:
            self.report.violations.append(f"hang: {error}; {self._describe()}")
        finally:
            self._close()
        self._count()
        if not self.report.violations:
            watch.leave(self._disk)
        return self.report

    def moved(self) -> None:
        now = time.monotonic()
        self.report.most("longest time without a step, s", round(now - self._moved_at, 1))
        self._moved_at = now

    def _soak(self) -> None:
        deadline = self._begun + self._settings.seconds
        while time.monotonic() < deadline:
            self._tick()
            self._chaos.tick(time.monotonic() - self._begun)
        self._chaos.calm_down()
        while self._history.trained == 0:  # A stream that ends with nothing is not what is tried here
            self._tick()
        self._stop.touch()
        while self.job is None or not self.job.ended:
            self._tick()
        self._check_end()

    def _tick(self) -> None:
        self.producer.start(self._chaos.options)
        full = self._chaos.is_full(15.0)  # So long after a disk was full may somebody still end for that
        if self.producer.check(full=full):
            self.moved()
        now = time.monotonic()
        if self.job is None and now >= self._job_at:
            self._begin_life()
        self._serve(full=full)
        if now - self._measured_at >= _DISK_S:
            self._measured_at = now
            self._check_disk()
            self._check_orphans()
        if now - self._looked_at >= min(2.0, max(0.4, self._settings.half_cycle_s / 60)):
            self._looked_at = now
            self._look()
        if now - self._said_at >= 60.0:
            self._said_at = now
            self._say(f"{self._history.trained:,} samples trained, {self.report.kills} faults")
        if time.monotonic() - self._moved_at > self._settings.patience_s:
            raise RunViolation("hang", f"no step for {self._settings.patience_s:.0f} s; {self._describe()}")

    def _serve(self, *, full: bool) -> None:
        until = time.monotonic() + _SERVE_S
        if self.job is None:
            time.sleep(_SERVE_S)
            return
        while not self.job.ended and (left := until - time.monotonic()) > 0:
            try:
                alive = self.job.serve(left, self._on_step)
            except RunViolation as error:
                if error.kind != "full" or not full:
                    raise
                self.report.done["lives that ended since the disk was full"] += 1
                alive = False
            if not alive:
                self._end_life()
                return

    def _begin_life(self) -> None:
        kept = run_checkpoints.found(self._checkpoints)
        back = min(self._dice.choice([0, 0, 0, 1, 2]), max(0, len(kept) - 1))
        run_checkpoints.remove(self._checkpoints, kept[:back])
        origin = kept[back] if kept else None
        done, most = self.report.done, self._settings.ranks
        dp = most if done["lives"] % 2 == 0 else self._dice.randint(max(1, most // 4), most)
        shape = Shape(done["lives"], dp, self._dice.choice(_BATCHES), self._dice.choice([1, 1, 2]))
        self._history.go_on(origin, dp)
        self.job = Job(shape, self._rules, self._stream, self._checkpoints, origin, self._said)
        done["lives"] += 1
        if origin is not None:
            done["resumes"] += 1
            done["resumes from an older checkpoint"] += back > 0
            done["resumes with another number of ranks"] += dp != self._history.ranks_before
        self.moved()

    def _end_life(self) -> None:
        assert self.job is not None
        self.job.close()
        self._orphans.append((self.job.group, time.monotonic()))
        self.job = None
        self._job_at = time.monotonic() + self._dice.random() * 0.5
        self.moved()

    def _on_step(self, step: Step) -> bool:
        assert self.job is not None
        if self._stop.exists():
            self._history.learn_end(self._decided)
        self._history.train(step, self.job.shape, self.job.steps)
        self.report.counts["samples trained"] = self._history.trained
        self.report.done["steps"] += 1
        self.moved()
        if self.job.steps % self._rules.every:
            return False
        self._history.close()
        self.report.counts["chunks deleted"] = self._history.check_kept(self._stream, self._checkpoints)
        self.report.most("samples that the bookkeeping keeps something for", self._history.ledger.size)
        return True

    def _check_disk(self) -> None:
        use = watch.measure(self._stream)
        self._largest = max(self._largest, use.largest)
        most = self._limit + self._largest  # The next chunk is taken to be as large as the largest so far
        if use.chunks > most:
            raise RunViolation("disk", f"chunks and seals take {use.chunks:,} bytes, {most:,} are allowed")
        if use.temporary > _MOST_TEMPORARY or use.unpublished > _MOST_TEMPORARY * max(self._largest, 1 << 16):
            raise RunViolation("disk", f"{use.temporary} files of {use.unpublished:,} bytes are under .tmp")
        self.report.most("chunks and seals, bytes", use.chunks)
        self.report.most("under .tmp, bytes", use.unpublished)
        if self.ballast is not None and not self._chaos.is_full(_DISK_S + 1):
            self.report.most("disk, deleted but open files too, bytes", watch.used_bytes(self._disk))

    def _check_orphans(self) -> None:
        left = []
        for group, since in self._orphans:
            try:
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                self.report.most("longest life of a worker without its rank, s", round(time.monotonic() - since, 1))
                continue
            if time.monotonic() - since > _ORPHAN_S + STOP_S:
                raise RunViolation("hang", f"workers of a killed rank are there after {_ORPHAN_S:.0f} s")
            left.append((group, since))
        self._orphans = left

    def _look(self) -> None:
        # Once they are at work: until then they open what they need.
        processes = [] if self.job is None or self.job.steps < 3 else self.job.processes()
        if self.producer.pid:
            processes.append((self.producer.pid, "producer"))
        for leak in self._watch.look(processes):
            raise RunViolation("leak", leak)

    def _check_end(self) -> None:
        assert self.job is not None
        self.job.close()
        self._history.learn_end(self._decided)
        self._history.check_whole(self.job.shape)
        self.report.counts["samples of the stream"] = self._history.total or 0
        while not self.producer.ended:
            if not self.producer.check(full=False):
                time.sleep(0.01)
            if time.monotonic() - self._moved_at > self._settings.patience_s:
                raise RunViolation("hang", f"the producer does not end: {self._describe()}")
        for group, _ in self._orphans:
            reap_group(group)
        self._orphans.clear()
        findings = verify(self._stream, jobs=1).findings
        if findings:
            raise RunViolation("torn", f"the stream is damaged: {findings[:3]}")
        left = sorted(path.name for path in (self._stream / ".tmp").glob("*"))
        for what in (left, ["processes"] * has_children(), watch.left_in_memory(self._disk)):
            if what:
                raise RunViolation("leak", f"left are {what[:5]}")

    def _describe(self) -> str:
        processes = [] if self.job is None else [pid for pid, _ in self.job.processes()]
        waiting = "none" if self.job is None else self.job.waiting()
        told = [f"ranks that have not told of the step: {waiting}", *map(watch.describe, processes)]
        told += [watch.describe(self.producer.pid)] if self.producer.pid else []
        return "\n    ".join([*told, f"the producer said {self.producer.said()[-600:]!r}"])

    def _close(self) -> None:
        self._chaos.calm_down()
        self.producer.close()
        if self.job is not None and not self.job.ended:
            self.job.doomed = True
            self._orphans.append((self.job.group, 0.0))
            self.job.close()
        for group, _ in self._orphans:
            reap_group(group)
        self.report.violations += [f"leak: {leak}" for leak in self._watch.end()]

    def _count(self) -> None:
        report = self.report
        report.minutes = (time.monotonic() - self._begun) / 60
        report.done["producer started"] = self.producer.starts
        report.done["producer ended since the disk was full"] = self.producer.fulls
        report.counts["samples that the surviving history has trained"] = self._history.ledger.trained
        report.counts["limit of chunks and seals, bytes"] = self._limit
        report.counts["lives of processes long enough to be compared"] = self._watch.compared
        peaks = self._watch.peaks | {"supervisor": watch.look_at(os.getpid())}
        report.held = {kind: peak._asdict() for kind, peak in sorted(peaks.items()) if peak is not None}


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    """Soaks for an hour, or the share of it that is asked for, and makes the stream of a million chunks."""
    with Nursery(place / "forks", __name__) as forks:
        found = soak(forks, place, "--minutes", str(60 * scale), "--seed", str(seed))
        million = soak(forks, place, "--million", "--chunks", str(max(2_000, round(1_000_000 * scale))))
    if found is not None:
        tally.trial(faults=found["kills"], points=found["done"].get("steps", 0))
        tally.violations += found["violations"]
        tally.notes += found["notes"]
        for name in ("lives", "resumes", "resumes with another number of ranks"):
            tally.count(name, found["done"].get(name, 0))
        tally.count("samples trained", int(found["counts"].get("samples trained", 0)))
    else:
        tally.violation(f"scripts/soak --seed {seed} did not come to its end")
    if million is None:
        tally.notes.append("scripts/soak --million did not come to its end: what it said is above")
        return
    tally.trial(faults=1)
    tally.violations += million["violations"]
    tally.count("chunks of the long stream", million["chunks"])


def soak(forks: Nursery, place: Path, *arguments: str) -> dict[str, Any] | None:
    """Runs the program in a fork of a process that has loaded this module; returns its report, None if it made none."""
    ended = forks.call(_soak, place, arguments, within_s=4 * 3600.0)
    print(ended.said, flush=True)
    found: dict[str, Any] | None = pickle.loads(ended.left) if ended.left else None
    return found


def _soak(place: Path, arguments: tuple[str, ...]) -> int:
    from tests.harness.soak.__main__ import main

    os.setsid()
    report = place / f"report-{os.getpid()}"
    code = main(["--dir", str(place), "--json", str(report), *arguments])
    if report.exists():
        leave(pickle.dumps(orjson.loads(report.read_bytes())))
    return code
