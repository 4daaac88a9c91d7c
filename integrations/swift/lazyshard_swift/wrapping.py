"""Puts our functions around those of ms-swift: all of a class or none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Maker: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes ms-swift's function and returns what stands in its place."""


def wrap(owner: Any, makers: Mapping[str, Maker]) -> None:
    """Replaces functions of a class or a module.

    Raises:
        AttributeError: one of them is not there; nothing was replaced.
    """
    missing = [name for name in makers if not callable(vars(owner).get(name))]
    if missing:
        raise AttributeError(f"{owner.__name__} has no {', no '.join(missing)}")
    originals = {name: vars(owner)[name] for name in makers}
    made = {name: functools.wraps(originals[name])(make(originals[name])) for name, make in makers.items()}
    for name, replacement in made.items():
        setattr(owner, name, replacement)
