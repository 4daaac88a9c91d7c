"""A process that has loaded what its children need, and forks them in milliseconds. Children end with it."""

import contextlib
import ctypes
import gc
import importlib
import mmap
import multiprocessing
import os
import pickle
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.harness.processes.environment import environment

GONE_S: Final = 30.0  # How long a killed process may take to be gone, on a machine that is very busy
PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def adopt_orphans() -> None:
    """Makes this process the parent of whatever its children leave behind, so that it can be waited for."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forked(work: Callable[[], int], said: Path) -> int:
    """Starts work in a fork and returns the process id. `said`: where its standard output and error go."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    gc.freeze()  # Else a full collection would write to all objects of the parent, and so make a copy of its memory
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for fd in (1, 2):
                os.dup2(out, fd)
            code = work()
    except BaseException:
        with open(said, "a") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(code)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def has_ended(pid: int, within_s: float) -> bool:
    """Waits for so long for the end of a child; returns whether it has ended. It is still to be reaped."""
    fd = os.pidfd_open(pid)
    try:
        return bool(select.select([fd], [], [], within_s)[0])
    finally:
        os.close(fd)


def exit_status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reap(pid: int, what: str) -> int:
    """Waits for the end of a child; returns its exit status, negative for a signal. Raises TimeoutError."""
    if not has_ended(pid, GONE_S):
        raise TimeoutError(f"{what} is still there after {GONE_S:.0f} s")
    return exit_status(pid)


def reap_group(group: int) -> None:
    """Kills and reaps what is left of a process group: DataLoader workers whose rank is gone. Raises TimeoutError."""
    deadline = time.monotonic() + GONE_S
    while True:
        try:
            found, _ = os.waitpid(-group, os.WNOHANG)
        except ChildProcessError:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"process group {group} is still there {GONE_S:.0f} s after it was killed")
        if not found:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.001)


def has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def last_words(said: Path) -> str:
    return said.read_text(errors="replace")[-3000:] if said.exists() else ""


WAIT_S: Final = 600.0  # A child that has not ended by then is killed, unless the caller says otherwise
FAILED: Final = 99  # Exit status of a child whose function has raised
_LENGTH: Final = struct.Struct("<I")


class Silent(RuntimeError):
    """A process that is to answer has died, or says nothing."""


class Answering:  # A process of a program, which answers requests through the pipe that is its first argument
    def __init__(self, module: str, *arguments: str, folder: Path | None = None) -> None:
        self._pipe, its = multiprocessing.Pipe()
        command = [sys.executable, "-m", module, str(its.fileno()), *arguments]
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "pass_fds": [its.fileno()]}
        self.process = subprocess.Popen(command, cwd=folder, env=environment(), **quiet)
        its.close()

    def ask(self, request: object, within_s: float | None = None) -> Any:
        with contextlib.suppress(OSError, EOFError):
            self._pipe.send(request)
            if self._pipe.poll(within_s):
                return self._pipe.recv()
        raise Silent(f"{self.process.args!r} has died or is silent (exit status {self.process.poll()})")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._pipe.close()


class Ended(NamedTuple):
    status: int  # as `Popen.returncode`
    said: str  # its standard output and error
    left: bytes  # what it has left, see `leave`
    late: bool  # whether it was killed since it took too long

    @property
    def last_words(self) -> str:
        return " | ".join(self.said.split("\n"))[-2000:]


class Nursery:
    """Kills its children at its end. `folder`: their directory. `modules`: loaded first; their `load` is called."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.folder: Final = folder
        self.modules: Final = modules
        self._count = 0
        self._said: dict[int, Path] = {}

    def fork(self, work: Callable[..., object], *arguments: Any, stdin: Path | None = None, **named: Any) -> int:
        """Starts a child, which calls a function that gives the exit status, or None for 0; returns its id."""
        self._count += 1
        said = self.folder / f"said-{self._count}"
        pid: int = self._answering.ask(("fork", work, arguments, named, os.fspath(stdin or os.devnull), str(said)))
        self._said[pid] = said
        return pid

    def said(self, pid: int) -> str:
        path = self._said[pid]
        return path.read_text(errors="replace") if path.exists() else ""

    def reap(self, pid: int, within_s: float = WAIT_S) -> Ended:
        status, left, late = self._answering.ask(("reap", pid, within_s))
        said = self.said(pid)
        self._said.pop(pid).unlink(missing_ok=True)
        return Ended(status, said, left, late)

    def call(self, work: Callable[..., object], *arguments: Any, within_s: float = WAIT_S, **named: Any) -> Ended:
        return self.reap(self.fork(work, *arguments, **named), within_s)

    def result(self, work: Callable[..., object], *arguments: Any, **named: Any) -> Any:
        """Returns what a child's function returns. Raises the AssertionError that it raises."""
        ended = self.call(_give_result, work, *arguments, **named)
        if ended.status:
            raise RuntimeError(ended.said)
        found = pickle.loads(ended.left)
        if isinstance(found, AssertionError):
            raise found
        return found

    def wait_for_stop(self, pid: int) -> bool:
        stopped: bool = self._answering.ask(("stop", pid))
        return stopped

    def __enter__(self) -> Any:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._answering = Answering(__name__, *self.modules, folder=self.folder)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._answering.close()


