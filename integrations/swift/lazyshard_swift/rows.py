"""From a row of the stream to what the trainer takes: ms-swift's own preprocessing, then its template, row by row.

On the ordinary path ms-swift first maps the whole data set (columns renamed, Alpaca and ShareGPT rows turned into
`messages`) and encodes afterwards; here the same classes are applied to one row at a time. Of an encoded stream the
template is not asked, but compared with what the rows were encoded with.

With ``--packing true`` the rows are packs already (`lazyshard-producer run --pack`), which become lists of encoded rows
like those of ms-swift's own `PackingDataset`: its collator puts the rows of a micro batch one behind the other, each
with positions from 0, from which the borders between them (`cu_seqlens`) follow. With ``--padding_free`` the same is
made of sequences that were cut (`--split`). (ms-swift 4.6: `swift/dataset/packing.py`, `swift/template/base.py`.)
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from lazyshard import LazyShardError, StreamReader
from lazyshard.errors import ChunkRetired, SkipSample
from lazyshard.format.batch import decode_pack
from lazyshard.format.records import Encoding, differences
from lazyshard.format.row import parse_row
from lazyshard.memory import raise_if_short
from lazyshard.plan.sequences import ATTENTION_MASK, INPUT_IDS, LABELS, NO_LABEL, POSITION_IDS
from lazyshard.store.urls import stream_path
from lazyshard.stream.listing import read_manifest
from lazyshard_swift import ms_swift
from lazyshard_swift.encoding import OF_ROWS, fingerprint, of_producer, pack, row_options, unpack
from lazyshard_swift.errors import SettingsRefused, refused

Encode: TypeAlias = Callable[..., Any]

FORM: Final = "form"
"""The fact that says which rows the producer has cut, "split", or padded, "pad"."""
SPLIT: Final = "split"
PAD: Final = "pad"

_LEFT_OUT: Final = {SPLIT: (FORM, "max_length", "truncation_strategy"), PAD: (FORM,)}
"""By form: what need not be alike. How long a row might be before it was cut is nothing for who trains the pieces."""

_CORES: Final = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
_ENVIRONMENT: Final = _CORES | {"LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}
"""Of the producer's process and its workers, where the user has not said otherwise.

