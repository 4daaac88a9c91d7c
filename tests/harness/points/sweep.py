"""A kill or an error at each call of the command, and of the next run."""

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.errors import LazyShardError
from lazyshard.format.records import CURSORS, HEAD, QUARANTINE, RETIRED, Head, arrays_name, chunk_name, seal_name
from lazyshard.inspection.verification import verify
from lazyshard.stream import read_retired
from tests.harness.disks import fast_folder
from tests.harness.points.reader import Reader, Watched
from tests.harness.points.sealed import SealedChunks
from tests.harness.processes.commands import Commands
from tests.harness.processes.kill_points import ERRORS, Fault, When, ways
from tests.harness.scenes.rows import side_bytes
from tests.harness.scenes.sources import FedSource
from tests.harness.scenes.streams import Stream, lasting
from tests.harness.scenes.table import POINTS, QUICK_LOOKS, Scene
from tests.harness.tally import Tally

HANGS_S: Final = 30.0  # A run that has not ended by then never will


class Whole(NamedTuple):
    lines: list[str]  # its rows, in order
    seals: list[dict[str, Any]]  # its seals, but for their times
    refused: list[dict[str, Any]]  # its refused rows, but for their times
    arrays: list[bytes] | None = None  # the bytes of each row's arrays, in order; None where rows hold none


class Stage:
    """A scene with its sources, and who plays it in folder `at`. `broken`: further functions to be called first."""

    def __init__(self, scene: Scene, nursery: Commands, reader: Reader, at: Path, broken: Sequence[str] = ()) -> None:
        self.scene, self.nursery, self.reader = scene, nursery, reader
        self.prepare: Final = (*([QUICK_LOOKS] if scene.behind is not None else []), *broken)
        self._folder = at
        self._numbers = itertools.count()
        at.mkdir()
        self._shared = None if scene.live else scene.make(at)
        self.whole: Final = self._play_whole()

    def new_folder(self) -> tuple[Path, list[FedSource]]:
        folder = self._folder / f"{next(self._numbers)}"
        folder.mkdir()
        return folder, self.scene.make(folder) if self._shared is None else self._shared

    def _play_whole(self) -> Whole:
        folder, sources = self.new_folder()
        options = list(self.scene.options)
        if "--retain" in options:
            del options[options.index("--retain") :]  # The same rows, and nobody has to be waited for
        stream = Stream(self.nursery, folder / "out", sources, options, self.scene.per_chunk)
        status, said = stream.run(kill_at=0, most_s=HANGS_S, prepare=self.prepare)
        assert status == 0, f"not even a run to which nothing happens gets through: {status}: {said}"
        # What rows it is to be is for the tests of the producer; the bytes of arrays are known.
        sides = [side_bytes(number) for number, _ in stream.rows()] if self.scene.encoded else None
        beside = b"".join(path.read_bytes() for path in sorted(stream.out.glob("chunk_*.arrays")))
        assert beside == b"".join(sides or []), f"arrays are {beside!r}, expected {sides}"
        return Whole([line.decode() for line in stream.lines()], stream.seals(), stream.refused(), sides)


_REPAIRED_S: Final = 1.0  # After so long a run that deletes and cannot is stopped: it waits for a repair, as it should
_FENCED: Final = 6  # The command's exit code where another producer has the stream
_FILESYSTEM: Final = 7  # The command's exit code for an error of the filesystem
_HARMLESS: Final = ("unlink", "rmdir", "mkdir")  # The next run removes what is left
_NAMING: Final = ("replace", "link")


def without_locks() -> None:
    """Has file locks hold nobody off, as on a network filesystem that keeps them to one machine."""
    fcntl.flock = lambda fd, operation: None