_page: mmap.mmap | None = None  # Memory that a child has in common with the nursery
_pipe: Connection | None = None  # Of the nursery, to who asks


def leave(data: bytes) -> None:
    """In a child: leaves this for the nursery, in place of what was left before, whatever becomes of the child."""
    assert _page is not None
    _page[_LENGTH.size : _LENGTH.size + len(data)] = data
    _page[: _LENGTH.size] = _LENGTH.pack(len(data))


def _give_result(work: Callable[..., object], *arguments: Any, **named: Any) -> None:
    try:
        found = work(*arguments, **named)
    except AssertionError as error:
        found = error
    leave(pickle.dumps(found))


def reset_signals() -> None:
    """Ignores no signal that was ignored where this was started, as SIGHUP is under nohup and SIGINT behind `&`."""
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def serve() -> None:
    global _pipe
    reset_signals()
    for name in sys.argv[2:]:
        module = importlib.import_module(name)
        getattr(module, "load", int)()
    loaded = 0
    _pipe = Connection(int(sys.argv[1]))
    while True:
        kind, *request = _pipe.recv()
        if len(sys.modules) > loaded:
            loaded = len(sys.modules)
            gc.collect()  # What is there now is never looked through again, nor copied for that in every fork
            gc.freeze()
        if kind == "fork":
            answer: Any = _fork(*request)
        elif kind == "reap":
            answer = _reap(*request)
        else:
            found = os.waitid(os.P_PID, request[0], os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            answer = found is not None and found.si_code == os.CLD_STOPPED
        _pipe.send(answer)


_pages: Final[dict[int, mmap.mmap]] = {}  # In the nursery: that memory of each child which is not reaped


def _fork(work: Callable[..., object], arguments: tuple[Any, ...], named: dict[str, Any], stdin: str, said: str) -> int:
    page = mmap.mmap(-1, 1 << 20)
    if not (pid := os.fork()):
        os._exit(_live(work, arguments, named, stdin, said, page))
    _pages[pid] = page
    return pid


def _reap(pid: int, within_s: float) -> tuple[int, bytes, bool]:
    late = not has_ended(pid, within_s)
    if late:
        kill(pid)
    status = exit_status(pid)
    with _pages.pop(pid) as page:
        (length,) = _LENGTH.unpack(page[: _LENGTH.size])
        return status, page[_LENGTH.size : _LENGTH.size + length], late


def _live(work: Callable[..., object], arguments: Any, named: Any, stdin: str, said: str, page: mmap.mmap) -> int:
    global _page
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _page = page
    assert _pipe is not None
    _pipe.close()
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for fd in (1, 2):
        os.dup2(out, fd)
    os.dup2(os.open(stdin, os.O_RDONLY), 0)  # Of a named pipe this waits for whoever writes to it
    try:
        code: Any = work(*arguments, **named)
    except BaseException:
        traceback.print_exc()
        code = FAILED
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return int(code or 0)


GO_ON = b"continue"


class Ranks:  # Each tells of its steps through a socket, and continues when all have. `folder`: for what they say.
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
            for other in (own, *self._sockets):  # Else it would not notice that the supervisor is gone
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
        for fd in (own, self._watches[-1]):  # A DataLoader worker has the socket too, and outlives the rank
            self.selector.register(fd, selectors.EVENT_READ, rank)

    def heard(self, rank: int) -> bytes:
        """Returns what a rank says; nothing if it is its end that has woken us."""
        try:
            return self._sockets[rank].recv(1 << 16, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            return b""

    def tell(self, word: bytes = GO_ON) -> None:
        self.told.clear()
        for own in self._sockets:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                own.send(word)

    def said(self, rank: int) -> str:
        return last_words(self._folder / f"rank-{rank}.log")

    def reap(self, rank: int) -> int:
        return reap(self.pids.pop(rank), f"rank {rank}")

    def close(self) -> None:
        for own in self._sockets:
            own.close()
        for watch in self._watches:
            os.close(watch)
        self.selector.close()


if __name__ == "__main__":
    from tests.harness.processes import nursery  # The functions of the module that its children find

    with contextlib.suppress(EOFError):
        nursery.serve()
