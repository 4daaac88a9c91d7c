"""Functions by their names, `package.module:function`, found as `python -m` does: the current directory first."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final

__all__ = ["FunctionMissing", "is_function_name", "named_function"]

_ERROR_CHARACTERS: Final = 300
"""So much of the text of an error of the user's is kept."""


class FunctionMissing(Exception):
    """There is no such function; the text says why, without naming it."""


def is_function_name(name: str) -> bool:
    """Returns whether a text has the form of a function's name.

    >>> is_function_name("my_rows:keep"), is_function_name("my_rows.keep")
    (True, False)
    """
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def _without_suffix(name: str) -> str:
    """Returns a hint for who has named a file where a module is meant: ``rows/chat.py:keep`` is ``rows.chat:keep``."""
    file, _, attribute = name.partition(":")
    if not file.endswith(".py") or os.path.isabs(file):
        return ""
    module = os.path.normpath(file.removesuffix(".py")).replace(os.sep, ".")
    meant = f"{module}:{attribute or 'function'}"
    return f"; is {meant} meant?" if is_function_name(meant) else ""


def named_function(name: str) -> Callable[..., Any]:
    """Returns the function of a name, whose module is imported.

    Raises:
        FunctionMissing: it has not the form of a name, importing its module raises, or there is no such function in it.
    """
    if not is_function_name(name):
        raise FunctionMissing(f'expected "package.module:function"{_without_suffix(name)}')
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # SystemExit too: a program that was meant to be run, not imported.
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = _without_suffix(name) or "; is it on PYTHONPATH, or in the current directory?"
        text = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
        raise FunctionMissing(f"importing {module_name} raised {text}{hint}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            hint = f"; is {near[0]} meant?" if near else ""
            raise FunctionMissing(f"{module_name} has no {attribute}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise FunctionMissing(f"it is no function, but of type {type(found).__name__}")
    function: Callable[..., Any] = found
    return function
