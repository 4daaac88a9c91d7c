"""Small streams, children and waits that the tests of storage share."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.format.records import Head, seal_name
from lazyshard.format.seal import Seal

E = TypeVar("E", bound=BaseException)
P = ParamSpec("P")

DEADLINE_S: Final = 30.0
"""How long a test waits for what must come at once; only a failing one ever waits so long."""

HERE: Final = Path(__file__).parents[2]

_looked_through: Final[set[str]] = set()

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount and to become another user")


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"id": i} for i in range(start, stop)]


def produce(directory: Path, samples: int, per_chunk: int = 2, *, end: bool = True) -> Path:
    writer = ChunkWriter(directory, per_chunk)
    add(writer, writer.published_samples, samples)
    writer.close(end)
    return directory


def add(writer: ChunkWriter, start: int, stop: int) -> None:
    for row in rows(start, stop):
        writer.write(row)


def go_on(directory: Path, samples: int) -> None:
    """A new writer continues up to `samples`, and all of them are read."""
    assert list(StreamReader(produce(directory, samples))) == rows(0, samples)


def foreign(directory: Path, *chunks: bytes, end: bool = False) -> Path:
    directory.mkdir(exist_ok=True)
    for number, data in enumerate(chunks):
        (directory / f"chunk_{number:05d}.jsonl").write_bytes(data)
        (directory / f"chunk_{number:05d}.jsonl.completed").touch()
    if end:
        (directory / "stream.end").touch()
    return directory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def head(directory: Path) -> Head:
    return Head.decode((directory / "head.json").read_bytes())


def seal(directory: Path, chunk: int) -> Seal:
    return Seal.decode((directory / seal_name(chunk)).read_bytes(), chunk)


def collect_garbage() -> None:
    gc.collect()
    if len(sys.modules) > len(_looked_through):
        # The next time nothing is looked through again of what is there now, all that tests have imported.
        _looked_through.update(sys.modules)
        gc.freeze()


def open_descriptors() -> int:
    collect_garbage()
    return len(os.listdir("/proc/self/fd"))


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        time.sleep(0.002)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def raised(error: type[E] | tuple[type[E], ...], call: Callable[P, object], *given: P.args, **named: P.kwargs) -> E:
    """Calls, and returns the error that this is to raise."""
    return refusal_of(error, "", call, *given, **named)


def refusal_of(
    error: type[E] | tuple[type[E], ...], match: str, call: Callable[P, object], *given: P.args, **named: P.kwargs
) -> E:
    """As `raised`, where the message is to match."""
    with pytest.raises(error, match=match or None) as caught:
        call(*given, **named)
    return caught.value


def fail_when(
    monkeypatch: pytest.MonkeyPatch, name: str, condition: Callable[..., object], error: OSError | None = None
) -> None:
    call = getattr(os, name)

    def run(*arguments: Any, **named: Any) -> Any:
        if condition(*arguments):
            raise error or OSError(5, "Input/output error")
        return call(*arguments, **named)

    monkeypatch.setattr(os, name, run)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists from now on what decides over what is durable: syncs, renames, removals; names with a token as such."""
    calls: list[str] = []

    def note(what: str, path: str | Path) -> None:
        name = os.path.basename(path)
        calls.append(f"{what} {'temporary' if re.search('[0-9a-f]{16}', name) else name}")

    def noted(what: str, call: Callable[..., Any], at: int = 0) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            note(what, os.readlink(f"/proc/self/fd/{arguments[0]}") if what == "sync" else arguments[at])
            return call(*arguments, **named)

        return run

    monkeypatch.setattr(os, "fsync", noted("sync", os.fsync))
    monkeypatch.setattr(os, "replace", noted("rename", os.replace, 1))
    monkeypatch.setattr(os, "unlink", noted("unlink", os.unlink))
    return calls


def fork(work: Callable[..., object], *arguments: object, expected: type[BaseException] | tuple[()] = ()) -> int:
    """Starts a fork; its exit code is 0 when `work` returned, 3 when it raised what is expected, else 1."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(*arguments)
            code = 0
        except expected:
            code = 3
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    return pid


def forked(work: Callable[[], object]) -> int:
    """Runs `work` in a fork and returns its exit code: 0 when it returned, 1 when it raised, -N killed by signal N."""
    return os.waitstatus_to_exitcode(reap(fork(work)))


def reap(pid: int) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the child hung for {DEADLINE_S:.0f} s")
        time.sleep(0.001)


def python(source: str, *arguments: object, before: Iterable[str] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter, `before` being a command that starts it."""
    return subprocess.run(
        [*before, sys.executable, "-c", source, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
