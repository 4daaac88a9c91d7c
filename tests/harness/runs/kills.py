"""The instant at which a run is killed: the processes of a life count their calls against numbers they have in common.
A kill is armed by a process that has come to the step for it; the call that it then falls on ends the whole group of
processes at once, wherever each of them is. So is it the same one in every run of a seed, but for what the producer was
doing meanwhile."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args

# Where in the call it comes; half is meant for writes, and is before for others
When = Literal["before", "half", "after"]
WHENS: Final[tuple[When, ...]] = ("before", "half", "after")
CHANGES: Final = ("write", "ftruncate", "replace", "rename", "unlink", "mkdir", "rmdir")
READS: Final = ("open", "pread")
# Counts as a change, and is not made: nobody cuts the power here, and it would take most of the time
SYNC: Final = "fsync"
PRODUCER: Final = 8  # Place on the board of the first producer; those before it are the ranks'
_PRODUCERS: Final = 3
_KILLED, _LATE, _PRODUCING, _LONELY, _WHEN = range(5)
_FIRST: Final = 5
_FIELDS: Final = ("step", "phase", "reads", "changes")
Phase = Literal[
    "not begun",
    "starting",
    "before a step",
    "reading",
    "waiting for the other ranks",
    "writing a checkpoint",
    "committing",
    "done",
]
_PHASES: Final[tuple[Phase, ...]] = get_args(Phase)


class Board:
    """Numbers that the processes of a run, all forks of one, have in common: where each is, and what kills them."""

    def __init__(self) -> None:
        self._cells = memoryview(mmap.mmap(-1, 8 * (_FIRST + len(_FIELDS) * (PRODUCER + _PRODUCERS)))).cast("q")

    def reset(self, when: When, *, lonely: bool) -> None:
        """Begins a life. `when`: where in a call a kill comes. `lonely`: it is that of one process, and the others are
        for the supervisor to end."""
        producing = self._cells[_PRODUCING]
        for at in range(len(self._cells)):
            self._cells[at] = 0
        self._cells[_PRODUCING] = producing
        self._cells[_LONELY] = lonely
        self._cells[_WHEN] = WHENS.index(when)

    @property
    def killed(self) -> bool:
        return bool(self._cells[_KILLED])

    @property
    def late(self) -> bool:
        """Whether it has come at the end, since what was planned was not met on the way."""
        return bool(self._cells[_LATE])

    def producing(self, number: int) -> bool:
        return bool(self._cells[_PRODUCING] >> number & 1)

    def set_producing(self, number: int, there: bool) -> None:
        """Says whether there is this producer. For the supervisor alone."""
        others = self._cells[_PRODUCING] & ~(1 << number)
        self._cells[_PRODUCING] = others | there << number

    @property
    def when(self) -> When:
        return WHENS[self._cells[_WHEN]]

    def kill(self) -> None:
        """Ends this process, and unless it is to be alone in that, its whole group."""
        self.kill_from_outside(os.getpid() if self._cells[_LONELY] else -os.getpgid(0))

    def kill_late(self) -> None:
        """Kills at the end."""
        self._cells[_LATE] = 1
        self.kill()

    def kill_from_outside(self, pid: int) -> None:
        """Ends a process, or the group whose negative number is given."""
        self._cells[_KILLED] = 1
        os.kill(pid, signal.SIGKILL)

    def enter(self, who: int, step: int, phase: Phase) -> None:
        """Says where a process is, for those who ask why nothing goes on."""
        self._cells[self._at(who, "step")] = step
        self._cells[self._at(who, "phase")] = _PHASES.index(phase)

    def where(self, who: int) -> str:
        step, phase = (self._cells[self._at(who, field)] for field in ("step", "phase"))
        return f"rank {who} is {_PHASES[phase]}, step {step}"

    def arm(self, who: int, kind: Literal["reads", "changes"], call: int) -> None:
        """Has the kill come at a process's n-th call of a kind from now on, from 1; 0 takes it back."""
        self._cells[self._at(who, kind)] = call

    def due(self, who: int, kind: Literal["reads", "changes"]) -> bool:
        at = self._at(who, kind)
        left = self._cells[at]
        if not left:
            return False
        self._cells[at] = left - 1
        return left == 1

    @contextmanager
    def armed(self, who: int, kind: Literal["reads", "changes"], call: int) -> Iterator[None]:
        self.arm(who, kind, call)
        yield
        self.arm(who, kind, 0)

    def _at(self, who: int, field: str) -> int:
        return _FIRST + who * len(_FIELDS) + _FIELDS.index(field)


def count_calls(board: Board, who: int, alone_at: int = 0) -> None:
    """Begins to count the calls of this process and its forks. It has to end with its work: nothing is put back.
    `alone_at`: the change at which this process dies and no other one, from 1; 0 for never."""
    changes = 0

    def alone() -> bool:
        nonlocal changes
        changes += 1
        return changes == alone_at

    def counted(name: str, call: Callable[..., Any], kind: Literal["reads", "changes"]) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            itself = kind == "changes" and alone()
            if not board.due(who, kind) and not itself:
                return call(*arguments, **named)
            if board.when == "half" and name == "write":
                fd, data = arguments
                call(fd, bytes(data)[: len(data) // 2])
            elif board.when == "after":
                call(*arguments, **named)
            if itself:
                os.kill(os.getpid(), signal.SIGKILL)
            board.kill()
            raise AssertionError("killed, and still there")

        return counting

    for name in CHANGES:
        setattr(os, name, counted(name, getattr(os, name), "changes"))
    for name in READS:
        setattr(os, name, counted(name, getattr(os, name), "reads"))
    os.fsync = counted(SYNC, lambda fd: None, "changes")
