"""One mapping of a configuration, out of which values are taken by name; what is wrong with one is noted, not raised.

A value that is wrong is taken as None, so that the rest is looked at too; nobody uses it then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from lazyshard.config.entries import WRONG, Entry
from lazyshard.config.mistakes import Mistake, nearest
from lazyshard.config.named_function import FunctionMissing, named_function
from lazyshard.errors import redact

__all__ = ["REQUIRED", "Section"]

REQUIRED: Final = object()
"""The default of what has to be given."""


class Section:
    """A mapping of a configuration.

    Args:
        entry: that should be one.
        mistakes: where they are noted.
        imports: whether to look up functions, which imports their modules.
        expected: what is expected where it is no mapping.
    """

    def __init__(self, entry: Entry, mistakes: list[Mistake], *, imports: bool, expected: str = "a mapping") -> None:
        self.entry = entry
        self.usable = isinstance(entry.value, dict)
        self._mistakes = mistakes
        self._imports = imports
        self._asked: list[str] = []
        if not self.usable and entry.value is not WRONG:
            self.note(entry, f"expected {expected}, found {_shown(entry.value)}")

    def note(self, entry: Entry, text: str) -> None:
        """Takes note of a mistake."""
        self._mistakes.append(Mistake(entry.path, entry.line, redact(text)))

    def has(self, name: str) -> bool:
        """Returns whether there is a value of this name."""
        return self.usable and name in self.entry.value

    def knows(self, name: str) -> None:
        """Takes a name for one that is asked for."""
        if name not in self._asked:
            self._asked.append(name)

    def get(self, name: str, expected: str, fits: Callable[[Any], bool], default: Any) -> Any:
        """Returns a value, or the default where there is none.

        Args:
            name: of the value.
            expected: what it is to be, in words.
            fits: whether it is that.
            default: `REQUIRED` where it has to be given.
        """
        self.knows(name)
        if not self.has(name):
            if default is REQUIRED and self.usable:
                path = self.entry.under(name)
                self._mistakes.append(Mistake(path, self.entry.line, f"missing; expected {expected}"))
            return None if default is REQUIRED else default
        entry: Entry = self.entry.value[name]
        if entry.value is WRONG or (entry.value is None and default is None):
            return None
        if not fits(entry.value):
            self.note(entry, f"expected {expected}, found {_shown(entry.value)}")
            return None
        return entry.value

    def text(self, name: str, default: Any, what: str = "text") -> Any:
        """Returns a text that is not empty."""
        return self.get(name, what, lambda value: isinstance(value, str) and value != "", default)

    def integer(self, name: str, default: Any, least: int) -> Any:
        """Returns an integer."""
        return self.get(name, f"an integer from {least}", lambda value: type(value) is int and value >= least, default)

    def number(self, name: str, default: Any) -> Any:
        """Returns a finite number above 0."""
        return self.get(
            name,
            "a number above 0",
            lambda value: type(value) in (int, float) and 0 < value < float("inf"),
            default,
        )

    def flag(self, name: str, default: bool) -> Any:
        """Returns true or false."""
        return self.get(name, "true or false", lambda value: type(value) is bool, default)

    def choice(self, name: str, choices: Sequence[str], default: Any) -> Any:
        """Returns one of some texts."""
        return self.get(
            name, f"one of {', '.join(choices)}", lambda value: isinstance(value, str) and value in choices, default
        )

    def texts(self, name: str) -> Any:
        """Returns a list of texts, empty where there is none."""
        found = self.get(name, "a list of names", _is_list_of_texts, ())
        return tuple(item.value if isinstance(item, Entry) else item for item in found or ())

    def function(self, name: str, default: Any) -> Any:
        """Returns a function or the name of one, having looked whether there is such a function."""
        expected = 'the name of a function, "package.module:function"'
        found = self.get(
            name, expected, lambda value: callable(value) or (isinstance(value, str) and value != ""), default
        )
        if self._imports and isinstance(found, str):
            try:
                named_function(found)
            except FunctionMissing as cause:
                self.note(self.entry.value[name], f"{found}: {cause}")
        return found

    def section(self, name: str) -> Section | None:
        """Returns the mapping of a name, None where there is none."""
        self.knows(name)
        if not self.has(name) or self.entry.value[name].value is None:
            return None
        return self._inner(self.entry.value[name])

    def sections(self, name: str, expected: str, default: Any) -> list[Section]:
        """Returns the mappings of a list, one of which is what is expected."""
        entries = self.get(name, f"a list, each entry {expected}", lambda value: isinstance(value, list), default)
        return [self._inner(entry, expected) for entry in entries or ()]

    def finish(self) -> None:
        """Takes note of what nobody has asked for."""
        for name, entry in self.entry.value.items() if self.usable else ():
            if name not in self._asked:
                self.note(entry, f"unknown key; {nearest(name, self._asked)}")

    def _inner(self, entry: Entry, expected: str = "a mapping") -> Section:
        return Section(entry, self._mistakes, imports=self._imports, expected=expected)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(item.value if isinstance(item, Entry) else item, str) for item in value
    )


def _shown(value: Any) -> str:
    """Returns a value as a configuration says it."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    return redact(repr(value))[:100]
