"""`--sharded_lazy_encode_cache DIR`: what ms-swift's template makes of rows, kept on the node for all of its processes.

What is kept is found again only by a run that would make the same of a row. What decides about that is more than an
encoded stream tells of itself (`fingerprint`): columns, variables of the environment that templates read, plugins.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import xxhash

from lazyshard.data.encode_cache_opening import cache_place
from lazyshard.data.shared import Stats
from lazyshard.format import Encoding
from lazyshard.format.byte_size import parse_size
from lazyshard_swift import ms_swift, packed
from lazyshard_swift.encoded import Encode, EncodedRows
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.fingerprint import digest, of_producer
from lazyshard_swift.logs import notice

_READ: Final = re.compile(r"""(?:get_env_args|environ\.get|getenv)\(\s*['"](\w+)['"]""")
"""How ms-swift's templates read a variable of the environment; its `get_env_args` takes the name in capitals."""

_READ_BY_QWEN: Final = (
    *("IMAGE_FACTOR", "MIN_PIXELS", "MAX_PIXELS", "MAX_RATIO", "FRAME_FACTOR", "SPATIAL_MERGE_SIZE"),
    *("VIDEO_MIN_PIXELS", "VIDEO_MAX_PIXELS", "VIDEO_TOTAL_PIXELS", "FPS", "FPS_MIN_FRAMES", "FPS_MAX_FRAMES"),
    *("IMAGE_MIN_TOKEN_NUM", "IMAGE_MAX_TOKEN_NUM", "VIDEO_MIN_TOKEN_NUM", "VIDEO_MAX_TOKEN_NUM", "MODEL_SEQ_LEN"),
    "FORCE_QWENVL_VIDEO_READER",
)
"""By the packages that its templates use for pictures and videos (ms-swift 4.6: `swift/model/models/qwen.py`)."""


def options(args: Any, template: Any) -> dict[str, Any]:
    """Returns what a data set of raw rows is told of the cache; nothing without one.

    Args:
        args: ms-swift's.
        template: in its training mode.

    Raises:
        SettingsRefused: with this template nothing can be kept, or the directory lies in that of a stream.
    """
    directory = args.sharded_lazy_encode_cache
    if directory is None:
        return {}
    if ms_swift.release(ms_swift.version() or "") is None:
        raise _refused("what is kept is found again by the version of ms-swift, which this one does not tell")
    if getattr(template, "use_model", False):
        raise _refused(
            f"the template {template.template_meta.template_type} encodes with the model itself, which training "
            f"changes: leave it out"
        )
    for stream in args.dataset:
        try:
            cache_place(directory, stream)
        except ValueError as cause:
            raise _refused(f"{cause}") from cause
    size = args.sharded_lazy_encode_cache_size
    more = {} if size is None else {"encode_cache_bytes": parse_size(size)}
    return {"encode_cache": directory, "encode_fingerprint": facts(args, template), **more}


def for_stream(options: Mapping[str, Any], encode: Encode | None) -> dict[str, Any]:
    """Returns the options of a stream's data set, without a cache where its rows are encoded, or not to be."""
    raw = encode is not None and not isinstance(encode, EncodedRows)
    return {name: value for name, value in options.items() if raw or not name.startswith("encode_")}


def facts(args: Any, template: Any) -> Encoding:
    """Returns all that decides about what is made of a row, as plain facts."""
    columns = args.columns if isinstance(args.columns, dict) else None
    kind = type(template)
    return {
        **of_producer(template, columns, not getattr(args, "disable_auto_column_mapping", False)),
        "keep_unused": not args.remove_unused_columns,
        "packing_length": packed.packing_length(args),
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "attributes": digest({name: value for name, value in vars(template).items() if _is_setting(name, value)}),
        "environment": digest({name: os.environ[name] for name in sorted(_variables()) if name in os.environ}),
        "plugins": digest([_content(name) for name in _names(getattr(args, "external_plugins", None))]),
    }


def tell(directory: str, stats: Sequence[Stats]) -> None:
    """Tells how much of what a rank drew of its streams was in the cache."""
    encoded, found = sum(one.encoded for one in stats), sum(one.from_cache for one in stats)
    left = sum(one.not_cached for one in stats)
    more = f"; {left} of what it encoded could not be cached" if left else ""
    notice(f"--sharded_lazy_encode_cache {directory}: this rank encoded {encoded} rows and found {found} encoded{more}")


def _is_setting(name: str, value: Any) -> bool:
    """Returns whether an attribute of a template is a plain one, such as templates keep of their settings."""
    if isinstance(value, list | tuple):
        return not name.startswith("_") and all(_is_setting(name, one) for one in value)
    return not name.startswith("_") and (value is None or type(value) in (str, bool, int, float))


@functools.cache
def _variables() -> frozenset[str]:
    """Returns the variables of the environment that the templates of the installed ms-swift read."""
    place = ms_swift.folder()
    names = set(_READ_BY_QWEN)
    for file in sorted((place / "template").rglob("*.py")) if place is not None else ():
        for name in _READ.findall(file.read_text(encoding="utf-8")):
            names |= {name, name.upper()}
    return frozenset(names)


def _names(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def _content(name: str) -> str:
    """Returns a digest of a plugin: what it registers may encode otherwise once it is changed."""
    try:
        return xxhash.xxh3_64_hexdigest(Path(name).read_bytes())
    except OSError:
        return name


def _refused(reason: str) -> SettingsRefused:
    return SettingsRefused(f"--sharded_lazy_encode_cache: {reason}", argument="sharded_lazy_encode_cache")
