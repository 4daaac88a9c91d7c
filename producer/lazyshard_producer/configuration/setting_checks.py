"""What checks of settings have in common."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from lazyshard_producer.errors import Problem

if TYPE_CHECKING:
    from lazyshard_producer.configuration.settings import Settings

FUNCTION: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""MODULE:FUNCTION."""

MAX_SHUFFLE: Final = 10**9
"""Rows that are held to be put into another order."""

SWIFT: Final = "swift"
"""What --encode calls ms-swift."""


def flag(name: str) -> str:
    """Returns the option of a setting, by the setting's name."""
    return "--" + name.replace("_", "-")


def is_set(settings: Settings, name: str, given: frozenset[str]) -> bool:
    """Whether somebody wants this, be it the default."""
    return name in given or bool(getattr(settings, name) != _default(settings, name))


def path_problems(option: str, path: str) -> Iterator[Problem]:
    """Yields what no path can be."""
    if not path:
        yield Problem(option, "a path is needed, got an empty one")
    elif "\0" in path:
        yield Problem(option, f"a path cannot hold a NUL character, got {path!r}")


def _default(settings: Settings, name: str) -> Any:
    return next(one.default for one in fields(settings) if one.name == name)
