"""Calls the user's encoder as ms-swift calls `template.encode`, and sees to the length."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized
from typing import Any

EncodeFn = Callable[..., Any]
"""Takes a row and, if it can, ``return_length=True``; returns the sample."""


class Encoder:
    """An encoder with a known way to be called.

    Args:
        encode_fn: called with the row; with ``return_length=True`` too if it takes that, as ms-swift's
            `template.encode` does.
    """

    def __init__(self, encode_fn: EncodeFn) -> None:
        if not callable(encode_fn):
            raise TypeError(f"encode_fn is a function of a row, got {type(encode_fn).__name__}")
        self._encode = encode_fn
        self._options: dict[str, bool] = {"return_length": True} if _takes_return_length(encode_fn) else {}

    def __call__(self, row: dict[str, Any]) -> Any:
        """Returns the encoded sample; a dict with `input_ids` gets a `length` unless it has `length` or `lengths`.

        Raises:
            ValueError: the encoder returned nothing.
            Exception: whatever the encoder raises.
        """
        sample = self._encode(row, **self._options)
        if sample is None:
            raise ValueError("the encoder returned None")
        if type(sample) is dict and "length" not in sample and "lengths" not in sample:
            tokens = sample.get("input_ids")
            if isinstance(tokens, Sized):
                sample["length"] = len(tokens)
        return sample


def _takes_return_length(function: EncodeFn) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        p.kind is inspect.Parameter.VAR_KEYWORD
        or (p.name == "return_length" and p.kind is not inspect.Parameter.POSITIONAL_ONLY)
        for p in parameters
    )
