"""A row's array as a tensor; values of encoded samples as JSON with arrays and back, as they were or not at all.

value     {"input_ids": [1, 2, ..., 9], "length": 9, "pixel_values": tensor(...), "ratio": np.float32(0.5)}
packed    {"input_ids": array([1, 2, ..., 9]), "length": 9, "pixel_values": {"$tensor": array(...)},
           "ratio": {"$scalar": array(0.5)}}
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from lazyshard.format.arrays import BFLOAT16


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Returns a tensor of an array that came with a row, which shares its memory.

    Of an array that is read-only, as none is that a reader of ours returns, it is a copy: torch has no such tensors.

    Args:
        array: of any dtype that rows may hold; of `lazyshard.BFLOAT16` it gives a tensor of bfloat16.

    Raises TypeError: this release of torch has no such dtype, as those before 2.3 have no uint16, uint32 and uint64.
    """
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


_SHORT: Final = 8  # Numbers up to which a list is shorter, and read sooner, as it is
_INT32: Final = 2**31


def pack(value: Any) -> Any:
    """Returns a value as one that `lazyshard.format.arrays.pack_row` takes.

    Raises TypeError where a value in it would not come back as it is: of another type than dict, list, tuple, str,
    bool, int, float, None, numpy's arrays and numbers, and tensors on the CPU that need no gradient; or a key that is
    no text, or one of ours.
    """
    kind = type(value)
    if value is None or kind in (str, bool, int):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": np.array(value)}
    if kind is list:
        array = array_of_list(value) if len(value) > _SHORT else None
        return [pack(one) for one in value] if array is None else array
    if kind is dict:
        for name in value:
            if type(name) is not str or name in MARKS:
                raise TypeError(f"the key {name!r:.80}")
        return {name: pack(one) for name, one in value.items()}
    if kind is tuple:
        return {"$tuple": [pack(one) for one in value]}
    if kind is torch.Tensor:
        # More than numbers in memory of the CPU would not come back.
        odd = value.requires_grad or value.device.type != "cpu" or value.layout is not torch.strided
        if not (odd or value.is_quantized or vars(value)):
            bits = value.contiguous()
            is_short = bits.dtype is torch.bfloat16
            return {"$tensor": bits.view(torch.int16).numpy().view(BFLOAT16) if is_short else bits.numpy()}
    if kind is np.ndarray and value.dtype.isnative:
        return {"$numpy": value}
    if isinstance(value, np.number | np.bool_):
        return {"$scalar": np.array(value)}
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")


def unpack(value: Any) -> Any:
    """Returns the value that was packed; arrays and tensors share the memory of what they were packed into."""
    kind = type(value)
    if kind is np.ndarray:
        return value.tolist()
    if kind is list:
        return [unpack(one) for one in value]
    if kind is not dict:
        return value
    if len(value) == 1:
        (mark, inner), *_ = value.items()
        if mark in MARKS:
            return MARKS[mark](inner)
    return {name: unpack(one) for name, one in value.items()}


# By keys that no value may have.
MARKS: Final[dict[str, Callable[[Any], Any]]] = {
    "$tensor": as_tensor,
    "$numpy": lambda array: array,
    "$tuple": lambda values: tuple(map(unpack, values)),
    "$scalar": lambda array: array[()],
    "$float": lambda array: array.item(),
}


def array_of_list(values: list[Any]) -> npt.NDArray[Any] | None:
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
