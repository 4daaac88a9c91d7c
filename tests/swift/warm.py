"""Ranks of a training as forks of a process that has imported what ms-swift needs: `cpu/warm_server.py`.

Command and `torchrun` are the real ones. Where a start-up is what is tested, or the process of a rank is looked at or
sent signals other than SIGKILL, nothing is warm.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

CPU: Final = Path(__file__).with_name("cpu")


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lazyshard-warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _client() -> Path:
    """An executable, since torchrun takes no more in place of Python."""
    path = _folder() / "warm_python"
    path.write_text(f"#!{sys.executable} -IS\n" + (CPU / "warm_client.py").read_text(encoding="utf-8"))
    path.chmod(0o755)
    return path


def _known(command: str) -> Path:
    """The file in which the servers of a test run, one in each of its processes, say what is imported."""
    root = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT") or _folder())
    return root / f"imported_by_{command}.json"


@cache
def warm_ranks(command: str, environment: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    """Starts a server, at the first call for a command; it ends with this process.

    Args:
        command: "swift" or "megatron".
        environment: all variables that it is started with.

    Returns:
        Variables for the command, which have torchrun start its ranks there.
    """
    path = _folder() / f"{command}.socket"
    server = subprocess.Popen(
        [sys.executable, str(CPU / "warm_server.py"), str(path), command, str(_known(command))],
        env={**dict(environment), "HOME": str(_folder())},
        cwd=_folder(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    atexit.register(_end, server)
    assert server.stdout is not None
    said = []
    for line in server.stdout:
        said.append(line)
        if line == "ready\n":
            return {"PYTHON_EXEC": str(_client()), "WARM_SOCKET": str(path)}
    raise AssertionError(f"warm_server.py {command} has ended:\n{''.join(said)}")


def _end(server: subprocess.Popen[str]) -> None:
    server.terminate()
    server.wait()
    assert server.stdout is not None
    server.stdout.close()
