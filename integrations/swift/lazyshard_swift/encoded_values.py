"""What a template has encoded, as a row with numpy arrays, and back: with every list, tensor and number as it was.

    encoded    {"input_ids": [1, 2, 3], "length": 3, "pixel_values": tensor(...), "lengths": [3]}
    row        {"input_ids": array([1, 2, 3]), "length": 3, "pixel_values": {"$tensor": array(...)}, "lengths": [3]}

A list of numbers becomes an array, and lists are what arrays become again: ms-swift's collators take lists for lists
and concatenate them. Objects with one key that begins with "$" stand for what is neither a list nor JSON. The cache of
encoded samples has the same form (`lazyshard.data.exact_values`) but keeps no value that would come back otherwise.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from lazyshard.data.exact_values import MARKS, NUMPY, TENSOR, TUPLE, array_of_list, array_of_tensor
from lazyshard.data.exact_values import unpack as unpack_value

_COUNTS: Final = ("length", "lengths")
"""Keys that end so hold a number or two, which are shorter as they are."""


def pack(encoded: dict[str, Any]) -> dict[str, Any]:
    """Returns an encoded sample as a row that can be published.

    Raises:
        TypeError: it holds a value that neither JSON nor an array can be, or a key that is no text or is one of ours.
    """
    return {
        name: value if name.endswith(_COUNTS) else _pack(value, name) for name, value in _checked(encoded, "").items()
    }


def unpack(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the encoded sample of a row, as the template has returned it; tensors share the memory of the row."""
    return {name: unpack_value(value) for name, value in row.items()}


def _pack(value: Any, where: str) -> Any:
    kind = type(value)
    if value is None or kind in (str, bool, int, float):
        return value
    if kind is list:
        array = array_of_list(value)
        return [_pack(one, where) for one in value] if array is None else array
    if kind is tuple:
        return {TUPLE: [_pack(one, where) for one in value]}
    if isinstance(value, dict):
        return {name: _pack(one, f"{where}.{name}") for name, one in _checked(value, where).items()}
    if isinstance(value, torch.Tensor):
        return {TENSOR: array_of_tensor(value)}
    if isinstance(value, np.ndarray):
        return {NUMPY: value}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"the template returned a {kind.__module__}.{kind.__name__} at {where}, which no row can hold")


def _checked(values: dict[Any, Any], where: str) -> dict[str, Any]:
    for name in values:
        if type(name) is not str or name in MARKS:
            raise TypeError(
                f"the template returned the key {name!r:.80} at {where or 'the top'}, which no row can have"
            )
    return values
