"""Rows and ms-swift's template: encodes rows of a stream for the trainer, and stores encoded samples as rows.

ms-swift preprocesses the whole data set before it encodes; here the same classes are applied to one row at a time. With
``--packing true`` rows are packs (`lazyshard-producer run --pack`), which become lists of encoded rows like those of
ms-swift's `PackingDataset`: its collator gives each row positions from 0, from which the borders (`cu_seqlens`) follow.
With ``--padding_free`` sequences that were cut (`--split`) become such lists too.

    encoded    {"input_ids": [1, 2, 3], "length": 3, "pixel_values": tensor(...), "lengths": [3]}
    row        {"input_ids": array([1, 2, 3]), "length": 3, "pixel_values": {"$tensor": array(...)}, "lengths": [3]}

Arrays become lists again, which collators concatenate; an object with a single key that begins with "$" is neither a
list nor JSON. The manifest of an encoded stream records as plain values what decides the encoding. Both sides derive it
from a template object: the template of a run is compared with the one with which the rows were encoded.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import orjson
import torch
import xxhash

from lazyshard import LazyShardError, StreamReader
from lazyshard.data import samples as tensors
from lazyshard.errors import ChunkRetired, SkipSample
from lazyshard.format.batch import decode_pack
from lazyshard.format.records import Encoding, differences
from lazyshard.format.row import parse_row, values_in
from lazyshard.memory import raise_if_short
from lazyshard.plan.sequences import ATTENTION_MASK, INPUT_IDS, LABELS, NO_LABEL, POSITION_IDS
from lazyshard.store.files import stream_path
from lazyshard.stream.listing import read_manifest
from lazyshard_swift import ms_swift
from lazyshard_swift.errors import SettingsRefused, refused

Encode: TypeAlias = Callable[..., Any]

# Facts that may differ: those of ms-swift's preprocessing, which encoded rows no longer need; and others by the fact
# "form", how the producer has split or padded rows. For split rows the limit of a row's length is irrelevant.
_OF_ROWS: Final = ("columns", "auto_columns")
_LEFT_OUT: Final = {"split": ("form", "max_length", "truncation_strategy", *_OF_ROWS), "pad": ("form", *_OF_ROWS)}

# Defaults for the producer's process and its workers: the number of processes sets the parallelism, with one core
# each, and every process would log the same about what is loaded.
_CORES: Final = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
_ENVIRONMENT: Final = _CORES | {"LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}

# Attributes of ms-swift's `Template` that are recorded, without underscore; null if a release does not have one.
_ATTRIBUTES: Final = (
    "max_length truncation_strategy _loss_scale is_binary_loss_scale mode task_type use_chat_template template_backend "
    "_agent_template norm_bbox max_pixels response_prefix enable_thinking preserve_thinking add_non_thinking_prefix "
    "remove_unused_columns"
)
PLAIN: Final = (type(None), str, bool, int, float)

_MEDIA: Final = ("images", "audios", "videos")  # suffixes of ms-swift's media columns


@dataclass(eq=False)
class RowEncoder:
    """Encodes rows with ms-swift's template; packs of at most `packing_length` tokens become lists of samples.

    Rows longer than ``--max_length``, which ms-swift drops from an ordinary data set, raise `SkipSample`.
    """

    template: Any
    columns: dict[str, str] | None = None
    auto_columns: bool = True
    keep_unused: bool = False
    packing_length: int | None = None
    # Whether ms-swift has preprocessed the rows, as those of an ordinary data set.
    prepared: bool = False
    # Preprocessor and column names by the columns of a row: most rows of a stream have the same columns.
    _known: dict[tuple[str, ...], tuple[Any, dict[str, str]]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Excludes the preprocessors."""
        return self.__dict__ | {"_known": {}}

    def __call__(self, row: dict[str, Any]) -> Any:
        """Returns the encoded row, with its length; for a pack the list of its encoded rows."""
        return encode_packs(row, self.packing_length, self._encode)

    def _encode(self, row: dict[str, Any]) -> Any:
        from swift.template import MaxLengthError

        standard = row if self.prepared else self._standardise(row)
        try:
            return self.template.encode(standard, return_length=True)
        except MaxLengthError as cause:
            raise SkipSample(str(cause)) from cause
        except Exception as cause:
            raise_if_short(cause)
            if not (columns := ", ".join(name for name, value in row.items() if _has_bytes(value))):
                raise
            kind, reason = self.template.template_meta.template_type, f"{type(cause).__name__}: {cause!s:.300}"
            raise ValueError(f"template {kind} cannot encode this row, with bytes in {columns}: {reason}") from cause

    def _standardise(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns the row after ms-swift's preprocessing."""
        names = tuple(row)
        if names not in self._known:
            self._known[names] = self._choose(names)
        preprocessor, renamed = self._known[names]
        values = {renamed.get(name, name): [value] for name, value in row.items()}
        for name, (value,) in values.items():
            if name.endswith(_MEDIA) and _has_bytes(value):
                values[name] = [_of_bytes(value, name.endswith("images"))]
        if "solution" in row:
            # Under this name ms-swift keeps it through the preprocessing, which would take it for the response.
            values["__#solution"] = [row["solution"]]
        batch = preprocessor.batched_preprocess(values, strict=True, ignore_max_length_error=False)
        counts = {len(made) for made in batch.values()}
        if counts == {0} or not batch:
            raise SkipSample("ms-swift's preprocessing drops this row")
        if counts != {1}:
            raise ValueError(f"ms-swift's preprocessing makes {max(counts)} samples of this row, only one is supported")
        kept = batch if self.keep_unused else preprocessor.standard_keys
        return {name: made[0] for name, made in batch.items() if name in kept}

    def _choose(self, names: tuple[str, ...]) -> tuple[Any, dict[str, str]]:
        """Returns ms-swift's preprocessor for rows with these columns, and how to rename their columns for it."""
        from swift.dataset import AutoPreprocessor, RowPreprocessor

        rename = RowPreprocessor.safe_rename_columns
        columns = rename(_Columns({name: name for name in names}), self.columns or {})
        preprocessor = AutoPreprocessor()._get_preprocessor(columns)
        columns = rename(columns, preprocessor.origin_columns)
        if self.auto_columns:
            columns = rename(columns, preprocessor.columns)
        return preprocessor, {was: now for now, was in columns.features.items() if now != was}


def _has_bytes(value: Any) -> bool:
    return any(isinstance(one, bytes) for one in values_in(value))


def _of_bytes(value: Any, image: bool) -> Any:
    """Returns media of a column, some of which are `bytes` or ``{"bytes": …}``, in the form that templates take."""
    if isinstance(value, list):
        return [_of_bytes(one, image) for one in value]
    media = value if isinstance(value, dict) else {"bytes" if isinstance(value, bytes) else "path": value}
    data, path = media.get("bytes"), media.get("path")
    if image:
        return {"bytes": data, "path": path}
    return path if data is None else data_uri(data)


def data_uri(media: bytes) -> str:
    """Returns media as text, which all templates take.

    The type is that of an image: frames of a video must have it, readers of audio and video ignore it.
    """
    return f"data:image;base64,{base64.b64encode(media).decode()}"


@dataclass
class _Columns:
    """The columns of a row, new name to original name, with the interface of a Hugging Face data set for renaming."""

    features: dict[str, str]

    def rename_columns(self, mapping: dict[str, str]) -> _Columns:
        return _Columns({mapping.get(now, now): was for now, was in self.features.items()})


def encoder_of(args: Any, template: Any, most: int | None = None) -> RowEncoder:
    """Returns the encoder of raw rows by ms-swift's arguments; `most` is the maximum number of tokens of a pack."""
    return RowEncoder(template, **row_options(args), keep_unused=not args.remove_unused_columns, packing_length=most)


def has_packs(packing: bool, reader: StreamReader) -> bool:
    """Returns whether the rows of a stream are packs, by one of them; waits for it. Refuses packs without packing."""
    packed, samples = False, reader.wait_for(1).samples
    # Errors of the row itself are reported when it is read.
    with contextlib.suppress(LazyShardError):
        try:
            line = reader.line(0)
        except ChunkRetired:
            line = reader.line(samples - 1)
        packed = samples > 0 and decode_pack(parse_row(line)) is not None
    if packed and not packing:
        raise refused("packing", f"and --dataset {reader.directory}: {_mismatch(packed, packing)}")
    return packed


def encode_packs(row: dict[str, Any], most: int | None, encode_row: Callable[[dict[str, Any]], Any]) -> Any:
    """Returns an encoded row, or a list for a pack of at most `most` tokens; skips a pack if one of its rows is."""
    packed = decode_pack(row)
    if (wrong := _mismatch(packed is not None, most is not None)) is not None:
        raise ValueError(wrong)
    if packed is None or most is None:
        return encode_row(row)
    samples = []
    for number, inner in enumerate(packed.rows):
        try:
            samples.append(encode_row(inner))
        except Exception as cause:
            raise_if_short(cause)
            skips = isinstance(cause, SkipSample)
            why = f"row {number} of its pack: {'' if skips else f'{type(cause).__name__}: '}{cause}"
            raise (SkipSample if skips else ValueError)(why) from cause
    lengths = [sum(sample["lengths"]) for sample in samples]
    if sum(lengths) > most:
        there = f"{lengths} as encoded here, {packed.lengths} as packed: measure with this template"
        raise ValueError(f"its pack has {sum(lengths)} tokens, more than the {most} of --packing_length: {there}")
    return samples


def _mismatch(is_pack: bool, packing: bool) -> str | None:
    """Returns the error if packs are used without ``--packing``, or other rows with it."""
    if is_pack and not packing:
        return "its rows are packs (lazyshard-producer run --pack): use --packing true"
    instead = "or omit --packing; with --padding_free true a micro batch is concatenated without padding"
    return None if is_pack == packing else f"its rows are not packs: produce it with --pack TOKENS, {instead}"


def encoders(directories: Sequence[str], template: Any, raw: Encode, most: int | None = None) -> tuple[Encode, ...]:
    """Returns the encoder of each stream, `raw` for raw rows; sets up the template for lists of documents."""
    found: list[Encode] = []
    others, apart = [], bool(getattr(template, "padding_free", False))
    for directory in directories:
        manifest = read_manifest(stream_path(directory), None)
        encoding = None if manifest is None else manifest.encoding
        form = None if encoding is None else encoding.get("form")
        others += [] if form == "split" else [directory]
        found.append(raw if encoding is None else EncodedRows(most, form, apart=apart))
        if encoding is not None:
            _check_encoding(directory, encoding, fingerprint(template))
    if apart and len(others) < len(directories):
        if others:
            raise refused("padding_free", f"true: sequences blend with sequences only, not {', '.join(others)}")
        template.packing = True
    return tuple(found)


@dataclass(eq=False)
class EncodedRows:
    """Converts encoded rows to results of the template; with `apart`, "split" rows to lists of documents."""

    packing_length: int | None = None
    form: Any = None
    apart: bool = False

    def __call__(self, row: dict[str, Any]) -> Any:
        """Returns the sample; for a pack a list of its samples, for a sequence, with `apart`, of its documents."""
        sample = encode_packs(row, self.packing_length, unpack)
        if self.form == "split":
            return _documents(sample) if self.apart else _begun(sample)
        if self.form == "pad":
            # All tokens form one row, of which the last ones have no label: positions follow from `length`.
            sample.pop(ATTENTION_MASK, None)
            sample |= _size(len(sample[INPUT_IDS]))
        return sample


def _size(tokens: int) -> dict[str, Any]:
    return {"length": tokens, "lengths": [tokens]}


def _begun(sample: dict[str, Any]) -> dict[str, Any]:
    """Removes the first label: ms-swift rolls labels, so the last token would be trained to predict it."""
    if sample.get(LABELS):
        sample[LABELS][0] = NO_LABEL
    return sample


def _documents(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the documents of a sequence, or parts of them, as samples with positions from 0."""
    names = [name for name in (INPUT_IDS, LABELS) if sample.get(name)]
    starts = [place for place, position in enumerate(sample[POSITION_IDS]) if position == 0]
    bounds = itertools.pairwise([*starts, len(sample[POSITION_IDS])])
    return [_begun({name: sample[name][a:b] for name in names} | _size(b - a)) for a, b in bounds]


def _check_encoding(directory: str, stream: Encoding, own: Encoding) -> None:
    """Refuses rows that were encoded differently than this run would encode them, listing all differences."""
    found = differences(stream, own, leave_out=_LEFT_OUT.get(str(stream.get("form")), _OF_ROWS))
    why = f"differently than this run would encode them: {'; '.join(found)} (there: the stream). Use its settings"
    if stream.get("kind") != own.get("kind"):
        found = [str(stream.get("function", stream.get("kind")))]
        why = f"by {found[0]}, not by ms-swift's template: publish raw rows"
    if found:
        raise refused("dataset", f"{directory}: its rows were encoded {why}, or produce it again with --encode swift")


def open_encoder(
    model: str, template: str | None, max_length: int | None, options: Sequence[tuple[str, str]]
) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], Encoding]:
    """Returns a function that encodes a row as ms-swift would before training it, and the facts of the encoding.

    ms-swift's own parser and defaults process the arguments, without loading a model's weights. In addition to its
    options there is `mode`, "train" or "rlhf".
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from swift.arguments import BaseArguments
        from swift.utils import parse_args
    except ImportError as cause:
        raise SettingsRefused(f"swift needs ms-swift {ms_swift.needed()}: {cause}") from cause
    given = dict(options)
    mode = given.pop("mode", "train")
    if mode not in ("train", "rlhf"):
        raise SettingsRefused(f"mode must be train, or rlhf for DPO and similar, got {mode!r}", argument="mode")
    asked = {"model": model, "template": template, "max_length": max_length, **given}
    flags = [text for name, value in asked.items() if value is not None for text in (f"--{name}", str(value))]
    args, left = parse_args(BaseArguments, flags)
    if left:
        raise SettingsRefused(f"ms-swift has no option {left[0]} for encoding", argument=left[0])
    if args.truncation_strategy == "split":
        raise refused("truncation_strategy", "split makes several samples of a row: split rows with --transform")
    made = args.get_template()
    if made.use_model:
        # Of the model such templates use methods and settings, no weights: ms-swift's own export has none either.
        with torch.device("meta"):
            made.model, _ = args.get_model_processor(return_dummy_model=True)
    made.set_mode(mode)
    encoder = encoder_of(args, made)
    return lambda row: pack(encoder(row)), of_producer(made, **row_options(args))


def pack(encoded: dict[str, Any]) -> dict[str, Any]:
    """Converts an encoded sample to a row that can be published."""
    row: dict[str, Any] = {}
    for name, value in encoded.items():
        try:
            if type(name) is not str:
                raise TypeError("a key that is not a str")
            # One or two numbers are shorter as they are.
            row |= {name: value} if name.endswith(("length", "lengths")) else _pack({name: value})
        except TypeError as cause:
            raise TypeError(f"the template returned {cause} at {name!r:.80}, which no row can hold") from cause
    return row


def _pack(value: dict[str, Any]) -> Any:
    with contextlib.suppress(TypeError):
        return tensors.to_stored(value)
    # A row drops the additional attributes of a subclass and the gradient of a tensor.
    return tensors.to_stored(_plain(value))


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
    """Restores an encoded sample from a row; tensors share the memory of the row."""
    return {name: tensors.from_stored(value) for name, value in row.items()}


def fingerprint(template: Any) -> dict[str, Any]:
    """Returns the facts of an ms-swift template, in its training mode."""
    meta, processor = template.template_meta, getattr(template, "processor", None)
    # The texts around messages; the template's class and functions are ms-swift's, whose version is a fact.
    names = {field.name for field in dataclasses.fields(meta)} if dataclasses.is_dataclass(meta) else set()
    texts = {name: value for name in names - {"default_system"} if is_plain(value := getattr(meta, name, None))}
    # The parts that convert images and sound to numbers.
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
    attributes = {name.removeprefix("_"): getattr(template, name, None) for name in _ATTRIBUTES.split()}
    return facts | {name: value if type(value) in PLAIN else str(value) for name, value in attributes.items()}


def is_plain(value: Any) -> bool:
    """Returns whether a setting of a template is a plain value, or a list of these."""
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else type(value) in PLAIN


def of_producer(template: Any, columns: Any, auto_columns: bool) -> dict[str, Any]:
    """Returns the facts of a producer's encoding with `RowEncoder`."""
    mapping = orjson.dumps(columns, option=orjson.OPT_SORT_KEYS).decode() if columns else None
    return fingerprint(template) | {"columns": mapping, "auto_columns": auto_columns}


def row_options(args: Any) -> dict[str, Any]:
    """Returns the column options of ms-swift's arguments."""
    columns = args.columns if isinstance(args.columns, dict) else None
    return {"columns": columns, "auto_columns": not getattr(args, "disable_auto_column_mapping", False)}


def _tokenizer(template: Any) -> Any:
    """Returns everything that decides the tokenization, independent of where and how its files were saved."""
    tokenizer = template.tokenizer
    chat = getattr(tokenizer, "chat_template", None) if template.template_backend == "jinja" else None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        added = {str(number): str(token) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        return {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab(), "added": added, "chat": chat}
    # Padding and truncation of the last batch are state, not rules.
    parts = orjson.loads(backend.to_str()).items()
    rules = {name: value for name, value in parts if name not in ("padding", "truncation")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return {"rules": rules, "special": special, "chat": chat}


def content(name: str) -> str:
    """Returns a digest of a file; its name if it cannot be read."""
    found = xxhash.xxh3_64()
    with contextlib.suppress(OSError), open(name, "rb") as file:
        while block := file.read(2**20):
            found.update(block)
        return found.hexdigest()
    return name


def digest(value: Any) -> str:
    """Returns the 64-bit XXH3 of a value as JSON with sorted keys, in 16 hexadecimal digits."""
    data = orjson.dumps(value, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return xxhash.xxh3_64_hexdigest(data)


def packing_length(args: Any) -> int | None:
    """Returns the maximum number of tokens of a pack; None if samples are not packed."""
    if not getattr(args, "packing", False):
        return None
    length: int | None = getattr(args, "packing_length", None) or args.max_length
    if length is None:
        raise refused("packing", "true needs the maximum number of tokens of a pack: pass --packing_length N")
    return length
