"""Bounds: what the plan accepts as an integer, and how it names the bound and the value when it refuses one.

A wrong number here would not crash later, it would silently train on the wrong samples. So the frozen dataclasses check
every field once, when they are made, and the index maps check every argument they are given.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["check_field", "int64_array", "outside"]


def check_field(name: str, value: object, low: int, stop: int | None = None) -> None:
    """Refuse a configuration value that is not an `int` in the half-open range [low, stop).

    `bool` is refused although it is an `int`: `dp=True` is a slip, not a number of ranks.

    Raises:
        ValueError: with the name, the bound and the value.
    """
    if type(value) is int and value >= low and (stop is None or value < stop):
        return
    bound = f">= {low}" if stop is None else f"in [{low}, {stop})"
    raise ValueError(f"{name} must be an int {bound}, got {value!r}")


def outside(name: str, value: int, stop: int | None, why: str = "", low: int = 0) -> IndexError:
    """Build the error for an index outside the half-open range [low, stop), `stop` None being no upper bound."""
    bound = f">= {low}" if stop is None else f"in [{low}, {stop})"
    return IndexError(f"{name} must be {bound}{why}, got {value}")


def int64_array(name: str, values: npt.ArrayLike, stop: int | None = None, low: int = 0) -> npt.NDArray[np.int64]:
    """Return `values`, of any shape, as int64 after checking that all lie in the half-open range [low, stop).

    Raises:
        ValueError: `values` are not integers.
        IndexError: a value lies outside the range; the first such one is named.
    """
    given = np.asarray(values)
    if not given.size:
        return given.astype(np.int64)
    if given.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got dtype {given.dtype}")
    # Before the conversion, which would wrap a large unsigned number into a small negative one.
    end = 2**63 if stop is None else stop
    if int(given.min()) < low or int(given.max()) >= end:
        bad = next(number for number in given.flat if not low <= int(number) < end)
        raise outside(name, int(bad), stop, low=low)
    return given.astype(np.int64, copy=False)
