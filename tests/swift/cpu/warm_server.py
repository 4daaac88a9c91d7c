"""Runs Python scripts in forks of a process that has imported what ms-swift needs, but neither ms-swift nor our hook.

    warm_server.py SOCKET swift|megatron KNOWN.json

To begin with, another process imports what the ranks of the command import, and lists all modules, unless KNOWN lists
them already; this one imports the same and prints `ready`. Then it serves `warm_client.py`: the fork takes the client's
arguments, environment, working directory and files, and runs the script as `python -u` does. When the client is killed,
so is the fork with all of its session. The server ends with its parent.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

OURS: Final = ("swift", "lazyshard", "lazyshard_swift", "mcore_bridge", "__main__", "sitecustomize")
"""Packages that each fork imports by itself: what they do at their import depends on the rank."""

COMMANDS: Final = {
    "swift": "from swift.pipelines import sft_main; import swift.trainers.seq2seq_trainer",
    "megatron": "from swift.megatron import megatron_sft_main; import swift.megatron.trainers.trainer",
}
"""What the ranks of a command import; most modules of ms-swift are imported once something of them is asked for."""

_LISTED: Final = "import json, sys; {}; print(json.dumps(list(sys.modules)))"

_MODEL: Final = "transformers.models.qwen3.modeling_qwen3"
"""Of the models that the tests train."""


def imported_by(name: str, known: Path) -> list[str]:
    """Returns what the ranks of a command import, from a file if another server has looked already."""
    if not known.exists():
        command = [sys.executable, "-c", _LISTED.format(f"{COMMANDS[name]}; import {_MODEL}")]
        listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        own = known.with_suffix(f".{os.getpid()}")
        own.write_text(listed.stdout.splitlines()[-1], encoding="utf-8")
        own.rename(known)
    names: list[str] = json.loads(known.read_text(encoding="utf-8"))
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

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._clients: dict[socket.socket, int] = {}
        self._parent = os.getppid()

    def serve(self) -> None:
        """Serves until the parent has gone. Raises Fork in each fork."""
        while os.getppid() == self._parent:
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


def main() -> None:
    """Imports, serves; in a fork runs the script."""
    path, name, known = sys.argv[1:]
    import_all(imported_by(name, Path(known)))
    # Else a full collection in a fork would write to all objects, and so make a copy of its memory.
    gc.freeze()
    server = Server(path)
    print("ready", flush=True)
    try:
        server.serve()
    except Fork as fork:
        asked = fork.asked
    else:
        return
    os.environ.clear()
    os.environ.update(asked["environment"])
    if "TRACE_DIR" in os.environ:
        # By this the tests find the process, whose environment as the system shows it is still the server's.
        Path(os.environ["TRACE_DIR"], f"warm_{os.getpid()}").touch()
    os.chdir(asked["directory"])
    sys.argv = asked["arguments"]
    script = sys.argv[0]
    sys.path[0] = str(Path(script).parent)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
