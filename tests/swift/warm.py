"""The commands of a training, and all else that imports ms-swift, as forks of a process that has imported most of it.

See `cpu/warm_server.py`. Command, `torchrun` and ranks are the real ones, each a process of its own. Where a process is
looked at or sent signals other than SIGKILL, nothing is warm.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Final

from filelock import FileLock

from tests.harness.processes.environment import run_command

CPU: Final = Path(__file__).with_name("cpu")
ROOT: Final = Path(__file__).resolve().parents[2]
PATHS: Final = (ROOT, ROOT / "producer", ROOT / "integrations" / "swift")
BIN: Final = Path(sys.executable).parent
MEGATRON_VARIABLES: Final = {"CPU_AS_CUDA": "1", "TORCHDYNAMO_DISABLE": "1"}
_POLL_S: Final = 0.05


def offline(home: Path, kind: str = "swift", packages: Path | None = None) -> dict[str, str]:
    """All that a process which imports ms-swift sees of this machine: nothing of the caller's but its PYTHONPATH.

    Args:
        home: for caches of data sets, models and fonts.
        kind: "swift" or "megatron".
        packages: folder of packages that are taken before the installed ones.
    """
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    folders = [CPU / "startup", *([CPU / "standin"] if kind == "megatron" else []), *PATHS]
    folders = folders if packages is None else [packages, *folders]
    callers = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {
        **kept,
        "PATH": os.pathsep.join([str(BIN), "/usr/local/bin", "/usr/bin", "/bin"]),
        "PYTHONPATH": os.pathsep.join([*map(str, folders), *callers]),
        "HOME": str(home),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "OMP_NUM_THREADS"), "1"),
        "TOKENIZERS_PARALLELISM": "false",
        **dict.fromkeys(("PYTHONUNBUFFERED", "NO_COLOR", "HF_DATASETS_DISABLE_PROGRESS_BARS"), "1"),
        **(MEGATRON_VARIABLES if kind == "megatron" else {}),
    }


@cache
def warm(kind: str, packages: Path | None) -> dict[str, str]:
    """Starts the server of a kind and of packages unless there is one; it ends with the test run.

    Returns:
        Variables of its clients: `PYTHON_EXEC`, which stands for Python, and what that needs.
    """
    # The processes of a run of `scripts/test` share it.
    root = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    owner = os.getppid() if root and "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder = Path(root, f"warm-{owner}") if root else Path(tempfile.mkdtemp(prefix="lazyshard-warm-"))
    folder.mkdir(exist_ok=True)
    name = kind if packages is None else f"{kind}_{packages.name}"
    client, address = folder / f"{name}_python", folder / f"{name}.socket"
    with FileLock(folder / f"{name}.lock"):
        if not address.exists():
            # An executable, since torchrun takes no more in place of Python.
            client.write_text(f"#!{sys.executable} -IS\n" + (CPU / "warm_client.py").read_text(encoding="utf-8"))
            client.chmod(0o755)
            _start(kind, packages, address, owner)
    if not root:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"PYTHON_EXEC": str(client), "WARM_SOCKET": str(address)}


def _start(kind: str, packages: Path | None, address: Path, owner: int) -> None:
    log, command = address.with_suffix(".log"), [CPU / "warm_server.py", address, kind, owner]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=offline(address.parent, kind, packages),
            cwd=address.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    atexit.register(_end, server, owner)
    while not address.exists():
        assert server.poll() is None, f"warm_server.py {kind} has ended:\n{log.read_text(errors='replace')}"
        time.sleep(_POLL_S)


def _end(server: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():
        server.terminate()
        server.wait()
    # Others may still need it; it ends by itself.
    server.returncode = 0


def run_warm(folder: Path, *command: object, packages: Path | None = None) -> None:
    """Runs a script, or `-m` and a module, that imports ms-swift; it must end well. Its files are in a folder."""
    variables = warm("swift", packages)
    environment = offline(folder, packages=packages) | variables
    done = run_command(variables["PYTHON_EXEC"], *command, env=environment, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
