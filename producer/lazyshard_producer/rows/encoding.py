"""Rows as tokens: encoded by ms-swift's template or by a function of the user's, taken out, padded, measured.

An encoder takes a row and returns a dict; numpy arrays in it, at any depth, go to the side file, all else is JSON. Its
integer `length` is the row's length in tokens. What decides about the encoding is told as plain facts, which the
stream's manifest keeps: a function's name, and what it tells in an attribute `fingerprint`. ms-swift is known in
`lazyshard_swift` alone, which is named here and not imported.
"""

from __future__ import annotations

import functools
import operator
import os
import reprlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from lazyshard.errors import LazyShardError, RowInvalid, SkipSample
from lazyshard.format.arrays import fill_row, pack_row
from lazyshard.format.batch import ADDED_LEVELS, EncodedRow
from lazyshard.format.records import Encoding, check_encoding
from lazyshard.format.row import encode_row
from lazyshard.lazy import name_error, name_value
from lazyshard.memory import loads, raise_if_short
from lazyshard.plan.sequences import ATTENTION_MASK, INPUT_IDS, LABELS, POSITION_IDS, pad_tokens, tokens_of
from lazyshard_producer.configuration.problems import FUNCTION
from lazyshard_producer.configuration.settings import SWIFT, EncodingSettings, MeasureSettings, PadSettings, Settings
from lazyshard_producer.errors import ExtraMissing, SettingInvalid, load_function
from lazyshard_producer.opening import stream_form
from lazyshard_producer.position import plain_name
from lazyshard_producer.sources.source import bad_row

_SWIFT_OPENER: Final = "lazyshard_swift.rows:open_encoder"
"""Takes model, template, max_length and options; returns a function of a row, and the encoding."""

_VALUE_CHARACTERS: Final = 120  # so much of a value is told where it is no row at all
_SHOWN: Final = 60  # characters of a key or a length that are told
MAX_TOKENS: Final = 2**32 - 1  # the longest row that a seal can tell of
_MAX_LEVELS: Final = 1024  # how deep readers nest
_BESIDE: Final = ("loss_mask", "loss_scale", "token_type_ids")
"""Keys under which rows hold something else for each token."""

_REPLACED: Final = (INPUT_IDS, LABELS, POSITION_IDS, ATTENTION_MASK)  # keys of which sequences have their own
Tokens = Mapping[str, npt.NDArray[np.int64]]


class _EncodeTask(NamedTuple):
    """An encoder that is ready, and what it encodes with."""

    function: Callable[[dict[str, Any]], Any]
    encoding: Encoding

    def encode(self, row: dict[str, Any]) -> EncodedRow:
        """Returns an encoded row. Raises RowInvalid where the encoder did, or returned what cannot be published."""
        found = call_user("--encode", self.function, row)
        try:
            if not isinstance(found, Mapping):
                raise bad_row(f"--encode returned {name_value(found, _VALUE_CHARACTERS)}, expected a dict")
            row = dict(found)
            length = row.get("length")
            if isinstance(length, np.integer):
                # The number of an array's length: a whole number to whoever wrote it.
                row["length"] = length = int(length)
            tokens, ids = length if type(length) is int else None, row.get("input_ids", ())
            if tokens is not None and not 0 <= tokens <= MAX_TOKENS:
                raise bad_row(f"--encode returned a length of {tokens}, expected one from 0 to {MAX_TOKENS}")
            listed = isinstance(ids, list) and ids and type(ids[0]) is int
            if tokens is not None and (listed or (isinstance(ids, np.ndarray) and ids.ndim == 1)) and len(ids) > tokens:
                raise bad_row(f"--encode returned a length of {tokens}, but {len(ids)} input_ids")
            packed = pack_row(row)
        except RowInvalid as cause:
            reason = cause.reason or str(cause)
            raise (cause if reason.startswith("--") else bad_row(f"--encode made what is no row: {reason}")) from cause
        return EncodedRow(*packed, tokens)


