"""Encoding rows: by ms-swift's template, or by a function of the user's. What comes of a row goes out as raw bytes.

    encode(row)   -> a dict; numpy arrays in it, at any depth, go to the side file, everything else is JSON

Its integer `length` is the row's length in tokens, if it has one; one of numpy's integers becomes a plain one. What
decides about the encoding is told as plain facts, which the stream's manifest keeps. A function of the user's has its
name for one, and may tell more in an attribute `fingerprint`, a dict.

ms-swift is known in `lazyshard_swift` alone, which is named here and not imported.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from lazyshard.errors import LazyShardError, RowInvalid, SkipSample
from lazyshard.format import EncodedRow, Encoding, check_encoding
from lazyshard.format.arrays import pack_row
from lazyshard.memory import raise_if_short
from lazyshard_producer.configuration.setting_checks import SWIFT
from lazyshard_producer.configuration.settings import EncodingSettings, Settings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.opening import stream_form
from lazyshard_producer.position import plain_name
from lazyshard_producer.user_functions import load_function, name_error, name_value

_SWIFT_OPENER: Final = "lazyshard_swift.encoding:open_encoder"
"""Takes model, template, max_length and options; returns a function of a row, and the encoding."""

_MAX_TOKENS: Final = 2**32 - 1

_SHOWN: Final = 120


class Encoder:
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
                raise _refused(f"returned {name_value(found, _SHOWN)}, expected a dict")
            row = found if isinstance(found, dict) else dict(found)
            length = row.get("length")
            if isinstance(length, np.integer):
                # The number of an array's length: a whole number to whoever wrote it.
                length = int(length)
                row = {**row, "length": length}
            tokens = _tokens(length, row.get("input_ids"))
            packed = pack_row(row)
        except RowInvalid as cause:
            reason = cause.reason or str(cause)
            raise (cause if reason.startswith("--") else _refused(f"made what is no row: {reason}")) from cause
        return EncodedRow(packed.line, packed.arrays, tokens)

    def _call(self, row: dict[str, Any]) -> Any:
        try:
            return self._function(row)
        except KeyboardInterrupt:
            raise
        except SkipSample as why:
            raise _refused(f"makes no sample of this row: {why}") from why
        except BaseException as error:
            # SystemExit too: it would end the run as if all were done.
            raise_if_short(error)
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            where = f" ({os.path.basename(frame.f_code.co_filename)}:{line})"
            raise _refused(f"raised {name_error(error)}{where}") from error


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
def load_encoder(settings: EncodingSettings) -> Encoder:
    """Returns the encoder; loading ms-swift takes seconds, so once in a process.

    Raises:
        SettingInvalid: it cannot be had.
    """
    # What is cut or padded is no longer what an encoder has made, and its readers have to know that.
    form = {} if settings.form is None else {"form": settings.form}
    if settings.encode != SWIFT:
        function = load_function(settings.encode, "--encode")
        return Encoder(function, _facts({"kind": "function", "function": settings.encode, **form}, function))
    function, encoding = open_swift(settings, "--encode")
    return Encoder(function, check_encoding({**encoding, **form}))


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
        reason = f"its fingerprint is a dict of plain values, got {name_value(told, _SHOWN)}"
        raise SettingInvalid(f"--encode: {own['function']}: {reason}", option="--encode") from cause
    except ValueError as cause:
        raise SettingInvalid(f"--encode: {cause}", option="--encode") from cause


def _tokens(length: Any, ids: Any) -> int | None:
    if type(length) is not int:
        return None
    if not 0 <= length <= _MAX_TOKENS:
        raise _refused(f"returned a length of {length}, expected one from 0 to {_MAX_TOKENS}")
    flat = ids.ndim == 1 if isinstance(ids, np.ndarray) else isinstance(ids, list) and ids and type(ids[0]) is int
    if flat and len(ids) > length:
        raise _refused(f"returned a length of {length}, but {len(ids)} input_ids")
    return length


def _refused(what: str) -> RowInvalid:
    reason = f"--encode {what}"
    return RowInvalid(f"not a row: {reason}", reason=reason)
