"""Options of data sets, written flat in tests."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from lazyshard import Order

_OF_ORDER: Final = tuple(field.name for field in fields(Order))


def grouped(given: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    options = {**(given or {}), **more}
    order = {name: options.pop(name) for name in _OF_ORDER if name in options}
    return options | ({"order": Order(**order)} if order else {})
