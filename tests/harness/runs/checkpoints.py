"""Checkpoints as a trainer writes them, `N.json` after N samples, whole or not at all; by which life and step."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lazyshard.store.durable import sync_directory


@dataclass(frozen=True, slots=True)
class Checkpoint:
    consumed: int  # samples trained since the run began
    life: int  # number of the life that wrote it
    steps: int  # steps which that life had trained
    states: list[dict[str, Any]]  # the state of the run, of each rank if each one has its own, else one


def write(folder: Path, checkpoint: Checkpoint) -> None:
    target = folder / f"{checkpoint.consumed}.json"
    part = folder / f"{checkpoint.consumed}.json.part"
    data = json.dumps(asdict(checkpoint)).encode()
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(fd, data)
    os.fsync(fd)
    os.close(fd)
    os.replace(part, target)
    sync_directory(folder)


def found(folder: Path) -> list[Checkpoint]:
    every = [Checkpoint(**json.loads(path.read_bytes())) for path in folder.glob("*.json")]
    return sorted(every, key=lambda checkpoint: -checkpoint.consumed)


def remove(folder: Path, which: list[Checkpoint]) -> None:
    for checkpoint in which:
        os.unlink(folder / f"{checkpoint.consumed}.json")
    sync_directory(folder)
