"""When a run is killed: processes count calls on a board; at its step one arms the kill, which ends all at once."""

import ctypes
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args

from tests.harness.processes.kill_points import WHENS, When

CHANGES: Final = ("write", "ftruncate", "replace", "rename", "unlink", "mkdir", "rmdir")
SYNC: Final = "fsync"  # Counts as a change, and is not made: it would take most of the time
PRODUCER: Final = 8  # Place on the board of the first producer; those before it are the ranks'
Phase = Literal[
    "not begun", "starting", "before a step", "reading", "waiting for the other ranks", "saving", "committing", "done"
]
_PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
Kind = Literal["reads", "changes"]


class _Place(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("step", "phase", "reads", "changes")]


class Board(ctypes.Structure):
    """Numbers that the processes of a run, all forks of one, have in common: where each is, and what kills them."""

    producing: Any  # which producers there are; told by the supervisor alone
    killed: int  # whether the kill has come
    late: int  # whether it has come at the end, since what was planned was not met on the way
    lonely: int  # whether it is that of one process, and the others are for the supervisor to end
    way: int  # where in a call it comes
    places: Any
    _fields_ = [
        ("producing", ctypes.c_long * 3),
        *((name, ctypes.c_long) for name in ("killed", "late", "lonely", "way")),
        ("places", _Place * (PRODUCER + 3)),
    ]

    @staticmethod
    def make() -> "Board":
        return Board.from_buffer(mmap.mmap(-1, ctypes.sizeof(Board)))

    def reset(self, when: When, *, lonely: bool) -> None:
        self.killed, self.late, self.lonely, self.way = 0, 0, lonely, WHENS.index(when)
        ctypes.memset(ctypes.addressof(self.places), 0, ctypes.sizeof(self.places))

    def kill(self) -> None:
        self.kill_from_outside(os.getpid() if self.lonely else -os.getpgid(0))

    def kill_from_outside(self, pid: int) -> None:
        self.killed = 1
        os.kill(pid, signal.SIGKILL)

    def enter(self, who: int, step: int, phase: Phase) -> None:
        self.places[who].step, self.places[who].phase = step, _PHASES.index(phase)

    def where(self, who: int) -> str:
        return f"rank {who} is {_PHASES[self.places[who].phase]}, step {self.places[who].step}"

    def arm(self, who: int, kind: Kind, call: int) -> None:
        """Has the kill come at a process's n-th call of a kind from now on, from 1; 0 takes it back."""
        setattr(self.places[who], kind, call)

    def due(self, who: int, kind: Kind) -> bool:
        left: int = getattr(self.places[who], kind)
        self.arm(who, kind, max(0, left - 1))
        return left == 1

    @contextmanager
    def armed(self, who: int, kind: Kind, call: int) -> Iterator[None]:
        self.arm(who, kind, call)
        yield
        self.arm(who, kind, 0)


def count_calls(board: Board, who: int, alone_at: int = 0) -> None:
    """Counts the calls of this process and its forks. `alone_at`: the change at which it dies alone; 0 for never."""
    changes = 0

    def counted(name: str, call: Callable[..., Any], kind: Kind) -> Any:
        def counting(*arguments: Any, **named: Any) -> Any:
            nonlocal changes
            changes += kind == "changes"
            alone = kind == "changes" and changes == alone_at
            if not board.due(who, kind) and not alone:
                return call(*arguments, **named)
            if WHENS[board.way] == "half" and name == "write":
                fd, data = arguments
                call(fd, bytes(data)[: len(data) // 2])
            elif WHENS[board.way] == "after":
                call(*arguments, **named)
            if alone:
                os.kill(os.getpid(), signal.SIGKILL)
            board.kill()
            raise AssertionError("killed, and still there")

        return counting

    for name in (*CHANGES, "open", "pread"):
        setattr(os, name, counted(name, getattr(os, name), "changes" if name in CHANGES else "reads"))
    os.fsync = counted(SYNC, lambda fd: None, "changes")