There are as many processes as are wanted, and each has one core; each would tell the same of what is loaded.
"""

_MODES: Final = ("train", "rlhf")
"""Modes of a template in which it encodes for training: `mode` is `rlhf` for DPO and its like."""


@dataclass(eq=False)
class RowEncoder:
    """Turns rows into encoded samples by ms-swift's template; an `encode_fn` for `LazyShardedDataset`.

    Rows longer than ``--max_length``, which ms-swift drops from an ordinary data set, raise `SkipSample`. Packs of at
    most `packing_length` tokens become lists of encoded rows.
    """

    template: Any
    columns: dict[str, str] | None = None
    auto_columns: bool = True
    keep_unused: bool = False
    packing_length: int | None = None
    # Preprocessor and column names by the columns of a row: rows of a stream mostly have the same.
    _known: dict[tuple[str, ...], tuple[Any, dict[str, str]]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the preprocessors behind."""
        return self.__dict__ | {"_known": {}}

    def __call__(self, row: dict[str, Any]) -> Any:
        """Returns the encoded row, with its length; of a pack the list of its rows, encoded."""
        return encode_packs(row, self.packing_length, self._encode)

    def _encode(self, row: dict[str, Any]) -> Any:
        from swift.template import MaxLengthError

        try:
            return self.template.encode(self._standardise(row), return_length=True)
        except MaxLengthError as cause:
            raise SkipSample(str(cause)) from cause

    def _standardise(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns the row as ms-swift's preprocessing leaves it."""
        names = tuple(row)
        if names not in self._known:
            self._known[names] = self._choose(names)
        preprocessor, renamed = self._known[names]
        values = {renamed.get(name, name): [value] for name, value in row.items()}
        if "solution" in row:
            # ms-swift keeps it under this name past the preprocessing that takes it for the response.
            values["__#solution"] = [row["solution"]]
        batch = preprocessor.batched_preprocess(values, strict=True, ignore_max_length_error=False)
        counts = {len(made) for made in batch.values()}
        if counts == {0} or not batch:
            raise SkipSample("ms-swift's preprocessing drops this row")
        if counts != {1}:
            raise ValueError(f"ms-swift's preprocessing makes {max(counts)} samples of this row; a row is one sample")
        kept = batch if self.keep_unused else preprocessor.standard_keys
        return {name: made[0] for name, made in batch.items() if name in kept}

    def _choose(self, names: tuple[str, ...]) -> tuple[Any, dict[str, str]]:
        """Returns ms-swift's preprocessor for rows with these columns, and how their columns are renamed for it."""
        from swift.dataset import AutoPreprocessor, RowPreprocessor

        rename = RowPreprocessor.safe_rename_columns
        columns = rename(_Columns({name: name for name in names}), self.columns or {})
        preprocessor = AutoPreprocessor()._get_preprocessor(columns)
        columns = rename(columns, preprocessor.origin_columns)
        if self.auto_columns:
            columns = rename(columns, preprocessor.columns)
        return preprocessor, {was: now for now, was in columns.features.items() if now != was}


@dataclass
class _Columns:
    """The columns of a row, present name to name in the row, as a Hugging Face data set of which they are renamed."""

    features: dict[str, str]

    def rename_columns(self, mapping: dict[str, str]) -> _Columns:
        return _Columns({mapping.get(now, now): was for now, was in self.features.items()})


def encoder_of(args: Any, template: Any, most: int | None = None) -> RowEncoder:
    """Returns the encoder of raw rows by ms-swift's arguments; `most` are the tokens of a pack."""
    return RowEncoder(template, **row_options(args), keep_unused=not args.remove_unused_columns, packing_length=most)


def check_packs(packing: bool, reader: StreamReader, samples: int) -> None:
    """Refuses a stream of packs without ``--packing``, and one of other rows with it, as far as there are rows yet."""
    if not samples:
        return
    try:
        try:
            line = reader.line(0)
        except ChunkRetired:
            line = reader.line(samples - 1)
        is_pack = decode_pack(parse_row(line)) is not None
    except LazyShardError:
        # Whoever reads on there will say so.
        return
    wrong = _mismatch(is_pack, packing)
    if wrong is not None:
        raise refused("packing", f"--dataset {reader.directory}: {wrong}")


def encode_packs(row: dict[str, Any], most: int | None, encode_row: Callable[[dict[str, Any]], Any]) -> Any:
    """Returns what the collator takes for a row: it encoded, or for a pack of at most so many tokens a list of them.

    A pack of which a row is to be skipped is left out whole.
    """
    pack = decode_pack(row)
    wrong = _mismatch(pack is not None, most is not None)
    if wrong is not None:
        raise ValueError(wrong)
    if pack is None or most is None:
        return encode_row(row)
    samples = []
    for number, inner in enumerate(pack.rows):
        try:
            samples.append(encode_row(inner))
        except Exception as cause:
            raise_if_short(cause)
            if isinstance(cause, SkipSample):
                raise SkipSample(f"row {number} of its pack: {cause}") from cause
            raise ValueError(f"row {number} of its pack: {type(cause).__name__}: {cause}") from cause
    lengths = [sum(sample["lengths"]) for sample in samples]
    if sum(lengths) > most:
        there = f"its rows have {lengths} as encoded here, and {pack.lengths} as they were packed"
        text = f"its pack has {sum(lengths)} tokens, more than the {most} of --packing_length: {there}"
        raise ValueError(f"{text}. Measure them with the template that is trained")
    return samples


def _mismatch(is_pack: bool, packing: bool) -> str | None:
    """Returns what is wrong where packs and ``--packing`` do not go together."""
    if is_pack and not packing:
        return "its rows are packs (lazyshard-producer run --pack): give --packing true"
    instead = "or leave out --packing; with --padding_free true a micro batch is concatenated without padding"
    produce = "produce the stream with `lazyshard-producer run --pack TOKENS`"
    return None if is_pack == packing else f"its rows are no packs: {produce}, {instead}"


def encoders(
    directories: Sequence[str], template: Any, raw: Encode, packing_length: int | None = None
) -> tuple[Encode, ...]:
    """Returns what makes samples of the rows of each of these streams; of raw rows `raw` does.

    The template is told where samples are lists of documents.
    """
    found: list[Encode] = []
    forms: list[Any] = []
    apart = bool(getattr(template, "padding_free", False))
    for directory in directories:
        manifest = read_manifest(stream_path(directory), None)
        encoding = None if manifest is None else manifest.encoding
        if encoding is not None:
            _check_encoding(directory, encoding, fingerprint(template))
        forms.append(None if encoding is None else encoding.get(FORM))
        found.append(raw if encoding is None else EncodedRows(packing_length, forms[-1], apart=apart))
    if SPLIT in forms and apart:
        others = [directory for directory, form in zip(directories, forms, strict=True) if form != SPLIT]
        if others:
            why = "with --padding_free true sequences (lazyshard-producer run --split) are blended with sequences alone"
            way_out = f"{', '.join(others)} holds others: give --padding_free false"
            raise refused("padding_free", f"--dataset {' '.join(directories)}: {why}, and {way_out}")
        template.packing = True
    return tuple(found)


@dataclass(eq=False)
class EncodedRows:
    """Turns encoded rows into what the template has returned; an `encode_fn` for `LazyShardedDataset`.

    With `apart` a row whose form is "split" becomes the list of the documents in it.
    """

    packing_length: int | None = None
    form: Any = None
    apart: bool = False

    def __call__(self, row: dict[str, Any]) -> Any:
        """Returns the sample; of a pack the list of its samples, of a sequence that of its documents if asked for."""
        sample = encode_packs(row, self.packing_length, unpack)
        if self.form == SPLIT:
            return _documents(sample) if self.apart else _begun(sample)
        if self.form == PAD:
            # A row of all its tokens, of which the last ones have no label: positions go by `length`.
            sample.pop(ATTENTION_MASK, None)
            sample |= _size(len(sample[INPUT_IDS]))
        return sample


def _size(tokens: int) -> dict[str, Any]:
    return {"length": tokens, "lengths": [tokens]}


def _begun(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns tokens of which the first is nobody's label: ms-swift rolls labels, so the last one would predict it."""
    if sample.get(LABELS):
        sample[LABELS][0] = NO_LABEL
    return sample


def _documents(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the documents of a sequence, or parts of them, as samples; each has positions from 0."""
    names = [name for name in (INPUT_IDS, LABELS) if sample.get(name)]
    starts = [place for place, position in enumerate(sample[POSITION_IDS]) if position == 0]
    bounds = itertools.pairwise([*starts, len(sample[POSITION_IDS])])
    return [_begun({name: sample[name][a:b] for name in names} | _size(b - a)) for a, b in bounds]


def _check_encoding(directory: str, stream: Encoding, own: Encoding) -> None:
    """Refuses rows that were encoded otherwise than this run would encode them, naming all that differs."""
    why = None
    found = differences(stream, own, leave_out=(*OF_ROWS, *_LEFT_OUT.get(str(stream.get(FORM)), ())))
    if stream.get("kind") != own.get("kind"):
        kind = stream.get("function", stream.get("kind"))
        why = f"encoded by {kind}, not by ms-swift's template: produce it anew with --encode swift, or without"
    elif found:
        way_out = "Train with the settings of the stream, or produce it anew with those of this run"
        why = f"encoded otherwise than this run would encode them: {'; '.join(found)} (there: the stream). {way_out}"
    if why is not None:
        raise refused("dataset", f"--dataset {directory}: its rows were {why}")


def open_encoder(
    model: str, template: str | None, max_length: int | None, options: Sequence[tuple[str, str]]
) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], Encoding]:
    """Returns what encodes a row as ms-swift would before training it, and what it encodes with.

    Arguments are read by ms-swift's own parser and completed by its own defaults, without a model's weights. Besides
    ms-swift's own there is `mode` among the options, "train" or "rlhf".
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from swift.arguments import BaseArguments
        from swift.utils import parse_args
    except ImportError as cause:
        raise SettingsRefused(f"swift needs ms-swift {ms_swift.needed()}: {cause}") from cause
    given = dict(options)
    mode = given.pop("mode", _MODES[0])
    if mode not in _MODES:
        raise refused("mode", f"mode is one of {', '.join(_MODES)}, got {mode!r}")
    asked = {"model": model, "template": template, "max_length": max_length, **given}
    flags = [text for name, value in asked.items() if value is not None for text in (f"--{name}", str(value))]
    args, left = parse_args(BaseArguments, flags)
    if left:
        raise refused(left[0], f"ms-swift has no option {left[0]} for what it encodes with")
    if args.truncation_strategy == "split":
        name, way_out = "truncation_strategy", "split long rows with --transform, or choose delete, left or right"
        raise refused(name, f"{name} split makes several samples of one row: {way_out}")
    made = args.get_template()
    if made.use_model:
        kind = made.template_meta.template_type
        raise SettingsRefused(f"the template {kind} encodes with the model itself, so only training can do it")
    made.set_mode(mode)
    encoder = encoder_of(args, made)
    return lambda row: pack(encoder(row)), of_producer(made, **row_options(args))
