"""Samples that need no template any more: encoded streams, and the cache of encoded samples on the node.

Of an encoded stream the template is not asked, but compared with what the rows were encoded with. Rows that the
producer has cut (`--split`) or padded (`--pad`) are said to be so by the fact `form`. With ``--padding_free`` the
collator of ms-swift puts samples one behind the other, and gives each positions of its own. So the documents of a
sequence are given to it as those of a pack are, in a list, which keeps them apart (see `rows`).

`--sharded_lazy_encode_cache DIR` keeps what ms-swift's template makes of raw rows, for all processes of the node. What
is kept is found again only by a run that would make the same of a row. What decides about that is more than an encoded
stream tells of itself (`encoding.fingerprint`): columns, variables of the environment that templates read, plugins.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import xxhash

from lazyshard.data.encode_cache import cache_place
from lazyshard.data.settings import EncodeCache
from lazyshard.data.shared import Stats
from lazyshard.format.records import Encoding, differences
from lazyshard.plan.sequences import ATTENTION_MASK, INPUT_IDS, LABELS, NO_LABEL, POSITION_IDS
from lazyshard.store.urls import stream_path
from lazyshard.stream.manifest import read_manifest
from lazyshard_swift import ms_swift, rows
from lazyshard_swift.encoding import OF_ROWS, digest, fingerprint, of_producer, unpack
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.parallel import notice

Encode: TypeAlias = Callable[..., Any]

FORM: Final = "form"
SPLIT: Final = "split"
PAD: Final = "pad"
LENGTH: Final = "length"
LENGTHS: Final = "lengths"

_LEFT_OUT: Final = {SPLIT: (FORM, "max_length", "truncation_strategy"), PAD: (FORM,)}
"""By form: what need not be alike. How long a row might be before it was cut is nothing for who trains the pieces."""

_READ: Final = re.compile(r"""(?:get_env_args|environ\.get|getenv)\(\s*['"](\w+)['"]""")
"""How ms-swift's templates read a variable of the environment; its `get_env_args` takes the name in capitals."""

_READ_BY_QWEN: Final = (
    *("IMAGE_FACTOR", "MIN_PIXELS", "MAX_PIXELS", "MAX_RATIO", "FRAME_FACTOR", "SPATIAL_MERGE_SIZE"),
    *("VIDEO_MIN_PIXELS", "VIDEO_MAX_PIXELS", "VIDEO_TOTAL_PIXELS", "FPS", "FPS_MIN_FRAMES", "FPS_MAX_FRAMES"),
    *("IMAGE_MIN_TOKEN_NUM", "IMAGE_MAX_TOKEN_NUM", "VIDEO_MIN_TOKEN_NUM", "VIDEO_MAX_TOKEN_NUM", "MODEL_SEQ_LEN"),
    "FORCE_QWENVL_VIDEO_READER",
)
"""By the packages that its templates use for pictures and videos (ms-swift 4.6: `swift/model/models/qwen.py`)."""


def encoders(
    directories: Sequence[str], template: Any, raw: Encode, packing_length: int | None = None
) -> tuple[Encode, ...]:
    """Returns what makes samples of the rows of each of these streams, which are there.

    Args:
        directories: of the streams.
        template: ms-swift's, in its training mode; is told where samples are lists of documents.
        raw: makes samples of rows that are not encoded.
        packing_length: most tokens of a pack, where rows are packs; None where they are not.

    Raises:
        SettingsRefused: a stream's rows were encoded otherwise than the template would encode them; or sequences are
            blended with other rows, which ms-swift's collator takes apart from each other alone.
    """
    found: list[Encode] = []
    forms: list[Any] = []
    for directory in directories:
        manifest = read_manifest(stream_path(directory), None)
        if manifest is None or manifest.encoding is None:
            found.append(raw)
            forms.append(None)
        else:
            check_encoding(directory, manifest.encoding, fingerprint(template))
            forms.append(manifest.encoding.get(FORM))
            apart = bool(getattr(template, "padding_free", False))
            found.append(EncodedRows(packing_length, forms[-1], apart=apart))
    if SPLIT in forms and getattr(template, "padding_free", False):
        if set(forms) != {SPLIT}:
            others = [directory for directory, form in zip(directories, forms, strict=True) if form != SPLIT]
            raise SettingsRefused(
                f"--dataset {' '.join(directories)}: with --padding_free true sequences (lazyshard-producer run "
                f"--split) are blended with sequences alone, and {', '.join(others)} holds others: give --padding_free "
                f"false",
                argument="padding_free",
            )
        template.packing = True
    return tuple(found)


class EncodedRows:
    """Turns encoded rows into what the template has returned; an `encode_fn` for `LazyShardedDataset`.

    Args:
        packing_length: most tokens of a pack, where rows are packs; None where they are not.
        form: "split" or "pad" where rows were cut or padded, else None.
        apart: whether a sequence that was cut becomes the list of the documents in it.
    """

    def __init__(self, packing_length: int | None = None, form: Any = None, *, apart: bool = False) -> None:
        self._packing_length = packing_length
        self._form = form
        self._apart = apart

    def __call__(self, row: dict[str, Any]) -> Any:
        """Returns the sample; of a pack the list of its samples, of a sequence that of its documents if asked for.

        Raises:
            ValueError: it is a pack and was to be none, or the other way round; or it has more tokens than a pack may
                have.
        """
        sample = rows.encode_packs(row, self._packing_length, unpack)
        if self._form == SPLIT:
            return _documents(sample) if self._apart else _begun(sample)
        return _padded(sample) if self._form == PAD else sample


def _begun(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns tokens of which the first is nobody's label: ms-swift rolls labels, so the last one would predict it.

    As of any sample of ms-swift's, those included that it cuts itself (``--truncation_strategy split``).
    """
    if sample.get(LABELS):
        sample[LABELS][0] = NO_LABEL
    return sample


def _documents(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the documents of a sequence, or parts of them, as samples; each has positions from 0."""
    names = [name for name in (INPUT_IDS, LABELS) if sample.get(name)]
    starts = [place for place, position in enumerate(sample[POSITION_IDS]) if position == 0]
    borders = zip(starts, [*starts[1:], len(sample[POSITION_IDS])], strict=True)
    return [
        _begun({**{name: sample[name][start:stop] for name in names}, LENGTH: stop - start, LENGTHS: [stop - start]})
        for start, stop in borders
    ]


def _padded(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns a padded row as one of all its tokens, of which the last ones have no label: positions go by `length`."""
    sample.pop(ATTENTION_MASK, None)
    tokens = len(sample[INPUT_IDS])
    return sample | {LENGTH: tokens, LENGTHS: [tokens]}


def check_encoding(directory: str, stream: Encoding, own: Encoding) -> None:
    """Compares what a stream's rows were encoded with to what this run would encode them with.

    Raises:
        SettingsRefused: naming all that differs.
    """
    if stream.get("kind") != own.get("kind"):
        raise SettingsRefused(
            f"--dataset {directory}: its rows were encoded by {stream.get('function', stream.get('kind'))}, not by "
            f"ms-swift's template, so its trainer cannot take them: produce the stream anew with --encode swift, or "
            f"without --encode",
            argument="dataset",
        )
    found = differences(stream, own, leave_out=(*OF_ROWS, *_LEFT_OUT.get(str(stream.get(FORM)), ())))
    if found:
        raise SettingsRefused(
            f"--dataset {directory}: its rows were encoded otherwise than this run would encode them: "
            f"{'; '.join(found)} (there: the stream, here: this run). Train with the settings of the stream, or "
            f"produce it anew with those of this run",
            argument="dataset",
        )


def encode_cache(args: Any, template: Any) -> EncodeCache:
    """Returns the cache of a data set of raw rows; one without a directory where none is asked for.

    Raises:
        SettingsRefused: with this template nothing can be kept, or the directory lies in that of a stream.
    """
    directory = args.sharded_lazy_encode_cache
    if directory is None:
        return EncodeCache()
    if ms_swift.release(ms_swift.version() or "") is None:
        raise _cache_refused("what is kept is found again by the version of ms-swift, which this one does not tell")
    if getattr(template, "use_model", False):
        raise _cache_refused(
            f"the template {template.template_meta.template_type} encodes with the model itself, which training "
            f"changes: leave it out"
        )
    for stream in args.dataset:
        try:
            cache_place(directory, stream)
        except ValueError as cause:
            raise _cache_refused(f"{cause}") from cause
    return EncodeCache(directory, args.sharded_lazy_encode_cache_size, cache_facts(args, template))


def for_stream(cache: EncodeCache, encode: Encode | None) -> EncodeCache:
    """Returns the cache of a stream's data set; none where its rows are encoded, or not to be."""
    return EncodeCache() if encode is None or isinstance(encode, EncodedRows) else cache


def cache_facts(args: Any, template: Any) -> Encoding:
    """Returns all that decides about what is made of a row, as plain facts."""
    columns = args.columns if isinstance(args.columns, dict) else None
    kind = type(template)
    return {
        **of_producer(template, columns, not getattr(args, "disable_auto_column_mapping", False)),
        "keep_unused": not args.remove_unused_columns,
        "packing_length": rows.packing_length(args),
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "attributes": digest({name: value for name, value in vars(template).items() if _is_setting(name, value)}),
        "environment": digest({name: os.environ[name] for name in sorted(_variables()) if name in os.environ}),
        "plugins": digest([_content(name) for name in _plugin_names(getattr(args, "external_plugins", None))]),
    }


def tell_cache(directory: object, stats: Sequence[Stats]) -> None:
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


def _plugin_names(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def _content(name: str) -> str:
    """Returns a digest of a plugin: what it registers may encode otherwise once it is changed."""
    try:
        return xxhash.xxh3_64_hexdigest(Path(name).read_bytes())
    except OSError:
        return name


def _cache_refused(reason: str) -> SettingsRefused:
    return SettingsRefused(f"--sharded_lazy_encode_cache: {reason}", argument="sharded_lazy_encode_cache")
