"""ms-swift's template outside of training: opened for the producer; its samples as rows; its facts.

The arguments of `lazyshard-producer run` with `--encode swift` or `--measure swift` are ms-swift's, read by its own
parser and completed by its own defaults, so that a template comes out as it does in training with the same ones,
without a model's weights.

What it has encoded becomes a row with numpy arrays, and that the same again, every list, tensor and number as it was:

    encoded    {"input_ids": [1, 2, 3], "length": 3, "pixel_values": tensor(...), "lengths": [3]}
    row        {"input_ids": array([1, 2, 3]), "length": 3, "pixel_values": {"$tensor": array(...)}, "lengths": [3]}

A list of numbers becomes an array, and lists are what arrays become again: ms-swift's collators take lists for lists
and concatenate them. Objects with one key that begins with "$" stand for what is neither a list nor JSON. The cache of
encoded samples has the same form (`lazyshard.data.tensors`) but keeps no value that would come back otherwise.

What decides about a template's encoding is kept as plain facts in the manifest of an encoded stream, and compared. Both
sides make them of a template object, the producer of the one that it encodes with, the trainer of its own. So what is
compared is what was used, not what was written on a command line.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import orjson
import torch
import xxhash

from lazyshard.data.tensors import MARKS, NUMPY, TENSOR, TUPLE, array_of_list, array_of_tensor
from lazyshard.data.tensors import unpack as unpack_value
from lazyshard.format.records import Encoding
from lazyshard_swift import ms_swift
from lazyshard_swift.errors import SettingsRefused
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

_COUNTS: Final = ("length", "lengths")
"""Keys that end so hold a number or two, which are shorter as they are."""

_ATTRIBUTES: Final = {
    "max_length": "max_length",
    "truncation_strategy": "truncation_strategy",
    "loss_scale": "_loss_scale",
    "is_binary_loss_scale": "is_binary_loss_scale",
    "mode": "mode",
    "task_type": "task_type",
    "use_chat_template": "use_chat_template",
    "template_backend": "template_backend",
    "agent_template": "_agent_template",
    "norm_bbox": "norm_bbox",
    "max_pixels": "max_pixels",
    "response_prefix": "response_prefix",
    "enable_thinking": "enable_thinking",
    "preserve_thinking": "preserve_thinking",
    "add_non_thinking_prefix": "add_non_thinking_prefix",
    "remove_unused_columns": "remove_unused_columns",
}
"""Facts by attribute of ms-swift's `Template`; one that a release does not have is null."""

OF_ROWS: Final = ("columns", "auto_columns")
"""Facts about what is done to rows before the template gets them: nothing that a trainer of encoded rows does."""

_PROCESSORS: Final = ("image_processor", "video_processor", "feature_extractor")
"""Parts of a processor that make numbers of pictures and sounds."""


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
        raise SettingsRefused(f"swift needs ms-swift {ms_swift.needed()}: {cause}") from cause
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


def fingerprint(template: Any) -> dict[str, Any]:
    """Returns the facts about a template of ms-swift, in its training mode."""
    meta = template.template_meta
    facts: dict[str, Any] = {
        "kind": "swift",
        "ms_swift": ms_swift.version(),
        "template": meta.template_type,
        "system": meta.default_system,
        "template_text": digest(_texts(meta)),
        "tokenizer": digest(_tokenizer(template)),
        "processor": _processor(getattr(template, "processor", None)),
    }
    return facts | {name: _plain(getattr(template, place, None)) for name, place in _ATTRIBUTES.items()}


def of_producer(template: Any, columns: Any, auto_columns: bool) -> Encoding:
    """Returns the facts about what a producer encodes with; see `lazyshard_swift.rows.RowEncoder`."""
    mapping = orjson.dumps(columns, option=orjson.OPT_SORT_KEYS).decode() if columns else None
    return fingerprint(template) | {"columns": mapping, "auto_columns": auto_columns}


def _texts(meta: Any) -> Any:
    """Returns what a template puts around messages; its class and functions are ms-swift's, whose version is a fact."""
    if not dataclasses.is_dataclass(meta):
        return None
    values = {field.name: getattr(meta, field.name, None) for field in dataclasses.fields(meta)}
    return {name: value for name, value in values.items() if name != "default_system" and _is_text(value)}


def _is_text(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_text, value))
    return value is None or isinstance(value, str | bool | int)


def _tokenizer(template: Any) -> Any:
    """Returns all that decides how text becomes tokens, wherever its files lie and however they were saved."""
    tokenizer = template.tokenizer
    chat = getattr(tokenizer, "chat_template", None) if template.template_backend == "jinja" else None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        added = {str(number): str(token) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        return {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab(), "added": added, "chat": chat}
    rules = orjson.loads(backend.to_str())
    # How batches were last padded or cut is state, not a rule.
    rules.pop("padding", None)
    rules.pop("truncation", None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return {"rules": rules, "special": special, "chat": chat}


def _processor(processor: Any) -> str | None:
    parts: dict[str, Any] = {name: getattr(processor, name, None) for name in _PROCESSORS}
    found = {name: part.to_dict() for name, part in parts.items() if hasattr(part, "to_dict")}
    return digest(found) if found else None


def _plain(value: Any) -> Any:
    return value if value is None or type(value) in (str, int, float, bool) else str(value)


def digest(value: Any) -> str:
    """Returns XXH3 (64 bits) of a value in JSON with sorted keys, 16 hexadecimal digits."""
    data = orjson.dumps(value, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return xxhash.xxh3_64_hexdigest(data)
