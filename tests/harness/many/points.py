"""Three named writers of a stream and its sequencer, in one thread, ended or stopped at a call that changes a file."""

import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import LazyShardError, StreamEnded
from lazyshard.format.records import END, LOCK, chunk_name, seal_name
from lazyshard.format.writers import WRITERS, Committed
from lazyshard.inspection.verification import verify
from lazyshard.stream import members, sequencer, share
from lazyshard.stream.sequencer import Sequencing
from lazyshard.stream.share import Share
from lazyshard.stream.writer import open_sequenced
from tests.harness.planted.planting import around
from tests.harness.processes.kill_points import KillPoint, When
from tests.harness.scenes.streams import LASTING
from tests.stream.streams import fork, forked, names, reap

PER_CHUNK: Final = 2
ROWS: Final = {"a": 13, "b": 3, "c": 1}  # six pieces, of which the first four are deleted, and remainders: one is left
CHUNKS: Final = 9
Mutant = Callable[[], None]
Work = Callable[[Path], None]


def alone() -> None:
    """In this process no thread sequences: a writer that waits does, in its own thread. Nobody waits for a lease."""

    def wait(original: Any, self: Share, *given: Any, **named: Any) -> None:
        self._pause = lambda seconds, reason: self._sequencing.step()
        original(self, *given, **named)

    def close(original: Any, self: Share) -> None:
        original(self)
        self._sequencing.close()

    around(Share, "_wait", wait)
    around(Share, "close", close)
    Share._run = lambda self: None  # type: ignore[method-assign]
    members.RETRY_S = sequencer.RETRY_S = sequencer.LEASE_S = 0.0  # type: ignore[attr-defined, misc]
    share.REFUSED_S = 1.0  # type: ignore[misc]


def both(directory: Path) -> None:
    """The whole life of a stream: each of its writers sequences while it waits."""
    for name, rows in ROWS.items():
        try:
            with ChunkWriter(directory, PER_CHUNK, writer=name, writers=len(ROWS)) as writer:
                for number in range(writer.source or 0, rows):
                    writer.write({"id": f"{name}{number}"}, source=number + 1)
        except StreamEnded:
            pass


def write_pieces(directory: Path) -> None:
    """Leaves everything to the sequencer."""
    share.MOST_PIECES = 1000  # type: ignore[misc]
    Share.finish = lambda self, published: None  # type: ignore[method-assign]
    both(directory)


def sequence(directory: Path) -> None:
    work = Sequencing(directory, lambda: open_sequenced(directory, time.time, False, None))
    while not work.ended:
        work.step()
    work.close()


def ended_at(at: int, when: When, work: Work, directory: Path, *setup: Mutant, last: Mutant = lambda: None) -> bool:
    """Works in a fork that is killed at a call; returns whether it was."""

    def child() -> None:
        for one in setup:
            one()
        KillPoint(at, when, at_last=last).install()
        work(directory)

    code = forked(child)
    assert code in (0, -signal.SIGKILL), f"the process failed with exit code {code}"
    return code != 0


def chunks(directory: Path) -> dict[str, bytes]:
    """Files of sealed chunks, by name."""
    found: dict[str, bytes] = {}
    for number in itertools.count():
        pair = [directory / name(number) for name in (chunk_name, seal_name)]
        if not pair[1].exists():
            return found
        found |= {path.name: path.read_bytes() for path in pair}
    raise AssertionError


def check(directory: Path, before: dict[str, bytes]) -> dict[str, bytes]:
    """Checks what every instant must keep; returns what is sealed, for the next check."""
    found = chunks(directory)
    changed = [name for name, data in before.items() if found.get(name) != data]
    assert not changed, f"{changed} changed after they were sealed"
    lines = [line for name, data in found.items() if name.endswith(".jsonl") for line in data.splitlines()]
    ids = [json.loads(line)["id"] for line in lines]
    for name in ROWS:
        own = [one for one in ids if one[0] == name]
        assert own == [f"{name}{number}" for number in range(len(own))], f"rows of {name} are {own}"
    return found