def call_user(option: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a function of the user's returns; what it raises, but lack of memory, refuses the row."""
    try:
        return function(*arguments)
    except (RowInvalid, KeyboardInterrupt):
        raise
    except SkipSample as why:
        raise bad_row(f"{option} makes no sample of this row: {why}") from why
    except BaseException as error:
        # SystemExit too: it would end the run as if all were done.
        raise_if_short(error)
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        where = f" ({os.path.basename(frame.f_code.co_filename)}:{line})"
        raise bad_row(f"{option} raised {name_error(error)}{where}") from error


def _setting(option: str, reason: str) -> SettingInvalid:
    return SettingInvalid(f"{option}: {reason}", option=option)


class Form(NamedTuple):
    """What the rows of a stream are: whether they may hold arrays, and what they are encoded with.

    `carried`: whether rows of the sources may hold arrays.
    """

    arrays: bool
    encoding: Encoding | None
    carried: bool = False


def form_of(settings: Settings) -> Form:
    """Returns what the rows of a run will be, by its options, and by the streams among its sources."""
    names = [plain_name(source.path) for source in settings.sources]
    streams = [stream_form(source) or (False, None) for source in settings.sources]
    arrays = any(holds for holds, _ in streams)
    pairs = [(name, encoding) for name, (_, encoding) in zip(names, streams, strict=True)]
    encoded = next(((name, encoding) for name, encoding in pairs if encoding is not None), None)
    if settings.encoding is not None:
        if encoded is not None:
            hint = "leave it out, or take the rows before they were encoded"
            raise _setting("--encode", f"the rows of {encoded[0]} are encoded already; {hint}")
        return Form(True, load_encoder(settings.encoding).encoding, arrays)
    if encoded is None or settings.transform is not None or settings.columns:
        # What a function has made of encoded rows is no longer what the encoder made.
        return Form(arrays, None, arrays)
    first, encoding = encoded
    for name, other in pairs:
        if other != encoding:
            alike = "and all rows of a stream are encoded alike; make a stream of each"
            raise _setting("--source", f"the rows of {first} are encoded otherwise than those of {name}, {alike}")
    cut = "split" if settings.split else "pad" if settings.pad else None
    return Form(arrays, encoding if cut is None else {**encoding, "form": cut}, arrays)


@functools.cache
def load_encoder(settings: EncodingSettings) -> _EncodeTask:
    """Returns the encoder; loading ms-swift takes seconds, so once in a process."""
    # What is cut or padded is no longer what an encoder has made, and its readers have to know that.
    form = {} if settings.form is None else {"form": settings.form}
    if settings.encode != SWIFT:
        function = load_function(settings.encode, "--encode")
        return _EncodeTask(function, _facts({"kind": "function", "function": settings.encode, **form}, function))
    function, encoding = open_swift(settings, "--encode")
    return _EncodeTask(function, check_encoding({**encoding, **form}))


def open_swift(settings: EncodingSettings, option: str) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], Encoding]:
    """Returns what encodes a row as ms-swift would before training it, and what it encodes with."""
    opener = load_function(_SWIFT_OPENER, option)
    try:
        function, encoding = opener(settings.model, settings.template, settings.max_length, settings.options)
    except KeyboardInterrupt:
        raise
    except LazyShardError as cause:
        raise _setting(option, str(cause)) from cause
    except BaseException as error:
        # SystemExit too, with which parsers of options end.
        raise _setting(option, f"ms-swift raised {name_error(error)}") from error
    return function, encoding


def _facts(own: dict[str, Any], function: Callable[..., Any]) -> Encoding:
    told = getattr(function, "fingerprint", {})
    if isinstance(told, Mapping) and (taken := [name for name in own if name in told]):
        reason = f"its fingerprint has a fact {taken[0]!r}, which lazyshard tells itself: give yours another name"
        raise _setting("--encode", f"{own['function']}: {reason}")
    try:
        return check_encoding({**told, **own}, f"the attribute fingerprint of {own['function']}")
    except TypeError as cause:
        reason = f"its fingerprint is a dict of plain values, got {name_value(told, _VALUE_CHARACTERS)}"
        raise _setting("--encode", f"{own['function']}: {reason}") from cause
    except ValueError as cause:
        raise _setting("--encode", str(cause)) from cause


