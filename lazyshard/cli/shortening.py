"""Values made short enough to be looked at: long strings, payloads in base64, long lists and dicts, numpy arrays."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.format.arrays import DTYPES

MAX_CHARACTERS: Final = 200
MAX_ITEMS: Final = 20
MAX_KEYS: Final = 100
_MAX_DEPTH: Final = 40
"""Deeper values are not followed: a row nests up to 254 levels deep, of which nobody reads as many."""

_DATA_URL: Final = re.compile(r"data:[^,\s]{0,200};base64,")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")
_SHOWN_OF_BASE64: Final = 16


def shorten(value: Any, depth: int = 0) -> Any:
    """Returns a value with what is long in it shortened, each with its length.

    >>> shorten({"a": "x" * 300})["a"][195:], shorten(list(range(25)))[19:]
    ('xxxxx... (300 characters)', [19, '... (25 items)'])
    """
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict | list) and value and depth >= _MAX_DEPTH:
        return f"... ({_count(len(value), 'key' if isinstance(value, dict) else 'item')})"
    if isinstance(value, dict):
        fields = {_text(key): shorten(item, depth + 1) for key, item in islice(value.items(), MAX_KEYS)}
        return fields if len(value) <= MAX_KEYS else {**fields, "...": f"({_count(len(value), 'key')})"}
    if isinstance(value, list):
        items = [shorten(item, depth + 1) for item in value[:MAX_ITEMS]]
        return items if len(value) <= MAX_ITEMS else [*items, f"... ({_count(len(value), 'item')})"]
    if isinstance(value, np.ndarray):
        return _array(value)
    return value


def with_lists(value: Any) -> Any:
    """Returns a value with lists in the places of numpy arrays: nothing is shortened."""
    if isinstance(value, np.ndarray):
        return _numbers(value).tolist()
    if isinstance(value, dict):
        return {key: with_lists(item) for key, item in value.items()}
    return [with_lists(item) for item in value] if isinstance(value, list) else value


def _array(value: npt.NDArray[Any]) -> str:
    """Returns an array in words: its dtype and shape, and its first numbers.

    >>> _array(np.arange(30, dtype=np.int16).reshape(2, 15))[:52]
    'array of int16, shape 2 x 15: 0, 1, 2, 3, 4, 5, 6, 7'
    """
    name = next((name for name, dtype in DTYPES.items() if dtype == value.dtype), str(value.dtype))
    shape = " x ".join(map(str, value.shape)) or "()"
    some = ", ".join(str(number) for number in _numbers(value.reshape(-1)[:MAX_ITEMS]).tolist())
    return f"array of {name}, shape {shape}: {some}{', ...' if value.size > MAX_ITEMS else ''}".rstrip(": ")


def _numbers(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns an array as one whose numbers can be shown: bfloat16 is the upper half of a float32."""
    if value.dtype != DTYPES["bfloat16"]:
        return value
    return (value.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _text(value: str) -> str:
    if len(value) <= MAX_CHARACTERS:
        return value
    start = url.end() if (url := _DATA_URL.match(value)) else 0
    if is_base64(value, start):
        # Each group of four characters holds three bytes, less what "=" stands for.
        size = (len(value.rstrip("=")) - start) * 3 // 4
        shown = value[: start + _SHOWN_OF_BASE64]
        return f"{shown}... ({_count(len(value), 'character')}, base64 of {_count(size, 'byte')})"
    return f"{value[:MAX_CHARACTERS]}... ({_count(len(value), 'character')})"


def is_base64(value: str, start: int = 0) -> bool:
    """Returns whether a long string looks like base64 from a character on: no word of any language is as long."""
    if _BASE64.fullmatch(value, start) is None:
        return False
    digits = value[start : start + 10_000]
    return any(char.isupper() for char in digits) and any(char.islower() for char in digits)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
