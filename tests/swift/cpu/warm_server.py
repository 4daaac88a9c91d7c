"""Runs Python scripts in forks of a process that has imported what ms-swift needs, but neither ms-swift nor our hook.

    warm_server.py SOCKET swift|megatron OWNER

To begin with, a fork imports what the ranks of the command import, and lists all modules; this one imports the same.
Then it serves `warm_client.py`: the fork takes the client's arguments, environment, working directory and files, and
runs the script or module as Python does. When the client is killed, so is the fork with all of its session. The server
ends with the process OWNER.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

OURS: Final = ("swift", "lazyshard", "lazyshard_swift", "mcore_bridge", "__main__", "sitecustomize")
"""Packages that each fork imports by itself: what they do at their import depends on the rank."""

FIRST: Final = ("torch", "transformers", "datasets", "accelerate", "transformers.models.qwen3.modeling_qwen3")
"""What both commands import anyway, and what is heavy of it: by this process alone."""

COMMANDS: Final = {
    "swift": {"swift.pipelines": "sft_main", "swift.trainers.seq2seq_trainer": "Seq2SeqTrainer"},
    "megatron": {"swift.megatron": "megatron_sft_main", "swift.megatron.trainers.trainer": "MegatronTrainer"},
}
"""What the ranks of a command import; most modules of ms-swift are imported once something of them is asked for."""


def imported_by(command: str) -> list[str]:
    """Returns what the ranks of a command import, as a fork finds out."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        for module, name in COMMANDS[command].items():
            getattr(importlib.import_module(module), name)
        with open(writing, "w", encoding="utf-8") as file:
            json.dump(list(sys.modules), file)
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        names: list[str] = json.load(file)
    os.wait()
    return names


def import_all(names: Iterable[str]) -> None:
    """Imports modules, but for those of `OURS`."""
    for name in names:
        if name.partition(".")[0] not in OURS:
            # Some can be imported only from within their package.
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)


class Fork(Exception):
    """Raised in a fork, to leave the server's frames: with what the client asks."""

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__()
        self.asked = asked


class Server:
    """Forks for each client, and tells each how its fork has ended."""

    def __init__(self, path: Path, owner: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        new = path.with_suffix(".new")
        self._listener.bind(str(new))
        self._listener.listen(64)
        # Whoever sees it can connect.
        new.rename(path)
        self._clients: dict[socket.socket, int] = {}
        self._owner = Path("/proc", str(owner))

    def serve(self) -> None:
        """Serves until the owner has gone. Raises Fork in each fork."""
        while self._owner.exists():
            ready, _, _ = select.select([self._listener, *self._clients], [], [], 0.05)
            for one in ready:
                if one is self._listener:
                    self._begin(one.accept()[0])
                else:
                    # It sends nothing more, so it has gone.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._clients[one], signal.SIGKILL)
            self._reap()
        for pid in self._clients.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _begin(self, client: socket.socket) -> None:
        message, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for number, file in enumerate(files):
                os.dup2(file, number)
            for one in (self._listener, client, *self._clients):
                one.close()
            for file in files:
                os.close(file)
            raise Fork(json.loads(message))
        for file in files:
            os.close(file)
        client.sendall(pid.to_bytes(4, "big"))
        self._clients[client] = pid

    def _reap(self) -> None:
        for client, pid in list(self._clients.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._clients[client]
                with contextlib.suppress(OSError):
                    client.sendall((os.waitstatus_to_exitcode(status) + 256).to_bytes(4, "big"))
                client.close()


def run(asked: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(asked["environment"])
    if "TRACE_DIR" in os.environ:
        # By this the tests find the process, whose environment as the system shows it is still the server's.
        Path(os.environ["TRACE_DIR"], f"warm_{os.getpid()}").touch()
    os.chdir(asked["directory"])
    # What it starts is warm too.
    sys.executable = os.environ["PYTHON_EXEC"]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.argv = asked["arguments"]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    path, command, owner = sys.argv[1:]
    import_all(FIRST)
    import_all(imported_by(command))
    # Else a full collection in a fork would write to all objects, and so make a copy of its memory.
    gc.freeze()
    try:
        Server(Path(path), int(owner)).serve()
    except Fork as fork:
        asked = fork.asked
    else:
        return
    run(asked)


if __name__ == "__main__":
    main()
