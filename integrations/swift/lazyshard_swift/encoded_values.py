"""What a template has encoded, as a row with numpy arrays, and back: with every list, tensor and number as it was.

    encoded    {"input_ids": [1, 2, 3], "length": 3, "pixel_values": tensor(...), "lengths": [3]}
    row        {"input_ids": array([1, 2, 3]), "length": 3, "pixel_values": {"$tensor": array(...)}, "lengths": [3]}

A list of numbers becomes an array, and lists are what arrays become again: ms-swift's collators take lists for lists
and concatenate them. Objects with one key that begins with "$" stand for what is neither a list nor JSON.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from lazyshard import as_tensor
from lazyshard.format.arrays import BFLOAT16

_TENSOR: Final = "$tensor"
_NUMPY: Final = "$numpy"
_TUPLE: Final = "$tuple"
_MARKS: Final = frozenset((_TENSOR, _NUMPY, _TUPLE))

_COUNTS: Final = ("length", "lengths")
"""Keys that end so hold a number or two, which are shorter as they are."""

_INT32: Final = 2**31


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
    return {name: _unpack(value) for name, value in row.items()}


def _pack(value: Any, where: str) -> Any:
    kind = type(value)
    if value is None or kind in (str, bool, int, float):
        return value
    if kind is list:
        array = _numbers(value)
        return [_pack(one, where) for one in value] if array is None else array
    if kind is tuple:
        return {_TUPLE: [_pack(one, where) for one in value]}
    if isinstance(value, dict):
        return {name: _pack(one, f"{where}.{name}") for name, one in _checked(value, where).items()}
    if isinstance(value, torch.Tensor):
        return {_TENSOR: _array(value)}
    if isinstance(value, np.ndarray):
        return {_NUMPY: value}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"the template returned a {kind.__module__}.{kind.__name__} at {where}, which no row can hold")


def _checked(values: dict[Any, Any], where: str) -> dict[str, Any]:
    for name in values:
        if type(name) is not str or name in _MARKS:
            raise TypeError(
                f"the template returned the key {name!r:.80} at {where or 'the top'}, which no row can have"
            )
    return values


def _numbers(values: list[Any]) -> npt.NDArray[Any] | None:
    """Returns a list of numbers of one kind as an array that gives the same list again; None for any other list."""
    kinds = set(map(type, values))
    if kinds == {int}:
        low, high = min(values), max(values)
        if low >= -_INT32 and high < _INT32:
            return np.array(values, np.int32)
        return np.array(values, np.int64) if low >= -(2**63) and high < 2**63 else None
    if kinds == {float}:
        exact = np.array(values, np.float64)
        with np.errstate(over="ignore"):
            short = exact.astype(np.float32)
        return short if np.array_equal(short.astype(np.float64), exact, equal_nan=True) else exact
    return np.array(values, np.bool_) if kinds == {bool} else None


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def _unpack(value: Any) -> Any:
    kind = type(value)
    if kind is np.ndarray:
        return value.tolist()
    if kind is list:
        return [_unpack(one) for one in value]
    if kind is not dict:
        return value
    if len(value) == 1:
        (mark, inner), *_ = value.items()
        if mark == _TENSOR:
            return as_tensor(inner)
        if mark == _NUMPY:
            return inner
        if mark == _TUPLE:
            return tuple(_unpack(one) for one in inner)
    return {name: _unpack(one) for name, one in value.items()}
