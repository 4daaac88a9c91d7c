"""Packages whose names are imported from their modules where they are first used: what is not used costs no time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package.

    Args:
        package: its name.
        homes: the names that it offers, by its modules, none of which is called like one of them. The modules are names
            of it too. A type checker sees imports of its own, under TYPE_CHECKING.
    """
    modules = {name: module for module, names in homes.items() for name in names}
    inner = {module.partition(".")[0] for module in homes}

    def get(name: str) -> Any:
        if name in inner:
            return import_module(f"{package}.{name}")
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return get
