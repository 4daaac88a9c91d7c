"""What the rows of an encoded stream were made with: plain facts by name, kept in the manifest, compared fact by fact.

A tokenizer's digest, the name of a template, the greatest length: whoever trains on such rows compares them with what
it would have encoded with itself, and whoever adds rows with what the others were made with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

Fact: TypeAlias = str | int | float | bool | None

Encoding: TypeAlias = Mapping[str, Fact]

MAX_FACTS: Final = 1000
"""Of one encoding: far more than any has."""

_SHOWN: Final = 60
"""Characters of a fact that messages show: a system prompt may have pages."""

_ABSENT: Final = object()


def is_encoding(value: Any) -> bool:
    """Whether this is an object of plain facts: strings, numbers, true, false and null by non-empty names."""
    return (
        isinstance(value, Mapping)
        and 0 < len(value) <= MAX_FACTS
        and all(isinstance(name, str) and name and _is_fact(fact) for name, fact in value.items())
    )


def check_encoding(value: Mapping[str, Any], what: str = "an encoding") -> dict[str, Fact]:
    """Returns a copy of an encoding.

    Args:
        value: it.
        what: how the message calls it.

    Raises:
        ValueError: it is none; the message names what it is, and the first fact that cannot be.
    """
    if not is_encoding(value):
        raise ValueError(
            f"{what} is 1 to {MAX_FACTS} facts by name, each a string, a number, true, false or None, got "
            f"{_mistake(value)}"
        )
    return dict(value)


def _mistake(value: Any) -> str:
    """Returns what is wrong about a value that is no encoding."""
    if not isinstance(value, Mapping):
        return f"{_shown(value)} ({type(value).__name__})"
    for name, fact in value.items():
        if not isinstance(name, str) or not name:
            return f"the name {_shown(name)}"
        if not _is_fact(fact):
            return f"{_shown(fact)} ({type(fact).__name__}) under {_shown(name)}"
    return f"{len(value):,} of them"


def differences(was: Encoding, now: Encoding, leave_out: Iterable[str] = ()) -> list[str]:
    """Returns in words each fact in which two encodings differ, in the order of the first; nothing where they agree.

    >>> differences({"max_length": 512, "template": "qwen"}, {"max_length": 1024, "template": "qwen"})
    ['max_length is 512 there and 1024 here']
    """
    names = [name for name in {**was, **now} if name not in set(leave_out)]
    return [
        f"{name} is {_shown(was.get(name, _ABSENT))} there and {_shown(now.get(name, _ABSENT))} here"
        for name in names
        if _key(was.get(name, _ABSENT)) != _key(now.get(name, _ABSENT))
    ]


def _is_fact(value: Any) -> bool:
    if type(value) is int:
        return -(2**63) <= value < 2**64
    return value is None or type(value) in (str, bool) or (type(value) is float and math.isfinite(value))


def _key(value: Any) -> tuple[bool, Any]:
    # To Python True is 1; 1 and 1.0 are the same fact all the same.
    return isinstance(value, bool), value


def _shown(value: Any) -> str:
    text = "not said" if value is _ABSENT else "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
