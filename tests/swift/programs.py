"""Programs in processes of their own, with this checkout's packages or stand-ins for them: what they print and find."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.harness.processes.environment import run_command
from tests.harness.processes.producing import run_arguments
from tests.swift.warm import PATHS, ROOT, run_warm

_RANKS: Final = ("RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "NPROC_PER_NODE", "NNODES")
MAX_LENGTH: Final = 512
TEMPLATE: Final = "qwen2_5"
_ENCODE: Final = """
import json, sys
from lazyshard_producer.cli import main
sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""


def environment(*paths: Path, **variables: str) -> dict[str, str]:
    """Returns the environment of a process outside of `torchrun`, with these folders on its path, ours by default."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LAZYSHARD"))}
    for name in _RANKS:
        inherited.pop(name, None)
    path = os.pathsep.join(map(str, paths or PATHS))
    return inherited | {"PYTHONPATH": path} | variables


def run(command: Sequence[object], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run_command(sys.executable, *command, env=variables, cwd=ROOT, timeout=200)


def python(code: str, *paths: Path, site: bool = True, **variables: Any) -> subprocess.CompletedProcess[str]:
    return run([*([] if site else ["-S"]), "-c", code], environment(*paths, **variables))


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def make_packages(folder: Path, modules: Iterable[str], text: str = "") -> Path:
    """Writes the modules, and the packages that hold them, and returns the folder."""
    for module in modules:
        parts = module.split(".")
        for depth in range(1, len(parts)):
            package = folder.joinpath(*parts[:depth], "__init__.py")
            if not package.exists():
                write(package)
        write(folder.joinpath(*parts).with_suffix(".py"), text)
    return folder


def package_folder() -> Path:
    """The folder that holds `lazyshard_swift`, wherever it is installed."""
    import lazyshard_swift

    return Path(lazyshard_swift.__path__[0]).parent


def encode(model: Path, folder: Path, streams: dict[str, tuple[Path, int, tuple[object, ...]]]) -> dict[str, Path]:
    """Makes streams by `lazyshard-producer run` with ms-swift's template, in one process, which imports it once.

    Args:
        model: the model.
        folder: of the streams.
        streams: source, samples of a chunk and options of each, `--encode` or `--measure` among them, by its name.
    """
    common = ("--model", model, "--template", TEMPLATE, "--encode-option", "model_type=qwen3")
    commands = [
        run_arguments(folder / name, [source], size, *common, *options, "--no-progress")
        for name, (source, size, options) in streams.items()
    ]
    run_warm(folder, write(folder / "encode.py", _ENCODE), json.dumps(commands))
    return {name: folder / name for name in streams}