def read_document(row: dict[str, Any], line: bytes | EncodedRow) -> tuple[EncodedRow, int]:
    """Returns the tokens of a row, and nothing else of it, in the form in which they travel; and how many these are.

    The same tokens have the same form, however they were written. `row` is as it was made, where it is not encoded;
    `line` is the row as it would be published by itself.
    """
    fields = document_of(line) if isinstance(line, EncodedRow) else row
    tokens = _tokens("--split", fields, _BESIDE)
    if isinstance(line, EncodedRow):
        # Of images, for instance: the tokens that stand for them would be trained without.
        others = [name for name, value in fields.items() if name not in _REPLACED and _holds_array(value)]
        if others:
            raise bad_row(f"--split: there is an array under {others[0]!r:.80}, which would be lost")
    count = len(tokens[INPUT_IDS])
    return EncodedRow(*pack_row({name: values.astype(np.int32) for name, values in tokens.items()}), count), count


def document_of(row: EncodedRow) -> dict[str, Any]:
    """Returns what an encoded row holds, arrays as views of its bytes; of what `read_document` made, the tokens."""
    found: dict[str, Any] = loads(row.line)
    fill_row(found, np.frombuffer(row.arrays, np.uint8))
    return found


def pad_row(settings: PadSettings, row: dict[str, Any], line: bytes | EncodedRow) -> tuple[bytes | EncodedRow, int]:
    """Returns a row with its tokens padded, an attention mask and its length, and how many tokens it has itself.

    What else it holds stays; `row` and `line` are as for `read_document`.
    """
    fields = document_of(line) if isinstance(line, EncodedRow) else row
    tokens = _tokens("--pad", fields, (*_BESIDE, POSITION_IDS))
    count = len(tokens[INPUT_IDS])
    if count > settings.size:
        raise bad_row(f"--pad: {count} tokens, more than the {settings.size} to which rows are padded")
    padded = pad_tokens(tokens, settings.size, settings.token)
    return write_tokens(padded, count, arrays=isinstance(line, EncodedRow), of=fields), count


def write_tokens(
    tokens: Tokens, length: int, *, arrays: bool, of: Mapping[str, Any] | None = None
) -> bytes | EncodedRow:
    """Returns a row that holds tokens, as it is published."""
    row: dict[str, Any] = {**(of or {})}  # as int32, which they fit: `tokens_of` has seen to it
    row |= {name: values.astype(np.int32) if arrays else values.tolist() for name, values in tokens.items()}
    row["length"] = length
    return EncodedRow(*pack_row(row), length) if arrays else encode_row(row)


def _tokens(option: str, fields: dict[str, Any], beside: tuple[str, ...]) -> dict[str, npt.NDArray[np.int64]]:
    for name in beside:
        if fields.get(name) is not None:
            raise bad_row(f"{option}: {name!r} holds something for each token, which would no longer fit; leave it out")
    mask = fields.get(ATTENTION_MASK)
    if mask is not None and not _is_full(mask):
        hint = "all of which would be attended to; leave out these tokens and the mask"
        raise bad_row(f"{option}: {ATTENTION_MASK!r} leaves out some tokens of the row, {hint}")
    try:
        tokens = tokens_of(fields)
    except ValueError as cause:
        raise bad_row(f"{option}: {cause}") from cause
    if not len(tokens[INPUT_IDS]):
        raise bad_row(f"{option}: input_ids are empty, expected a token at least")
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


