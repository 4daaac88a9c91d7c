"""The tiny models, made once for all processes of a test session."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from filelock import FileLock

from tests.harness.processes.environment import run_command
from tests.swift.commands import missing_stack
from tests.swift.warm import CPU, run_warm

ModelMaker = Callable[..., Path]
PIP: Final = ("-m", "pip", "install", "-q", "--no-deps")
LOWEST: Final = (
    "ms-swift==4.0.0",
    "datasets==3.6.0",
    "fsspec==2025.3.0",
    "peft==0.18.1",
    "tokenizers==0.22.2",
    "transformers==5.2.0",
    "trl==0.28.0",
)
"""The lowest ms-swift that is supported, and the newest of what it needs and does not admit as it is installed here."""


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ModelMaker:
    """Makes a model folder: `make_model(layers=4)`. Skips where the ms-swift stack is not installed."""
    reason = missing_stack()
    if reason is not None:
        pytest.skip(reason)
    root = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # a process of pytest-xdist: its parent folder is the session's
        root = root.parent

    def make(layers: int) -> Path:
        folder = root / f"model_{layers}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                building = folder.with_suffix(".building")
                run_warm(root, CPU / "tiny_model.py", building, layers)
                building.rename(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def model(make_model: ModelMaker) -> Path:
    return make_model(2)


@pytest.fixture(scope="session")
def lowest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of `LOWEST`, to be taken before the installed ones."""
    return install(tmp_path_factory.mktemp("lowest"), *LOWEST)


def install(folder: Path, *packages: str) -> Path:
    done = run_command(sys.executable, *PIP, "--target", folder, *packages, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder
