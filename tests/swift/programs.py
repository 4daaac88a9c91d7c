"""Programs in processes of their own, with this checkout's packages or stand-ins for them: what they print and find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.harness.processes.producing import run_arguments
from tests.swift.warm import CPU

ROOT: Final = Path(__file__).resolve().parents[2]
PATHS: Final = (ROOT, ROOT / "producer", ROOT / "integrations" / "swift")
DEADLINE_S: Final = 200.0

_RANKS: Final = ("RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "NPROC_PER_NODE", "NNODES")


def environment(*paths: Path, **variables: str) -> dict[str, str]:
    """Returns the environment of a process outside of `torchrun`, with these folders on its path, ours by default."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LAZYSHARD"))}
    for name in _RANKS:
        inherited.pop(name, None)
    path = os.pathsep.join(map(str, paths or PATHS))
    return inherited | {"PYTHONPATH": path} | variables


def offline(folder: Path) -> dict[str, str]:
    """Returns the environment of a process that imports ms-swift, which keeps its files in a folder."""
    own = {name: str(folder / name) for name in ("MODELSCOPE_CACHE", "HF_HOME")}
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment(CPU / "startup", *PATHS, HOME=str(folder), OMP_NUM_THREADS="1", **own, **quiet)


def run(command: Sequence[object], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=variables,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def python(code: str, *paths: Path, site: bool = True, **variables: Any) -> subprocess.CompletedProcess[str]:
    """Runs code with these folders on the path, without site-packages unless `site`."""
    return run([*([] if site else ["-S"]), "-c", code], environment(*paths, **variables))


MAX_LENGTH: Final = 512
TEMPLATE: Final = "qwen2_5"


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
    code = """
import json, sys
from lazyshard_producer.cli import main
sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""
    ended = run(["-c", code, json.dumps(commands)], offline(folder))
    assert ended.returncode == 0, ended.stderr
    return {name: folder / name for name in streams}


def found_by(program: Path, folder: Path, *arguments: object) -> Any:
    """Runs a program that imports ms-swift; returns what it has found, which it writes to the file that it is told."""
    found = folder / f"{program.stem}.json"
    ended = run([program, found, *arguments], offline(folder))
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(found.read_text(encoding="utf-8"))
