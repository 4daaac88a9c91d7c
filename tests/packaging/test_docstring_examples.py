"""The examples in docstrings: run, and held against what they say comes out."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from typing import Final

import pytest

from tests.packaging.test_import_directions import ROOT

PLACES: Final = (ROOT, ROOT / "producer", ROOT / "integrations" / "swift")


def modules(place: Path) -> list[str]:
    """Those of the packages in a folder that hold examples."""
    files = [file for package in place.glob("lazyshard*") for file in package.rglob("*.py")]
    names = [".".join(file.relative_to(place).with_suffix("").parts) for file in files if ">>> " in file.read_text()]
    return sorted(name.removesuffix(".__init__") for name in names)


MODULES: Final = [name for place in PLACES for name in modules(place)]


def test_there_are_such_examples_in_each_package() -> None:
    assert {name.partition(".")[0] for name in MODULES} == {"lazyshard", "lazyshard_producer", "lazyshard_swift"}


@pytest.mark.parametrize("name", MODULES)
def test_examples_come_out_as_they_say(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed, "see what doctest has printed"
