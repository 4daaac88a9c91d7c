"""Rows as tokens: encoded by ms-swift's template or by a function of the user's, taken out, padded.

    encode(row)   -> a dict; numpy arrays in it, at any depth, go to the side file, everything else is JSON

Its integer `length` is the row's length in tokens, if it has one; one of numpy's integers becomes a plain one. What
decides about the encoding is told as plain facts, which the stream's manifest keeps. A function of the user's has its
name for one, and may tell more in an attribute `fingerprint`, a dict. ms-swift is known in `lazyshard_swift` alone,
which is named here and not imported.

A row that is cut or padded has `input_ids`, whole numbers in a list or an array of its encoder's, and perhaps `labels`,
as many.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.errors import LazyShardError, RowInvalid, SkipSample
from lazyshard.format.arrays import fill_row, pack_row
from lazyshard.format.batch import EncodedRow
from lazyshard.format.records import Encoding, check_encoding
from lazyshard.format.row import encode_row
from lazyshard.memory import loads, raise_if_short
from lazyshard.plan.sequences import ATTENTION_MASK, INPUT_IDS, LABELS, POSITION_IDS, pad_tokens, tokens_of
from lazyshard_producer.configuration.settings import SWIFT, EncodingSettings, PadSettings, Settings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.opening import stream_form
from lazyshard_producer.position import plain_name
from lazyshard_producer.user_functions import load_function, name_error, name_value

_SWIFT_OPENER: Final = "lazyshard_swift.rows:open_encoder"
"""Takes model, template, max_length and options; returns a function of a row, and the encoding."""

_VALUE_CHARACTERS: Final = 120
"""So much of a value is told where it is no row at all."""

MAX_TOKENS: Final = 2**32 - 1
"""The longest row that a seal can tell of."""

_BESIDE: Final = ("loss_mask", "loss_scale", "token_type_ids")
"""Keys under which rows hold something else for each token."""

_REPLACED: Final = (INPUT_IDS, LABELS, POSITION_IDS, ATTENTION_MASK)
"""Keys of which sequences have their own."""

Tokens = Mapping[str, npt.NDArray[np.int64]]


class ReadyEncoder:
    """An encoder that is ready.

    Attributes:
        encoding: what it encodes with.
    """

    def __init__(self, function: Callable[[dict[str, Any]], Any], encoding: Encoding) -> None:
        self._function = function
        self.encoding = encoding

    def encode(self, row: dict[str, Any]) -> EncodedRow:
        """Returns an encoded row.

        Raises:
            RowInvalid: the encoder raised, or returned what cannot be published.
        """
        found = self._call(row)
        try:
            if not isinstance(found, Mapping):
                raise refuse(f"--encode returned {name_value(found, _VALUE_CHARACTERS)}, expected a dict")
            row = found if isinstance(found, dict) else dict(found)
            length = row.get("length")
            if isinstance(length, np.integer):
                # The number of an array's length: a whole number to whoever wrote it.
                length = int(length)
                row = {**row, "length": length}
            tokens = _length(length, row.get("input_ids"))
            packed = pack_row(row)
        except RowInvalid as cause:
            reason = cause.reason or str(cause)
            raise (cause if reason.startswith("--") else refuse(f"--encode made what is no row: {reason}")) from cause
        return EncodedRow(packed.line, packed.arrays, tokens)

    def _call(self, row: dict[str, Any]) -> Any:
        try:
            return self._function(row)
        except KeyboardInterrupt:
            raise
        except SkipSample as why:
            raise refuse(f"--encode makes no sample of this row: {why}") from why
        except BaseException as error:
            # SystemExit too: it would end the run as if all were done.
            raise refuse_raised("--encode", error) from error


def refuse_raised(option: str, error: BaseException) -> RowInvalid:
    """Returns the refusal of a row for which a function of the user's has raised; lack of memory is raised anew."""
    raise_if_short(error)
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    where = f" ({os.path.basename(frame.f_code.co_filename)}:{line})"
    return refuse(f"{option} raised {name_error(error)}{where}")


class Form(NamedTuple):
    """What the rows of a stream are.

    Attributes:
        arrays: whether they may hold arrays.
        encoding: what they are encoded with; None where they are not.
        carried: whether rows of the sources may hold arrays.
    """

    arrays: bool
    encoding: Encoding | None
    carried: bool = False


