"""Imports by name on first use: of lazyshard's own public names, and of user functions.

The text of a foreign error or value may be missing, endless, or not valid UTF-8; none of these may end a run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package, given the names that each of its modules offers; modules are names too.

    No module may have the same name as one of these. Type checkers see separate imports under TYPE_CHECKING.
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
    """There is no function of this name; the message says why."""


def named_function(name: str) -> Callable[..., Any]:
    """Returns the function named ``package.module:function``, imported as `python -m` does: current directory first.

    Raises FunctionMissing: the name is malformed, importing the module fails, or the module has no such function.
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
        # Including SystemExit: the module may be a program meant to be run, not imported.
        hint = _without_suffix(module_name, attribute)
        if not hint and isinstance(error, ModuleNotFoundError):
            hint = "; is it on PYTHONPATH or in the current directory?"
        raise FunctionMissing(f"importing {module_name} raised {name_error(error)}{hint}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            import difflib

            near = difflib.get_close_matches(part, dir(found), 1)
            raise FunctionMissing(f"{module_name} has no {attribute}{f'; did you mean {near[0]}?' if near else ''}")
        found = getattr(found, part)
    if not callable(found):
        raise FunctionMissing(f"expected a function, found {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def _without_suffix(file: str, attribute: str) -> str:
    """Returns a hint for a name that has a file where a module is expected: ``rows/chat.py`` is ``rows.chat``."""
    if not file.endswith(".py"):
        return ""
    module = os.path.normpath(file.removesuffix(".py")).replace(os.sep, ".")
    named = all(part.isidentifier() for part in module.split("."))
    return "; name a module without .py" + (f": did you mean {module}:{attribute or 'function'}?" if named else "")


def name_error(error: BaseException) -> str:
    """Returns the type and the text of a user's error, at most 500 characters: some texts contain the whole row."""
    text = _text(str, error, 500)
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def name_value(value: object, most: int) -> str:
    """Returns the type of a user's value and its repr, at most `most` characters."""
    kind = type(value).__name__
    return "None" if value is None else f"{kind} {_text(repr, value, max(0, most - len(kind) - 1))}"


def _text(write: Callable[[Any], str], value: object, most: int) -> str:
    try:
        text = write(value)
    except Exception as cause:
        # For instance an integer of more than 4,300 digits, 1,000 nested lists, or a broken method.
        return f"(not shown: writing it raised {type(cause).__name__})"
    shown = text if len(text) <= most else f"{text[:most]}..."
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")
