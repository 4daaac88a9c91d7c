"""What decides about a template's encoding, as plain facts: kept in the manifest of an encoded stream, and compared.

Both sides make them of a template object, the producer of the one that it encodes with, the trainer of its own. So what
is compared is what was used, not what was written on a command line.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import orjson
import xxhash

from lazyshard.format import Encoding
from lazyshard_swift import ms_swift

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


def digest(value: Any) -> str:
    """Returns XXH3 (64 bits) of a value in JSON with sorted keys, 16 hexadecimal digits."""
    data = orjson.dumps(value, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return xxhash.xxh3_64_hexdigest(data)


def _plain(value: Any) -> Any:
    return value if value is None or type(value) in (str, int, float, bool) else str(value)