class Measure:
    """Tells how many tokens a row has that is to be packed (in packs of so many) or, if 0, dealt by cost."""

    def __init__(self, field: str, pack: int) -> None:
        self.field = field
        self._pack = pack
        self._option: Final = "--pack" if pack else "--balance"

    def tokens(self, row: dict[str, Any], line: bytes) -> int:
        """Returns the tokens of a row."""
        tokens, where = row.get(self.field), f"under {self.field!r}"
        if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
            found = reprlib.repr(tokens) if self.field in row else f"none among its keys ({key_names(row)})"
            option = self._option if self._pack else f"--length-field {self.field}"
            expected = f"a whole number of tokens from 1 to {MAX_TOKENS}"
            raise bad_row(f"{option}: expected {expected} {where}, found {found}")
        self._check_pack(tokens, where, line)
        ids = row.get("input_ids")
        # Fewer are right, where images stand for some.
        if isinstance(ids, list) and len(ids) > tokens:
            raise bad_row(f"{self._option}: {tokens} tokens {where}, but {len(ids)} input_ids")
        return tokens

    def encoded_tokens(self, row: EncodedRow) -> int:
        """Returns the tokens of an encoded row, which its encoder tells. Raises as `tokens` does."""
        if row.tokens is None:
            made = loads(row.line)
            found = reprlib.repr(made["length"]) if "length" in made else f"none among its keys ({key_names(made)})"
            expected = "a whole number of tokens under 'length', such as .item() makes of an array"
            raise bad_row(f"{self._option}: --encode returned no length: expected {expected}, found {found}")
        self.check(row.tokens, row.line, "--encode")
        return row.tokens

    def check(self, tokens: int, line: bytes, told_by: str) -> None:
        """Looks whether a row of this length can be packed, or dealt. Raises as `tokens` does."""
        if not tokens:
            raise bad_row(f"{self._option}: {told_by} returned a length of 0, expected one from 1")
        self._check_pack(tokens, f"as {told_by} returned it", line)

    def _check_pack(self, tokens: int, where: str, line: bytes) -> None:
        if not self._pack:
            return
        if tokens > self._pack:
            raise bad_row(f"--pack: {tokens} tokens {where}, more than the {self._pack} of a pack")
        # Every level takes an opening bracket, so few rows are parsed a second time.
        if line.count(b"{") + line.count(b"[") > _MAX_LEVELS - ADDED_LEVELS:
            try:
                loads(b"[" * ADDED_LEVELS + line + b"]" * ADDED_LEVELS)
            except orjson.JSONDecodeError:
                raise bad_row(f"--pack: nested more than {_MAX_LEVELS - ADDED_LEVELS} levels deep") from None


def load_counter(settings: MeasureSettings) -> Callable[[dict[str, Any]], int]:
    """Returns what tells how many tokens a row has; it raises `RowInvalid` where it cannot be told."""
    function: Callable[[dict[str, Any]], Any]
    if settings.encoding is not None:
        function = _longest(open_swift(settings.encoding, "--measure")[0])
    elif FUNCTION.fullmatch(settings.measure):
        function = load_function(settings.measure, "--measure")
    else:
        function = _tokenizer(settings.measure, settings.field)

    def count(row: dict[str, Any]) -> int:
        found = call_user("--measure", function, row)
        try:
            tokens = -1 if isinstance(found, bool) else operator.index(found)
        except TypeError:
            tokens = -1
        if not 0 <= tokens <= MAX_TOKENS:
            expected = f"expected a whole number of tokens from 0 to {MAX_TOKENS}"
            raise bad_row(f"--measure returned {name_value(found, _SHOWN)}, {expected}")
        return tokens

    return count


def _longest(encode: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], int]:
    """Returns what measures rows as ms-swift groups them: of one with several sequences the longest counts."""

    def measure(row: dict[str, Any]) -> int:
        encoded = encode(row)
        lengths = encoded.get("lengths")
        return int(encoded["length"]) if lengths is None else int(max(lengths))

    return measure


def _tokenizer(folder: str, field: str | None) -> Callable[[dict[str, Any]], int]:
    """Returns what measures rows by the tokenizer in a folder. Nothing is fetched, and none of its code is run."""
    if not os.path.isdir(folder):
        raise _setting("--measure", f"expected the folder of a tokenizer, swift or MODULE:FUNCTION, got {folder!r}")
    # There are as many processes as are wanted.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as cause:
        if cause.name != "transformers":
            raise
        needs = "--measure DIRECTORY needs transformers, which is not installed: pip install transformers"
        raise ExtraMissing(needs, package="transformers") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise _setting("--measure", f"{folder}: its tokenizer cannot be loaded: {name_error(error)}") from error

    def measure(row: dict[str, Any]) -> int:
        if field is None and isinstance(row.get("messages"), list):
            made = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)
            return len(made["input_ids"])
        key = "text" if field is None else field
        if not isinstance(row.get(key), str):
            hint = "; name another with --measure-field" if field is None else ""
            raise bad_row(f"--measure: no text {key!r} among its keys ({key_names(row)}){hint}")
        return len(tokenizer(row[key])["input_ids"])

    return measure


def key_names(row: dict[str, Any]) -> str:
    """Returns the first keys of a row, for messages."""
    return ", ".join(key[:_SHOWN] for key in list(row)[:8]) or "none"
