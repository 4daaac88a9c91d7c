"""Modules of the ms-swift that is installed, loaded by path without its gigabytes of dependencies."""

import importlib.metadata
import importlib.util
import logging
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock


@cache
def load(file: str) -> ModuleType:
    """Loads a file of the package `swift`, which finds stand-ins for the two light names that it imports from it."""
    try:
        root = importlib.metadata.distribution("ms-swift")
    except importlib.metadata.PackageNotFoundError:
        raise AssertionError("ms-swift is not installed; run `scripts/environment full`") from None
    path = Path(str(root.locate_file("swift"))) / file
    spec = importlib.util.spec_from_file_location(f"real_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    swift, utils = ModuleType("swift"), ModuleType("swift.utils")
    vars(utils).update(get_logger=logging.getLogger, to_device=lambda data, device: data)
    with mock.patch.dict(sys.modules, {"swift": swift, "swift.utils": utils}):
        spec.loader.exec_module(module)
    return module
