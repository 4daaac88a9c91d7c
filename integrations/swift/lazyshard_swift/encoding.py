"""`lazyshard-producer run --encode swift`: ms-swift's template, loaded by its own arguments, without a model's weights.

The arguments are ms-swift's, read by its own parser and completed by its own defaults, so that a template comes out as
it does in training with the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from lazyshard.format import Encoding
from lazyshard_swift import ms_swift
from lazyshard_swift.encoded_values import pack
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.fingerprint import of_producer
from lazyshard_swift.rows import RowEncoder

_ENVIRONMENT: Final = {
    # There are as many processes as are wanted, and each has one core.
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # Each would tell the same: what is loaded, and what is not installed.
    "LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Of this process and its workers, where the user has not said otherwise."""

MODES: Final = ("train", "rlhf")
"""Modes of a template in which it encodes for training: `mode` is `rlhf` for DPO and its like."""


def open_encoder(
    model: str, template: str | None, max_length: int | None, options: Sequence[tuple[str, str]]
) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], Encoding]:
    """Returns what encodes a row as ms-swift would before training it, and what it encodes with.

    Args:
        model: the model's folder or name.
        template: the template's name; None for the model's.
        max_length: of which longer rows make no sample; None for what the model takes.
        options: names and values of other options of ms-swift; besides these `mode`, one of `MODES`.

    Raises:
        SettingsRefused: ms-swift is not installed or too old, or cannot encode by these options.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from swift.arguments import BaseArguments
        from swift.utils import parse_args
    except ImportError as cause:
        raise SettingsRefused(f"--encode swift needs ms-swift {ms_swift.needed()}: {cause}") from cause
    given = dict(options)
    mode = given.pop("mode", MODES[0])
    if mode not in MODES:
        raise SettingsRefused(f"mode is one of {', '.join(MODES)}, got {mode!r}", argument="mode")
    asked = {"model": model, "template": template, "max_length": max_length, **given}
    flags = [text for name, value in asked.items() if value is not None for text in (f"--{name}", str(value))]
    args, left = parse_args(BaseArguments, flags)
    if left:
        raise SettingsRefused(f"ms-swift has no option {left[0]} for what it encodes with", argument=left[0])
    if args.truncation_strategy == "split":
        raise SettingsRefused(
            "truncation_strategy split makes several samples of one row: split long rows with --transform, or choose "
            "delete, left or right",
            argument="truncation_strategy",
        )
    made = args.get_template()
    if made.use_model:
        raise SettingsRefused(
            f"the template {made.template_meta.template_type} encodes with the model itself, so only training can do it"
        )
    made.set_mode(mode)
    columns = args.columns if isinstance(args.columns, dict) else None
    encoder = RowEncoder(
        made,
        columns=columns,
        auto_columns=not args.disable_auto_column_mapping,
        keep_unused=not args.remove_unused_columns,
    )
    return (
        lambda row: pack(encoder(row)),
        of_producer(made, columns, not args.disable_auto_column_mapping),
    )
