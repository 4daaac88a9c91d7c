"""Functions of the user's: `MODULE:FUNCTION`, found as `python -m` finds modules, the current directory first.

Whatever they raise or give has to be put into words: their errors and values may have no text, an endless one, or one
that is no UTF-8, and none of that may end a run otherwise than it would have ended.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from lazyshard_producer.errors import SettingInvalid

_ERROR_CHARACTERS: Final = 500
"""So much of an error's text is kept: some carry the whole row."""


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
        hint = _without_suffix(module_name, attribute)
        if not hint and isinstance(error, ModuleNotFoundError):
            hint = "is it on PYTHONPATH, or in the current directory?"
        reason = f"importing {module_name} raised {name_error(error)}"
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


def _without_suffix(file: str, attribute: str) -> str:
    """Returns a hint for who has named a file where a module is meant: ``rows/chat.py`` is ``rows.chat``."""
    if not file.endswith(".py"):
        return ""
    module = os.path.normpath(file.removesuffix(".py")).replace(os.sep, ".")
    named = all(part.isidentifier() for part in module.split("."))
    return "a module is named without .py" + (f": is {module}:{attribute} meant?" if named else "")


def name_error(error: BaseException) -> str:
    """Returns the kind and the text of an error of the user's, 500 characters of it at the most."""
    text = _text(str, error, _ERROR_CHARACTERS)
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
