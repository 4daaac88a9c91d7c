"""Ranks of a training job in lockstep, forks of their supervisor, which have loaded all that there is to load. Lockstep
stands for the collectives of a training step; the package needs none. They are one process group, killed at once."""

import contextlib
import os
import selectors
import socket
from collections.abc import Callable
from pathlib import Path

from tests.harness.processes.nursery import forked, last_words, reap

GO_ON = b"go on"


class Ranks:
    """Each tells of its steps through a socket, and goes on when all have. `folder`: where what they say goes."""

    def __init__(self, folder: Path) -> None:
        self.pids: dict[int, int] = {}  # of the ranks that are there
        self.group = 0
        self.told: dict[int, bytes] = {}  # what each has told of the step, if it has
        self.selector = selectors.DefaultSelector()
        self._folder = folder
        self._sockets: list[socket.socket] = []
        self._watches: list[int] = []

    def __len__(self) -> int:
        return len(self._sockets)

    def start(self, rank: int, train: Callable[[socket.socket], object], tell: Callable[[Exception], bytes]) -> None:
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = self._folder / f"rank-{rank}.log"
        words.unlink(missing_ok=True)

        def work() -> int:
            # What others hold open would keep a rank from noticing that the supervisor is gone.
            for other in (own, *self._sockets):
                other.close()
            for watch in self._watches:
                os.close(watch)
            self.selector.close()
            try:
                its.recv(16)
                train(its)
            except Exception as error:
                its.send(tell(error))
                raise
            return 0

        pid = forked(work, words)
        its.close()
        self.pids[rank] = pid
        self.group = self.group or pid
        os.setpgid(pid, self.group)
        self._sockets.append(own)
        self._watches.append(os.pidfd_open(pid))
        # Its end of the socket would not tell: a DataLoader worker has it too, and outlives the rank by seconds.
        for fd in (own, self._watches[-1]):
            self.selector.register(fd, selectors.EVENT_READ, rank)

    def heard(self, rank: int) -> bytes:
        """Returns what a rank says; nothing if it is its end that has woken us."""
        try:
            return self._sockets[rank].recv(1 << 16, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            return b""

    def tell(self, word: bytes = GO_ON) -> None:
        """Tells it to all of them; one that is killed meanwhile is noticed elsewhere."""
        self.told.clear()
        for own in self._sockets:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                own.send(word)

    def said(self, rank: int) -> str:
        return last_words(self._folder / f"rank-{rank}.log")

    def reap(self, rank: int) -> int:
        return reap(self.pids.pop(rank), f"rank {rank}")

    def close(self) -> None:
        """Closes what was open for them; they are reaped before."""
        for own in self._sockets:
            own.close()
        for watch in self._watches:
            os.close(watch)
        self.selector.close()