class Trial:  # A stream to which things happen. `before`: the trial it continues, on a copy; no source is live.
    def __init__(self, stage: Stage, before: "Trial | None" = None) -> None:
        self.met: list[str] = []  # for each fault that came about, the call that it met
        self.suffered: list[Fault] = []  # these faults
        self._stage = stage
        scene, lines = stage.scene, stage.whole.lines
        self._folder, sources = stage.new_folder()
        self.out: Final = self._folder / "out"
        if before is not None and before.out.exists():
            shutil.copytree(before.out, self.out)
        self._stream = Stream(stage.nursery, self.out, sources, scene.options, scene.per_chunk)
        self._acknowledged: int = 0 if before is None else before._acknowledged
        self._first: Final = self._acknowledged
        known: dict[str, bytes] = {} if before is None else before._sealed.known
        arrays = stage.whole.arrays
        self._sealed: SealedChunks = SealedChunks(
            self.out, lines, scene.per_chunk, ordered=scene.ordered, known=known, arrays=arrays
        )
        stage.reader.watch(Watched(self.out, lines, arrays, scene.per_chunk, scene.ordered, scene.behind, self._first))

    def suffer(self, fault: Fault) -> bool:
        """Runs the command with a fault; returns whether that came about."""
        waits = self._stage.scene.behind is not None and fault.always
        status, said = self._run(_REPAIRED_S if waits else HANGS_S, **fault.options())
        met = self._stage.nursery.counted.met
        self._check_now()
        if met:
            self.met.append(met)
            self.suffered.append(fault)
        self._judge(fault, met, status, said)
        return bool(met)

    def take_over(self, first: int, second: int) -> tuple[bool, bool]:
        """Runs two without locks, one to its call `first`, one to `second`, then both to their ends."""
        runs: list[int] = []
        prepare = (*self._stage.prepare, "tests.harness.points.sweep:without_locks")
        said, met = [], []
        try:
            with self._stream.fed():
                for number in (first, second):
                    runs.append(self._stream.start(kill_at=number, by=signal.SIGSTOP, prepare=prepare, most_s=HANGS_S))
                    met.append(self._stage.nursery.wait_for_stop(runs[-1]))
                    self._check_now()
                while runs:
                    os.kill(runs[0], signal.SIGCONT)
                    said.append(self._stage.nursery.wait(runs.pop(0)))
                    self._check_now()
        finally:
            for pid in runs:
                os.kill(pid, signal.SIGKILL)
                self._stage.nursery.wait(pid)
        self._judge_pair(said)
        return met[0], met[1]

    def finish(self, run: Callable[[Stream], tuple[int, str]] | None = None) -> None:
        """Runs the command without a fault and checks all. `run`: how; gives its exit status and its words."""
        acknowledged, chunks = self._acknowledged, self._sealed.chunks
        status, said = self._run(HANGS_S) if run is None else run(self._stream)
        self._check_now()
        assert status == 0 and "Traceback" not in said, f"it does not get through, and nothing fails: {status}: {said}"
        given, rows = self._read.samples + self._first * self._stage.scene.per_chunk, len(self._stage.whole.lines)
        assert (given, self._read.ended) == (rows, True), f"the reader was given {self._read}, of {rows} rows"
        mark = read_retired(self.out)
        late = self._sealed.chunks > chunks and mark < min(acknowledged, chunks - 1)  # By what was acknowledged before
        assert not late, f"acknowledged were chunks below {acknowledged}, deleted are only those below {mark}"
        self._check_content()
        self._check_names(mark)

    def finish_again(self) -> None:
        before = self._files()
        status, said = self._run(HANGS_S)
        assert not (status or before != self._files()), f"a run on the ended stream changes it: {status}: {said}"

    def _files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.out.iterdir() if path.is_file()}

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, most_s: float, **fault: Any) -> tuple[int, str]:
        status, said = self._stream.run(most_s=most_s, prepare=self._stage.prepare, **fault)
        if status == -signal.SIGALRM and most_s == HANGS_S:
            self._check_now()  # It may wait for a reader that has found something
            raise AssertionError(f"it hangs: {said}")
        return status, said

    def _check_now(self) -> None:
        self._read = self._stage.reader.report()
        assert self._read.violation is None, self._read.violation
        self._acknowledged = self._read.acknowledged
        self._sealed.look_stopped(self._acknowledged)

    def _judge(self, fault: Fault, met: str, status: int, said: str) -> None:
        assert "Traceback" not in said, f"{fault} at {met or 'nothing'}: a traceback: {said}"
        expected = 0
        if met and fault.kind == "kill":
            expected = -signal.SIGKILL
        elif met and fault.kind != "short":
            expected = _FILESYSTEM
        if status == expected:
            if expected == _FILESYSTEM:
                errors = [line for line in said.splitlines() if "error: " in line]
                text = os.strerror(ERRORS[fault.kind][0])
                told = len(errors) == 1 and text in errors[0] and str(self.out) in errors[0]
                assert told, f"{fault}: expected one line with {text!r} and {self.out}: {said}"
            return
        harmless = (  # Deleting is tried again; a name that was given is known by its result
            self._stage.scene.behind is not None or met in _HARMLESS or (met in _NAMING and fault.when == "after")
        )
        # The head finds room in what is kept for it, once.
        harmless |= fault.kind == "ENOSPC" and not fault.always and met in ("open", "write")
        passes = (status == 0 and expected == _FILESYSTEM and harmless) or (status == -signal.SIGALRM and fault.always)
        assert passes, f"{fault} at {met or 'nothing'}: exit status {status}, expected {expected}: {said}"

    def _judge_pair(self, said: Sequence[tuple[int, str]]) -> None:
        for status, text in said:
            right = "Traceback" not in text and text.count("error: ") == (status == _FENCED)
            assert right and status in (0, _FENCED), f"one of two producers ends with exit status {status}: {text}"
        assert not all(status for status, _ in said), f"both of two producers give up: {said}"

    def _check_content(self) -> None:
        stream, whole, scene = self._stream, self._stage.whole, self._stage.scene
        sealed = self._sealed.chunks
        assert sealed == len(whole.seals), f"{sealed} chunks were sealed, expected {len(whole.seals)}"
        refused, expected = stream.refused(), whole.refused  # Of files in any order only the order may differ
        if scene.live:
            refused, expected = (
                sorted((entry | {"source": Path(entry["source"]).name} for entry in entries), key=str)
                for entries in (refused, expected)
            )
        assert refused == expected, f"in quarantine is {refused}, expected {expected}"
        if scene.behind is None and not scene.live:
            assert stream.seals() == whole.seals, "seals differ from those of a run to which nothing has happened"
        try:
            findings = verify(self.out, jobs=1).findings
            ended = Head.decode((self.out / HEAD).read_bytes()).ended
        except (LazyShardError, OSError) as error:
            raise AssertionError(f"the stream cannot be verified: {error}") from error
        assert ended and not findings, f"the stream is damaged: {findings}, told as ended: {ended}"

    def _check_names(self, mark: int) -> None:
        scene, whole = self._stage.scene, self._stage.whole
        of_chunk = [chunk_name, seal_name, *([arrays_name] if scene.encoded else [])]
        expected = lasting(self.out) | {name(chunk) for chunk in range(mark, len(whole.seals)) for name in of_chunk}
        there = {QUARANTINE: bool(whole.refused), RETIRED: mark > 0, CURSORS: scene.behind is not None}
        expected |= {name for name, is_there in there.items() if is_there}
        found = {path.name for path in self.out.iterdir()}
        assert found == expected, f"left over: {sorted(found - expected)}; missing: {sorted(expected - found)}"


