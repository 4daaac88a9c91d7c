"""The tiny models, made once for all processes of a test session."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from tests.swift.commands import CPU, missing_stack

ModelMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ModelMaker:
    """Makes a model folder: `make_model("qwen3", layers=4)`. Skips where the ms-swift stack is not installed."""
    reason = missing_stack()
    if reason is not None:
        pytest.skip(reason)
    root = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # a process of pytest-xdist: its parent folder is the session's
        root = root.parent

    def make(kind: str = "qwen3", layers: int = 2) -> Path:
        folder = root / f"model_{kind}_{layers}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                building = folder.with_suffix(".building")
                command = [sys.executable, str(CPU / "tiny_model.py"), str(building), kind, str(layers)]
                subprocess.run(command, check=True, capture_output=True, timeout=100)
                building.rename(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def model(make_model: ModelMaker) -> Path:
    """A qwen3 of two layers."""
    return make_model("qwen3", 2)
