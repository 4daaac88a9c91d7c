"""Functions of the user's, as an option of the producer names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lazyshard.lazy import FunctionMissing, name_error, name_value, named_function
from lazyshard_producer.errors import SettingInvalid

__all__ = ["load_function", "name_error", "name_value"]


def load_function(name: str, option: str) -> Callable[..., Any]:
    """Returns the function of a `MODULE:FUNCTION`.

    Raises:
        SettingInvalid: there is none.
    """
    try:
        return named_function(name)
    except FunctionMissing as cause:
        raise SettingInvalid(f"{option}: {name}: {cause}", option=option) from cause.__cause__