def check_complete(directory: Path, before: dict[str, bytes], work: Work | None = None) -> None:
    # A writer that starts again opens the shared stream if that has ended, but not its own; a sequencer opens neither.
    allowed = {".tmp"} if work is sequence else set()
    found = check(directory, before)
    rows = sum(data.count(b"\n") for name, data in found.items() if name.endswith(".jsonl"))
    assert (rows, len(found)) == (sum(ROWS.values()), 2 * CHUNKS), f"{rows} rows are in the stream when it has ended"
    assert (directory / END).exists(), "the stream has not ended"
    assert StreamReader(directory).seen.ended, "readers are not told of the end"
    assert set(names(directory)) - allowed == LASTING | {WRITERS} | found.keys(), f"left over: {names(directory)}"
    left = {one for one in names(directory / WRITERS) if not one.startswith(".stream.")}
    assert left == {*ROWS, Committed.NAME, LOCK}, f"left over: {left}"
    for folder in (directory, *(directory / WRITERS / name for name in ROWS)):
        try:
            found_here = verify(folder, jobs=1).findings
        except (LazyShardError, OSError) as error:
            raise AssertionError(f"{folder} cannot be verified: {error}") from error
        may_stay = bool(allowed) or folder != directory
        of_writers = [one for one in found_here if f"{one.file}".startswith(WRITERS)]
        findings = [one for one in found_here if one.severity != "leftover" or not (may_stay or one in of_writers)]
        assert not findings, f"{folder} is damaged: {findings}"


def prepared(root: Path, work: Work) -> Path:
    """Returns where a stream begins: with all pieces, if only they are sequenced, or empty."""
    directory = root / "prepared"
    if work is sequence and not directory.exists():
        assert not ended_at(0, "before", write_pieces, directory, alone)
    return directory


def sweep(
    root: Path,
    work: Work,
    whens: tuple[When, ...] = ("before", "half", "after"),
    step: int = 1,
    mutant: Mutant = lambda: None,
    again: int = 0,  # every how manieth call of the recovery is a second kill, too
) -> int:
    """Kills at every call in turn, and has another process finish; returns how many calls there are."""
    begin = prepared(root, work)
    for at in range(1, 10_000, step):
        met = False
        for when in whens:
            for second in range(1 + at % again, 10_000, again) if again else (0,):
                directory = root / "stream"
                if begin.exists():
                    shutil.copytree(begin, directory)
                met = ended_at(at, when, work, directory, alone, mutant)
                sealed = check(directory, {})
                if second:
                    met_again = ended_at(second, when, work, directory, alone, mutant)
                    sealed = check(directory, sealed)
                ended_at(0, when, work, directory, alone, mutant)
                check_complete(directory, sealed, work)
                shutil.rmtree(directory)
                if second and not met_again:
                    break
        if not met:
            return at - step
    raise AssertionError


def overtake(root: Path, first_step: int, second_step: int, mutant: Mutant = lambda: None, first: int = 1) -> int:
    """Stops a sequencer at every call and another one that takes over at every call, and continues both."""

    def stopped(at: int) -> tuple[int, bool]:
        def child() -> None:
            alone()
            mutant()
            KillPoint(at, by=signal.SIGSTOP).install()
            sequence(directory)

        pid = fork(child)
        return pid, os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED  # type: ignore[union-attr]

    begin, pairs = prepared(root, sequence), 0
    directory = root / "stream"
    for at in range(first, 10_000, first_step):
        for second in range(1 + at % second_step, 10_000, second_step):
            shutil.copytree(begin, directory)
            (one, met), (other, met_too) = stopped(at), stopped(second)
            sealed = check(directory, {})
            for pid in (one, other):
                os.kill(pid, signal.SIGCONT)
                assert reap(pid) == 0, "a sequencer fails"
                sealed = check(directory, sealed)
            check_complete(directory, sealed, sequence)
            shutil.rmtree(directory)
            pairs += 1
            if not (met and met_too):
                break
        if not met:
            return pairs
    raise AssertionError


def cuts(root: Path, work: Work, cut: Mutant, restart: Callable[[], object], step: int, seed: int = 0) -> Iterator[int]:
    """Cuts the power at every call of a disk on which `root` is; yields the number of each."""
    begin = prepared(root, work)
    for at in range(1 + seed % step, 10_000, step):
        directory = root / f"{at}"
        if begin.exists():
            shutil.copytree(begin, directory)
            os.sync()
        met = ended_at(at, "after" if at % 2 else "before", work, directory, alone, last=cut)
        restart()
        sealed = check(directory, {})
        ended_at(0, "before", work, directory, alone)
        check_complete(directory, sealed, work)
        if not met:
            return
        yield at
