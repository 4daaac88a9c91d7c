"""`as_tensor`: a row's array as a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lazyshard.format.arrays import BFLOAT16

__all__ = ["as_tensor"]


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Returns a tensor of an array that came with a row, which shares its memory.

    Of an array that is read-only, as none is that a reader of ours returns, it is a copy: torch has no such tensors.

    Args:
        array: of any dtype that rows may hold; of `lazyshard.BFLOAT16` it gives a tensor of bfloat16.

    Raises:
        TypeError: this release of torch has no such dtype, as those before 2.3 have no uint16, uint32 and uint64.
    """
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