def form_of(settings: Settings) -> Form:
    """Returns what the rows of a run will be, by its options, and by the streams among its sources.

    Raises:
        SettingInvalid: the encoder cannot be had; or rows would come together that are encoded in different ways, or
            encoded twice.
        SourceRefused: a stream among the sources cannot be opened.
    """
    streams = [stream_form(source) for source in settings.sources]
    arrays = any(found is not None and found[0] for found in streams)
    encodings = [None if found is None else found[1] for found in streams]
    encoded = next((number for number, encoding in enumerate(encodings) if encoding is not None), None)
    if settings.encoding is not None:
        if encoded is not None:
            name = plain_name(settings.sources[encoded].path)
            reason = f"the rows of {name} are encoded already; leave it out, or take the rows before they were encoded"
            raise SettingInvalid(f"--encode: {reason}", option="--encode")
        return Form(True, load_encoder(settings.encoding).encoding, arrays)
    if encoded is None or settings.transform is not None or settings.columns:
        # What a function has made of encoded rows is no longer what the encoder made.
        return Form(arrays, None, arrays)
    encoding = encodings[encoded]
    for number, other in enumerate(encodings):
        if other != encoding:
            names = [plain_name(settings.sources[index].path) for index in (encoded, number)]
            raise SettingInvalid(
                f"--source: the rows of {names[0]} are encoded otherwise than those of {names[1]}, and all rows of a "
                f"stream are encoded alike; make a stream of each",
                option="--source",
            )
    assert encoding is not None
    cut = "split" if settings.split else "pad" if settings.pad else None
    return Form(arrays, encoding if cut is None else {**encoding, "form": cut}, arrays)


@functools.cache
def load_encoder(settings: EncodingSettings) -> ReadyEncoder:
    """Returns the encoder; loading ms-swift takes seconds, so once in a process.

    Raises:
        SettingInvalid: it cannot be had.
    """
    # What is cut or padded is no longer what an encoder has made, and its readers have to know that.
    form = {} if settings.form is None else {"form": settings.form}
    if settings.encode != SWIFT:
        function = load_function(settings.encode, "--encode")
        return ReadyEncoder(function, _facts({"kind": "function", "function": settings.encode, **form}, function))
    function, encoding = open_swift(settings, "--encode")
    return ReadyEncoder(function, check_encoding({**encoding, **form}))


def open_swift(settings: EncodingSettings, option: str) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], Encoding]:
    """Returns what encodes a row as ms-swift would before training it, and what it encodes with.

    Raises:
        SettingInvalid: it cannot be had, which is what this option has asked for.
    """
    opener = load_function(_SWIFT_OPENER, option)
    try:
        function, encoding = opener(settings.model, settings.template, settings.max_length, settings.options)
    except KeyboardInterrupt:
        raise
    except LazyShardError as cause:
        raise SettingInvalid(f"{option}: {cause}", option=option) from cause
    except BaseException as error:
        # SystemExit too, with which parsers of options end.
        raise SettingInvalid(f"{option}: ms-swift raised {name_error(error)}", option=option) from error
    return function, encoding


def _facts(own: dict[str, Any], function: Callable[..., Any]) -> Encoding:
    told = getattr(function, "fingerprint", {})
    if isinstance(told, Mapping) and (taken := [name for name in own if name in told]):
        reason = f"its fingerprint has a fact {taken[0]!r}, which lazyshard tells itself: give yours another name"
        raise SettingInvalid(f"--encode: {own['function']}: {reason}", option="--encode")
    try:
        return check_encoding({**told, **own}, f"the attribute fingerprint of {own['function']}")
    except TypeError as cause:
        reason = f"its fingerprint is a dict of plain values, got {name_value(told, _VALUE_CHARACTERS)}"
        raise SettingInvalid(f"--encode: {own['function']}: {reason}", option="--encode") from cause
    except ValueError as cause:
        raise SettingInvalid(f"--encode: {cause}", option="--encode") from cause


def _length(length: Any, ids: Any) -> int | None:
    if type(length) is not int:
        return None
    if not 0 <= length <= MAX_TOKENS:
        raise refuse(f"--encode returned a length of {length}, expected one from 0 to {MAX_TOKENS}")
    flat = ids.ndim == 1 if isinstance(ids, np.ndarray) else isinstance(ids, list) and ids and type(ids[0]) is int
    if flat and len(ids) > length:
        raise refuse(f"--encode returned a length of {length}, but {len(ids)} input_ids")
    return length