_STACKED: Final[dict[str, tuple[tuple[str, When, int], ...]]] = {
    "plain": (("kill", "before", 1), ("kill", "half", 1), ("kill", "after", 3), ("EIO", "before", 3)),
    "made": (("kill", "before", 5), ("kill", "half", 3), ("EIO", "before", 7)),
    "split": (("kill", "before", 9),),
    "retained": (("kill", "before", 7), ("kill", "half", 5), ("EIO", "before", 11)),
    "encoded": (("kill", "before", 5), ("kill", "half", 3), ("EIO", "before", 7)),
    "encoded retained": (("kill", "before", 13),),
}
"""First faults, each at every call, and the every how manieth call of the run after it that has a second one."""

_AGAIN: Final[tuple[tuple[str, When, bool], ...]] = (
    *(("kill", "before", False), ("EIO", "before", False), ("kill", "half", False)),
    *(("kill", "after", False), ("ENOSPC", "before", True), ("EIO", "after", False)),
)
"""What happens in the run after the first fault: one of them at each of its calls, in turn."""

_MOST_CALLS: Final = 2000
_MOST_VIOLATIONS: Final = 20  # Of one fault there may be one at every point; more tell nothing new


class Sweeper:
    def __init__(
        self,
        stage: Stage,
        tally: Tally,
        name: str,
        step: int = 1,  # every how manieth call is tried
        seed: int = 0,  # with which of them it begins
        most: int = _MOST_VIOLATIONS,  # after so many violations it tries no more
        first: int = 1,  # calls before this one are not tried
    ) -> None:
        self._stage, self._tally, self._name, self._step, self._first = stage, tally, name, step, first
        self._begins = itertools.count(seed)
        self._most = len(tally.violations) + most

    def at_every_call(self, kind: str, when: When, *, always: bool = False) -> int:
        """Puts a fault of one kind at every call of a first run; returns at how many."""
        return self._count(lambda number: self.play([Fault(kind, number, when, always)]), self._step)

    def twice(self, kind: str, when: When, step: int) -> int:
        """Puts a fault at every call of a first run, and after each one at every `step`-th of the next run."""
        return self._count(lambda number: self._after(Fault(kind, number, when), number, step), self._step)

    def in_pairs(self, second_step: int = 1) -> int:
        """Stops a run at every call, another one at each `second_step`-th; returns at how many of the first's."""
        turns = itertools.count()

        def first(number: int) -> bool:
            begin = 1 + next(turns) % second_step
            met = False
            for second in range(begin, _MOST_CALLS, second_step):
                met, again = self._pair(number, second)
                if not met or not again or len(self._tally.violations) >= self._most:
                    break
            return met

        return self._count(first, self._step)

    def _pair(self, first: int, second: int) -> tuple[bool, bool]:
        met, trial = (True, True), Trial(self._stage)
        with self._told(f"pair@{first}/{second}"):
            met = trial.take_over(first, second)
            trial.finish()
        trial.remove()
        self._tally.trial(faults=sum(met), points=int(all(met)))
        return met

    def play(self, faults: Sequence[Fault], before: Trial | None = None) -> bool:
        met, trial = False, Trial(self._stage, before)
        with self._told(*(faults if before is None else [*before.suffered, *faults])):
            for fault in faults:
                met = trial.suffer(fault)
            trial.finish()
            if not self._tally.trials % 8:
                trial.finish_again()
        trial.remove()
        self._tally.trial(faults=len(trial.met), points=int(met))
        return met

    def _after(self, first: Fault, number: int, step: int) -> bool:
        met, base, turns = False, Trial(self._stage), itertools.count(number)
        with self._told(first):
            met = base.suffer(first)
        if met:
            self._count(lambda second: self._second(base, first, second, next(turns)), step)
        base.remove()
        return met

    def _second(self, base: Trial, first: Fault, number: int, turn: int) -> bool:
        kind, when, always = _AGAIN[turn % len(_AGAIN)]
        again = Fault(kind, number, when, always)
        # What a live source gave in the first run is not there any more.
        return self.play([first, again]) if self._stage.scene.live else self.play([again], base)

    def _count(self, play: Callable[[int], bool], step: int) -> int:
        met = unmet = 0
        for number in range(self._first + next(self._begins) % step, _MOST_CALLS, step):
            if len(self._tally.violations) >= self._most:
                break
            if play(number):
                met, unmet = met + 1, 0
            else:
                unmet += 1
                if unmet == 2:  # So many numbers in a row that no call had are behind a run's end
                    break
        return met

    @contextmanager
    def _told(self, *faults: object) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self._tally.violation(f"{self._name} {' '.join(map(str, faults))}: {error}")


@contextmanager
def stage(name: str, place: Path, broken: Sequence[str] = ()) -> Iterator[Stage]:
    with fast_folder(place) as folder, Commands(folder) as nursery, Reader() as reader:
        yield Stage(POINTS[name], nursery, reader, folder / "stage", broken)


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    step = max(1, round(1 / scale))
    for name in POINTS:
        with contextlib.ExitStack() as stack:
            try:
                sweeper = Sweeper(stack.enter_context(stage(name, place)), tally, name, step, seed)
            except AssertionError as error:
                tally.violation(f"{name}: {error}")
                continue
            for when in ways("kill"):
                sweeper.at_every_call("kill", when)
            # The others differ in how they read, which changes no file.
            if name in ("plain", "made", "split", "followed", "retained", "small disk", "encoded", "encoded retained"):
                for kind in ERRORS:
                    for when in ways(kind):
                        sweeper.at_every_call(kind, when)
                    sweeper.at_every_call(kind, ways(kind)[0], always=True)
            for kind, when, every in _STACKED.get(name, ()):
                sweeper.twice(kind, when, every)
