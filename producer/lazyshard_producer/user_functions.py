"""Functions of the user's: `MODULE:FUNCTION`, found as `python -m` finds modules, the current directory first."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from lazyshard_producer.errors import SettingInvalid


def load_function(name: str, option: str) -> Callable[..., Any]:
    """Returns the function of a `MODULE:FUNCTION`.

    Raises:
        SettingInvalid: there is no such module or function, or importing it fails.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise SettingInvalid(f"{option}: expected MODULE:FUNCTION, got {name!r}", option=option)
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # SystemExit too: a program that was meant to be run, not imported.
        hint = "is it on PYTHONPATH, or in the current directory?" if isinstance(error, ModuleNotFoundError) else ""
        reason = f"importing {module_name} raised {type(error).__name__}: {error}"
        raise SettingInvalid(f"{option}: {reason}{'; ' if hint else ''}{hint}", option=option) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            hint = f"; is {near[0]} meant?" if near else ""
            raise SettingInvalid(f"{option}: {module_name} has no {attribute}{hint}", option=option)
        found = getattr(found, part)
    if not callable(found):
        raise SettingInvalid(f"{option}: {name} is no function but a {type(found).__name__}", option=option)
    function: Callable[..., Any] = found
    return function