def read_document(row: dict[str, Any], line: bytes | EncodedRow) -> tuple[EncodedRow, int]:
    """Returns the tokens of a row, and nothing else of it, in the form in which they travel; and how many these are.

    The same tokens have the same form, however they were written. `row` is as it was made, where it is not encoded;
    `line` is the row as it would be published by itself.

    Raises:
        RowInvalid: it holds no tokens, or something that goes with them and would be lost.
    """
    fields = document_of(line) if isinstance(line, EncodedRow) else row
    tokens = _tokens("--split", fields, _BESIDE)
    if isinstance(line, EncodedRow):
        # Of images, for instance: the tokens that stand for them would be trained without.
        others = [name for name, value in fields.items() if name not in _REPLACED and _holds_array(value)]
        if others:
            raise refuse(f"--split: there is an array under {others[0]!r:.80}, which would be lost")
    packed = pack_row({name: narrow(values) for name, values in tokens.items()})
    count = len(tokens[INPUT_IDS])
    return EncodedRow(packed.line, packed.arrays, count), count


def document_of(row: EncodedRow) -> dict[str, Any]:
    """Returns what an encoded row holds, arrays as views of its bytes; of what `read_document` made, the tokens."""
    found: dict[str, Any] = loads(row.line)
    fill_row(found, np.frombuffer(row.arrays, np.uint8))
    return found


def pad_row(settings: PadSettings, row: dict[str, Any], line: bytes | EncodedRow) -> tuple[bytes | EncodedRow, int]:
    """Returns a row with its tokens padded, an attention mask and its length, and how many tokens it has itself.

    What else it holds stays; `row` and `line` are as for `read_document`.

    Raises:
        RowInvalid: it holds no tokens, more than there is room for, or something that goes with each of them.
    """
    fields = document_of(line) if isinstance(line, EncodedRow) else row
    tokens = _tokens("--pad", fields, (*_BESIDE, POSITION_IDS))
    count = len(tokens[INPUT_IDS])
    if count > settings.size:
        raise refuse(f"--pad: {count} tokens, more than the {settings.size} to which rows are padded")
    return write_tokens(
        pad_tokens(tokens, settings.size, settings.token), count, arrays=isinstance(line, EncodedRow), of=fields
    ), count


def write_tokens(
    tokens: Tokens, length: int, *, arrays: bool, of: Mapping[str, Any] | None = None
) -> bytes | EncodedRow:
    """Returns a row that holds tokens, as it is published.

    Args:
        tokens: by name.
        length: what it says that it has, under `length`, and in the seal.
        arrays: whether as arrays beside the line, or as lists in it.
        of: what else it holds.

    Raises:
        RowInvalid: that cannot be written.
    """
    if not arrays:
        return encode_row(
            {**(of or {}), **{name: values.tolist() for name, values in tokens.items()}, "length": length}
        )
    packed = pack_row({**(of or {}), **{name: narrow(values) for name, values in tokens.items()}, "length": length})
    return EncodedRow(packed.line, packed.arrays, length)


def narrow(values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Returns the same numbers as int32, which they fit, as `tokens_of` has seen to."""
    return values.astype(np.int32)


def _tokens(option: str, fields: dict[str, Any], beside: tuple[str, ...]) -> dict[str, npt.NDArray[np.int64]]:
    for name in beside:
        if fields.get(name) is not None:
            raise refuse(f"{option}: {name!r} holds something for each token, which would no longer fit; leave it out")
    mask = fields.get(ATTENTION_MASK)
    if mask is not None and not _is_full(mask):
        raise refuse(
            f"{option}: {ATTENTION_MASK!r} leaves out some tokens of the row, all of which would be attended to; leave "
            f"out these tokens and the mask"
        )
    try:
        tokens = tokens_of(fields)
    except ValueError as cause:
        raise refuse(f"{option}: {cause}") from cause
    if not len(tokens[INPUT_IDS]):
        raise refuse(f"{option}: input_ids are empty, expected a token at least")
    return tokens


def _is_full(mask: Any) -> bool:
    try:
        return bool(np.all(np.asarray(mask) == 1))
    except (TypeError, ValueError):
        return False


def _holds_array(value: Any) -> bool:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, np.ndarray):
            return True
        if isinstance(one, dict):
            pending.extend(one.values())
        elif isinstance(one, list):
            pending.extend(one)
    return False


def refuse(reason: str) -> RowInvalid:
    """Returns the refusal of a row for a reason."""
    return RowInvalid(f"not a row: {reason}", reason=reason)
