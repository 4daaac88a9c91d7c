"""ms-swift's template: its samples as rows, the facts of it, and the cache of encoded samples on the node.

    encoded    {"input_ids": [1, 2, 3], "length": 3, "pixel_values": tensor(...), "lengths": [3]}
    row        {"input_ids": array([1, 2, 3]), "length": 3, "pixel_values": {"$tensor": array(...)}, "lengths": [3]}

Arrays become lists again, which collators concatenate; an object with one key that begins with "$" is neither a list
nor JSON. What decides about the encoding is kept as plain facts in the manifest of an encoded stream, made of a
template object on both sides: what is compared is what was used. Samples in a cache are found by more facts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import torch
import xxhash

from lazyshard.data import samples as tensors
from lazyshard.data.encode_cache import cache_place
from lazyshard.data.settings import EncodeCache
from lazyshard.format.records import Encoding
from lazyshard_swift import ms_swift
from lazyshard_swift.errors import refused

# Attributes of ms-swift's `Template` that are facts, without underscore; one that a release does not have is null.
_ATTRIBUTES: Final = (
    "max_length truncation_strategy _loss_scale is_binary_loss_scale mode task_type use_chat_template template_backend "
    "_agent_template norm_bbox max_pixels response_prefix enable_thinking preserve_thinking add_non_thinking_prefix "
    "remove_unused_columns"
)

# How ms-swift's templates read a variable of the environment; its `get_env_args` takes the name in capitals.
_READ: Final = re.compile(r"""(?:get_env_args|environ\.get|getenv)\(\s*['"](\w+)['"]""")
# By the packages that its templates use for pictures and videos (ms-swift 4.6: `swift/model/models/qwen.py`).
_READ_BY_QWEN: Final = (
    "IMAGE_FACTOR MIN_PIXELS MAX_PIXELS MAX_RATIO FRAME_FACTOR SPATIAL_MERGE_SIZE VIDEO_MIN_PIXELS VIDEO_MAX_PIXELS "
    "VIDEO_TOTAL_PIXELS FPS FPS_MIN_FRAMES FPS_MAX_FRAMES IMAGE_MIN_TOKEN_NUM IMAGE_MAX_TOKEN_NUM VIDEO_MIN_TOKEN_NUM "
    "VIDEO_MAX_TOKEN_NUM MODEL_SEQ_LEN FORCE_QWENVL_VIDEO_READER"
)
_PLAIN: Final = (type(None), str, bool, int, float)
_CACHE: Final = "sharded_lazy_encode_cache"


def pack(encoded: dict[str, Any]) -> dict[str, Any]:
    """Returns an encoded sample as a row that can be published."""
    row: dict[str, Any] = {}
    for name, value in encoded.items():
        try:
            if type(name) is not str:
                raise TypeError("a key that is no text")
            # A number or two are shorter as they are.
            row |= {name: value} if name.endswith(("length", "lengths")) else _pack({name: value})
        except TypeError as cause:
            raise TypeError(f"the template returned {cause} at {name!r:.80}, which no row can hold") from cause
    return row


def _pack(value: dict[str, Any]) -> Any:
    with contextlib.suppress(TypeError):
        return tensors.pack(value)
    # What a subclass, or a tensor's gradient, says more is nothing for a row.
    return tensors.pack(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, torch.Tensor):
        return torch.Tensor.detach(value).cpu().as_subclass(torch.Tensor)
    if isinstance(value, np.ndarray):
        return np.asarray(value).astype(value.dtype.newbyteorder("="), copy=False)
    return value.item() if isinstance(value, np.generic) else value


def unpack(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the encoded sample of a row, as the template has returned it; tensors share the memory of the row."""
    return {name: tensors.unpack(value) for name, value in row.items()}


def fingerprint(template: Any) -> dict[str, Any]:
    """Returns the facts about a template of ms-swift, in its training mode."""
    meta, processor = template.template_meta, getattr(template, "processor", None)
    # What a template puts around messages; its class and functions are ms-swift's, whose version is a fact.
    names = {field.name for field in dataclasses.fields(meta)} if dataclasses.is_dataclass(meta) else set()
    texts = {name: value for name in names - {"default_system"} if _is_text(value := getattr(meta, name, None))}
    # What makes numbers of pictures and sounds.
    names_of_parts = ("image_processor", "video_processor", "feature_extractor")
    parts: dict[str, Any] = {name: getattr(processor, name, None) for name in names_of_parts}
    made = {name: part.to_dict() for name, part in parts.items() if hasattr(part, "to_dict")}
    facts: dict[str, Any] = {
        "kind": "swift",
        "ms_swift": ms_swift.version(),
        "template": meta.template_type,
        "system": meta.default_system,
        "template_text": digest(texts if names else None),
        "tokenizer": digest(_tokenizer(template)),
        "processor": digest(made) if made else None,
    }
    told = {name.removeprefix("_"): getattr(template, name, None) for name in _ATTRIBUTES.split()}
    return facts | {name: value if type(value) in _PLAIN else str(value) for name, value in told.items()}


def _is_text(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_text, value))
    return value is None or isinstance(value, str | bool | int)


def of_producer(template: Any, columns: Any, auto_columns: bool) -> dict[str, Any]:
    """Returns the facts about what a producer encodes with, of `RowEncoder`."""
    mapping = orjson.dumps(columns, option=orjson.OPT_SORT_KEYS).decode() if columns else None
    return fingerprint(template) | {"columns": mapping, "auto_columns": auto_columns}


def row_options(args: Any) -> dict[str, Any]:
    """Returns what ms-swift's arguments say about columns."""
    columns = args.columns if isinstance(args.columns, dict) else None
    return {"columns": columns, "auto_columns": not getattr(args, "disable_auto_column_mapping", False)}


def _tokenizer(template: Any) -> Any:
    """Returns all that decides how text becomes tokens, wherever its files lie and however they were saved."""
    tokenizer = template.tokenizer
    chat = getattr(tokenizer, "chat_template", None) if template.template_backend == "jinja" else None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        added = {str(number): str(token) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        return {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab(), "added": added, "chat": chat}
    # How batches were last padded or cut is state, not a rule.
    told = orjson.loads(backend.to_str()).items()
    rules = {name: value for name, value in told if name not in ("padding", "truncation")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return {"rules": rules, "special": special, "chat": chat}


def digest(value: Any) -> str:
    """Returns XXH3 (64 bits) of a value in JSON with sorted keys, 16 hexadecimal digits."""
    data = orjson.dumps(value, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return xxhash.xxh3_64_hexdigest(data)


def packing_length(args: Any) -> int | None:
    """Returns the most tokens of a pack, None where samples are not packed."""
    if not getattr(args, "packing", False):
        return None
    length: int | None = getattr(args, "packing_length", None) or args.max_length
    if length is None:
        raise refused("packing", "true needs to know the most tokens of a pack: give --packing_length N")
    return length


def encode_cache(args: Any, template: Any) -> EncodeCache:
    """Returns the cache of a data set of raw rows; one without a directory where none is asked for."""
    directory = args.sharded_lazy_encode_cache
    if directory is None:
        return EncodeCache()
    if ms_swift.release(ms_swift.version()) is None:
        raise refused(_CACHE, "finds samples again by the version of ms-swift, which this one does not tell")
    if getattr(template, "use_model", False):
        raise refused(_CACHE, "is not for a template that encodes with the model, which training changes: leave it out")
    try:
        for stream in args.dataset:
            cache_place(directory, stream)
    except ValueError as cause:
        raise refused(_CACHE, f"{directory}: {cause}") from cause
    return EncodeCache(directory, args.sharded_lazy_encode_cache_size, cache_facts(args, template))


def cache_facts(args: Any, template: Any) -> Encoding:
    """Returns all that decides about what is made of a row, as plain facts."""
    kind, plugins = type(template), getattr(args, "external_plugins", None) or ()
    # Plain ones, such as templates keep of their settings.
    settings = {name: value for name, value in vars(template).items() if _is_setting(name, value)}
    return {
        **of_producer(template, **row_options(args)),
        "keep_unused": not args.remove_unused_columns,
        "packing_length": packing_length(args),
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "attributes": digest(settings),
        "environment": digest({name: os.environ[name] for name in sorted(_variables()) if name in os.environ}),
        "plugins": digest([_content(name) for name in ([plugins] if isinstance(plugins, str) else plugins)]),
    }


def _is_setting(name: str, value: Any) -> bool:
    if isinstance(value, list | tuple):
        return not name.startswith("_") and all(_is_setting(name, one) for one in value)
    return not name.startswith("_") and type(value) in _PLAIN


@functools.cache
def _variables() -> frozenset[str]:
    """Returns the variables of the environment that the templates of the installed ms-swift read."""
    place = ms_swift.folder()
    files = () if place is None else (place / "template").rglob("*.py")
    names = {name for file in files for name in _READ.findall(file.read_text(encoding="utf-8"))}
    return frozenset({*_READ_BY_QWEN.split(), *names, *map(str.upper, names)})


def _content(name: str) -> str:
    """Returns a digest of a plugin: what it registers may encode otherwise once it is changed."""
    with contextlib.suppress(OSError):
        return xxhash.xxh3_64_hexdigest(Path(name).read_bytes())
    return name
