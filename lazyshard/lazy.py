"""Imports by name, where something is first used: of our packages' own names, and of functions of the user's.

Errors and values of others may have no text, an endless one, or one that is no UTF-8: none of that may end a run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package, given the names that it offers by its modules, which are names of it too.

    No module is called like one of the names. A type checker sees imports of its own, under TYPE_CHECKING.
    """
    modules = {name: module for module, names in homes.items() for name in names}
    inner = {module.partition(".")[0] for module in homes}

    def get(name: str) -> Any:
        if name in inner:
            return importlib.import_module(f"{package}.{name}")
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return get


class FunctionMissing(Exception):
    """There is no function of this name; the text says why."""


def named_function(name: str) -> Callable[..., Any]:
    """Returns the function of a ``package.module:function``, found as `python -m` does: the current directory first.

    Raises FunctionMissing: it has not the form of a name, importing its module raises, or there is none in it.
    """
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        hint = _without_suffix(module_name, attribute)
        raise FunctionMissing(f'expected "package.module:function", got {name!r}{hint}')
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # SystemExit too: a program that was meant to be run, not imported.
        hint = _without_suffix(module_name, attribute)
        if not hint and isinstance(error, ModuleNotFoundError):
            hint = "; is it on PYTHONPATH, or in the current directory?"
        raise FunctionMissing(f"importing {module_name} raised {name_error(error)}{hint}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            import difflib

            near = difflib.get_close_matches(part, dir(found), 1)
            raise FunctionMissing(f"{module_name} has no {attribute}{f'; is {near[0]} meant?' if near else ''}")
        found = getattr(found, part)
    if not callable(found):
        raise FunctionMissing(f"it is no function but a {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def _without_suffix(file: str, attribute: str) -> str:
    """Returns a hint for who has named a file where a module is meant: ``rows/chat.py`` is ``rows.chat``."""
    if not file.endswith(".py"):
        return ""
    module = os.path.normpath(file.removesuffix(".py")).replace(os.sep, ".")
    named = all(part.isidentifier() for part in module.split("."))
    return "; a module is named without .py" + (f": is {module}:{attribute or 'function'} meant?" if named else "")


def name_error(error: BaseException) -> str:
    """Returns the kind and the text of an error of the user's, at most 500 characters: some carry the whole row."""
    text = _text(str, error, 500)
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def name_value(value: object, most: int) -> str:
    """Returns the kind of a value of the user's and how Python writes it, in so many characters at the most."""
    kind = type(value).__name__
    return "None" if value is None else f"{kind} {_text(repr, value, max(0, most - len(kind) - 1))}"


def _text(write: Callable[[Any], str], value: object, most: int) -> str:
    try:
        text = write(value)
    except Exception as cause:
        # An integer of more than 4,300 digits, a list in a list 1,000 times over, or a method that is broken itself.
        return f"(not shown: writing it raised {type(cause).__name__})"
    shown = text if len(text) <= most else f"{text[:most]}..."
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")
