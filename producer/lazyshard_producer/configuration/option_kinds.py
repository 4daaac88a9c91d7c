"""Kinds of options: how the value of each is written on the command line and in TOML, and what it becomes.

Only the form is looked at here: "a whole number". Which numbers may be is for `problems`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lazyshard_producer.configuration.quantities import parse_amount, parse_bytes, parse_retain

_NONE: Final = "none"


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value is written.

    Attributes:
        expects: what it is, for the message where it is something else.
        from_flags: makes it of the texts behind a flag, in order; mostly there is one, and the last one counts.
        from_toml: makes it of a TOML value.

    Both raise ValueError where that cannot be.
    """

    expects: str
    from_flags: Callable[[Sequence[str]], Any]
    from_toml: Callable[[Any], Any]


def choice(*names: str) -> Kind:
    """Returns the kind of one of these names."""

    def pick(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return _single(f"one of {', '.join(names)}", pick, lambda value: pick(_text(value)))


def _single(expects: str, from_text: Callable[[str], Any], from_toml: Callable[[Any], Any]) -> Kind:
    return Kind(expects, lambda texts: from_text(texts[-1]), from_toml)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(value)
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(value)
    return value


def _number(value: Any) -> float:
    if type(value) is not int and type(value) is not float:
        raise ValueError(value)
    try:
        return float(value)
    except OverflowError:
        raise ValueError(value) from None


def _or_none(kind: Kind) -> Kind:
    """Returns the kind of these values, and of "none": no limit, also where a configuration file sets one."""
    return Kind(
        f'{kind.expects} or "none"',
        lambda texts: None if texts[-1] == _NONE else kind.from_flags(texts),
        lambda value: None if value == _NONE else kind.from_toml(value),
    )


def _quantity(expects: str, parse: Callable[[str], Any]) -> Kind:
    return _single(expects, parse, lambda value: parse(str(value) if type(value) is int else _text(value)))


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.strip() for text in texts for name in text.split(","))


def _names_of_list(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, value)) if type(value) is list else (_text(value),)


def _columns(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    pairs = (name.partition("=") for name in _names(texts))
    return tuple((new.strip(), old.strip() if equals else new) for new, equals, old in pairs)


def _columns_of_table(value: Any) -> tuple[tuple[str, str], ...]:
    if type(value) is list:
        return tuple((_text(name), name) for name in value)
    if type(value) is not dict:
        raise ValueError(value)
    return tuple((new, _text(old)) for new, old in value.items())


def _settings(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    pairs = [text.partition("=") for text in texts]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(texts)
    return tuple((name.strip(), value) for name, _, value in pairs)


def _settings_of_table(value: Any) -> tuple[tuple[str, str], ...]:
    if type(value) is not dict or not all(type(one) in (str, int, float, bool) for one in value.values()):
        raise ValueError(value)
    return tuple((name, str(one).lower() if type(one) is bool else str(one)) for name, one in value.items())


TEXT: Final = _single("text", str, _text)
WHOLE: Final = _single("a whole number", int, _whole)
WHOLE_OR_NONE: Final = _or_none(WHOLE)
NUMBER: Final = _single("a number", float, _number)
NUMBER_OR_NONE: Final = _or_none(NUMBER)
BYTES: Final = _quantity("a size such as 20GB or 512MiB, or a number of bytes", parse_bytes)
BYTES_OR_NONE: Final = _or_none(BYTES)
AMOUNT_OR_NONE: Final = _or_none(_quantity("an amount such as 64chunks, 1000000samples or 20GB", parse_amount))
RETAIN: Final = _quantity('"all", "consumed" or a number of chunks', parse_retain)
NAMES: Final = Kind("a list of names", _names, _names_of_list)
COLUMNS: Final = Kind("names of columns as NEW=OLD", _columns, _columns_of_table)
SETTINGS: Final = Kind("settings as NAME=VALUE", _settings, _settings_of_table)
