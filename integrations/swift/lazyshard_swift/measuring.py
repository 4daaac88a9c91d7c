"""How long a row is in tokens by ms-swift's template, for `lazyshard measure --model DIR`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

from lazyshard.errors import MeasureRefused
from lazyshard_swift import ms_swift
from lazyshard_swift.rows import RowEncoder

Measure = Callable[[dict[str, Any]], int]


def open_template(
    model: str, template: str | None, max_length: int | None, model_type: str | None, files: str
) -> tuple[Measure, str]:
    """Returns what measures a row as ms-swift would train it, and its text.

    Rows take the way that they take in training: ms-swift's preprocessing, then the template in its training mode.

    Args:
        model: folder of a model; its weights are not read.
        template: the template's type, None for that of the model.
        max_length: of which longer rows make no sample; None for what the model takes.
        model_type: of ms-swift, None for what the folder tells.
        files: digest of the tokenizer's files.

    Raises:
        MeasureRefused: ms-swift is not installed or too old, or has no template for this.
    """
    try:
        from swift import get_processor, get_template
    except ImportError as cause:
        raise MeasureRefused(f"--model needs ms-swift {ms_swift.needed()}: {cause}") from cause
    try:
        made = get_template(get_processor(model, model_type=model_type), template_type=template, max_length=max_length)
        made.set_mode("train")
    except Exception as cause:
        raise MeasureRefused(
            f"{model}: ms-swift has no template for it: {type(cause).__name__}: {str(cause)[:500]}"
        ) from cause
    encoder = RowEncoder(made)
    return lambda row: length_of(encoder(row)), (
        f"template {made.template_meta.template_type}, max_length {made.max_length}, tokenizer {files}, "
        f"ms-swift {importlib.metadata.version('ms-swift')}"
    )


def length_of(encoded: dict[str, Any]) -> int:
    """Returns the tokens of an encoded row; of one that holds several sequences, those of the longest.

    That is what ms-swift groups by.

    >>> length_of({"input_ids": [1, 2], "lengths": [2]}), length_of({"lengths": [2, 5]}), length_of({"length": 3})
    (2, 5, 3)
    """
    lengths = encoded.get("lengths")
    return int(encoded["length"]) if lengths is None else int(max(lengths))
