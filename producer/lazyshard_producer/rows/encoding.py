"""Rows as tokens: encoded by ms-swift's template or by a function of the user's, taken out, padded, measured.

What decides about the encoding is told as plain facts, which the stream's manifest keeps. ms-swift is known in
`lazyshard_swift` alone, which is named here and not imported.
"""

from __future__ import annotations

import contextlib
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
from lazyshard.format.row import encode_row, values_in
from lazyshard.lazy import name_error, name_value
from lazyshard.memory import loads, raise_if_short
from lazyshard.plan.sequences import ATTENTION_MASK, INPUT_IDS, LABELS, POSITION_IDS, Pad, pad_tokens, tokens_of
from lazyshard_producer.configuration.problems import FUNCTION
from lazyshard_producer.configuration.settings import SWIFT, Settings
from lazyshard_producer.errors import SettingInvalid, load_function
from lazyshard_producer.opening import stream_form
from lazyshard_producer.position import plain_name
from lazyshard_producer.sources.source import bad_row, load_extra

_SHOWN: Final = 60  # characters of a key or a value that are told
MAX_TOKENS: Final = 2**32 - 1  # the longest row that a seal can tell of
_MAX_LEVELS: Final = 1024 - ADDED_LEVELS  # how deep rows of packs are nested, as deep as readers go
_BESIDE: Final = ("loss_mask", "loss_scale", "token_type_ids")  # under which rows hold something else for each token


def encode(function: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> EncodedRow:
    """Returns an encoded row. Raises RowInvalid where the encoder did, or returned what cannot be published."""
    found = call_user("--encode", function, row)
    if not isinstance(found, Mapping):
        raise bad_row(f"--encode returned {name_value(found, 2 * _SHOWN)}, expected a dict")
    row = dict(found)
    tokens, ids = row.get("length"), row.get("input_ids", ())
    plain = ids.ndim == 1 if isinstance(ids, np.ndarray) else isinstance(ids, list) and ids and type(ids[0]) is int
    if isinstance(tokens, np.integer):
        # The number of an array's length: a whole number to whoever wrote it.
        row["length"] = tokens = int(tokens)
    if type(tokens) is not int:
        tokens = None
    elif not 0 <= tokens <= MAX_TOKENS:
        raise bad_row(f"--encode returned a length of {tokens}, expected one from 0 to {MAX_TOKENS}")
    elif plain and len(ids) > tokens:
        raise bad_row(f"--encode returned a length of {tokens}, but {len(ids)} input_ids")
    try:
        return EncodedRow(*pack_row(row), tokens)
    except RowInvalid as cause:
        raise bad_row(f"--encode made what is no row: {cause.reason or cause}") from cause


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
    """What the rows of a stream are; `arrays`: they may hold some, `carried`: those of the sources may."""

    arrays: bool
    encoding: Encoding | None
    carried: bool = False


def form_of(settings: Settings) -> Form:
    """Returns what the rows of a run will be, by its options, and by the streams among its sources."""
    forms = [(plain_name(source.path), *(stream_form(source) or (False, None))) for source in settings.sources]
    arrays = any(holds for _, holds, _ in forms)
    first, encoding = next(((name, encoding) for name, _, encoding in forms if encoding is not None), ("", None))
    if settings.encode is not None:
        if encoding is not None:
            hint = "leave it out, or take the rows before they were encoded"
            raise _setting("--encode", f"the rows of {first} are encoded already; {hint}")
        return Form(True, load_encoder(settings)[1], arrays)
    if encoding is None or settings.transform is not None or settings.columns:
        # What a function has made of encoded rows is no longer what the encoder made.
        return Form(arrays, None, arrays)
    if other := next((name for name, _, one in forms if one != encoding), None):
        alike = "and all rows of a stream are encoded alike; make a stream of each"
        raise _setting("--source", f"the rows of {first} are encoded otherwise than those of {other}, {alike}")
    return Form(arrays, _formed(encoding, settings), arrays)


def _formed(encoding: Encoding, settings: Settings) -> Encoding:
    # What is cut or padded is no longer what an encoder has made, and its readers have to know that.
    return encoding if settings.form is None else {**encoding, "form": settings.form}


def load_encoder(settings: Settings) -> tuple[Callable[[dict[str, Any]], Any], Encoding]:
    """Returns the function of --encode, and what it encodes with."""
    if settings.encode == SWIFT:
        function, encoding = _open_swift(**settings.swift, option="--encode")
        return function, check_encoding(_formed(encoding, settings))
    name, function = str(settings.encode), load_function(str(settings.encode), "--encode")
    own = _formed({"kind": "function", "function": name}, settings)
    told = getattr(function, "fingerprint", {})
    if isinstance(told, Mapping) and (taken := [fact for fact in own if fact in told]):
        reason = f"its fingerprint has a fact {taken[0]!r}, which lazyshard tells itself: give yours another name"
        raise _setting("--encode", f"{name}: {reason}")
    try:
        return function, check_encoding({**told, **own}, f"the attribute fingerprint of {name}")
    except TypeError as cause:
        reason = f"its fingerprint is a dict of plain values, got {name_value(told, 2 * _SHOWN)}"
        raise _setting("--encode", f"{name}: {reason}") from cause
    except ValueError as cause:
        raise _setting("--encode", str(cause)) from cause


@functools.cache
def _open_swift(*, option: str, **swift: Any) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], Encoding]:
    """Returns what encodes a row as ms-swift would before training it; that takes seconds, so once in a process."""
    opener = load_function("lazyshard_swift.rows:open_encoder", option)
    try:
        opened: tuple[Any, Encoding] = opener(**swift)
        return opened
    except KeyboardInterrupt:
        raise
    except LazyShardError as cause:
        raise _setting(option, str(cause)) from cause
    except BaseException as error:
        # SystemExit too, with which parsers of options end.
        raise _setting(option, f"ms-swift raised {name_error(error)}") from error


def read_document(row: dict[str, Any], line: bytes | EncodedRow) -> tuple[EncodedRow, int]:
    """Returns the tokens of a row, and nothing else, in the form in which they travel; and how many these are.

    `row` is as it was made, where it is not encoded; `line` as it would be published by itself.
    """
    fields = document_of(line) if isinstance(line, EncodedRow) else row
    tokens = _tokens("--split", fields, _BESIDE)
    if isinstance(line, EncodedRow):
        # Of images, for instance: the tokens that stand for them would be trained without.
        replaced = (INPUT_IDS, LABELS, POSITION_IDS, ATTENTION_MASK)  # of which sequences have their own
        for name, value in fields.items():
            if name not in replaced and any(isinstance(one, np.ndarray) for one in values_in(value)):
                raise bad_row(f"--split: there is an array under {name!r:.80}, which would be lost")
    count = len(tokens[INPUT_IDS])
    return EncodedRow(*pack_row({name: values.astype(np.int32) for name, values in tokens.items()}), count), count


def document_of(row: EncodedRow) -> dict[str, Any]:
    """Returns what an encoded row holds, arrays as views of its bytes; of what `read_document` made, the tokens."""
    found: dict[str, Any] = loads(row.line)
    fill_row(found, np.frombuffer(row.arrays, np.uint8))
    return found


def pad_row(settings: Pad, row: dict[str, Any], line: bytes | EncodedRow) -> tuple[bytes | EncodedRow, int]:
    """Returns a row with its tokens padded, a mask and its length, and how many tokens it has; see `read_document`."""
    fields = document_of(line) if isinstance(line, EncodedRow) else row
    tokens = _tokens("--pad", fields, (*_BESIDE, POSITION_IDS))
    count = len(tokens[INPUT_IDS])
    if count > settings.size:
        raise bad_row(f"--pad: {count} tokens, more than the {settings.size} to which rows are padded")
    padded = pad_tokens(tokens, settings.size, settings.token)
    return write_tokens(padded, count, arrays=isinstance(line, EncodedRow), of=fields), count


def write_tokens(
    tokens: Mapping[str, npt.NDArray[np.int64]], length: int, *, arrays: bool, of: Mapping[str, Any] | None = None
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
    if (mask := fields.get(ATTENTION_MASK)) is not None:
        full: Any = False
        with contextlib.suppress(TypeError, ValueError):
            full = np.all(np.asarray(mask) == 1)
        if not full:
            hint = "all of which would be attended to; leave out these tokens and the mask"
            raise bad_row(f"{option}: {ATTENTION_MASK!r} leaves out some tokens of the row, {hint}")
    try:
        tokens = tokens_of(fields)
    except ValueError as cause:
        raise bad_row(f"{option}: {cause}") from cause
    if not len(tokens[INPUT_IDS]):
        raise bad_row(f"{option}: input_ids are empty, expected a token at least")
    return tokens


class Measure:
    """Tells how many tokens rows have: as --measure counts them, as their encoder told, or as they say themselves."""

    def __init__(self, settings: Settings) -> None:
        self._counter = load_counter(settings) if settings.measure else None
        self._field, self._pack, self._encodes = settings.length_field, settings.pack, settings.encode is not None
        self._option = "--pack" if settings.pack else "--balance" if settings.balance is not None else None

    def of(self, row: dict[str, Any], line: bytes | EncodedRow) -> int:
        """Returns the tokens of a row. Raises RowInvalid where they cannot be told, or are too many."""
        field, where, by = self._field, f"under {self._field!r}", ""
        tokens = row.get(field)
        if self._counter is not None:
            tokens, by = self._counter(row), "--measure"
            if self._option is None:
                return int(tokens)
        elif isinstance(line, EncodedRow) and (self._encodes or (line.tokens is not None and field not in row)):
            if line.tokens is None:
                expected = "a whole number of tokens under 'length', such as .item() makes of an array"
                found = _found(loads(line.line), "length")
                raise bad_row(f"{self._option}: --encode returned no length: expected {expected}, found {found}")
            tokens, by = line.tokens, "--encode"
        else:
            ids = row.get("input_ids")
            if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
                option = self._option if self._pack else f"--length-field {field}"
                expected = f"a whole number of tokens from 1 to {MAX_TOKENS} {where}"
                raise bad_row(f"{option}: expected {expected}, found {_found(row, field)}")
            # Fewer are right, where images stand for some.
            if isinstance(ids, list) and len(ids) > tokens:
                raise bad_row(f"{self._option}: {tokens} tokens {where}, but {len(ids)} input_ids")
        if not tokens:
            raise bad_row(f"{self._option}: {by} returned a length of 0, expected one from 1")
        if self._pack:
            self._check_pack(tokens, f"as {by} returned it" if by else where, line)
        return int(tokens)

    def _check_pack(self, tokens: int, where: str, row: bytes | EncodedRow) -> None:
        if tokens > self._pack:
            raise bad_row(f"--pack: {tokens} tokens {where}, more than the {self._pack} of a pack")
        line = row if isinstance(row, bytes) else row.line
        # Every level takes an opening bracket, so few rows are parsed a second time.
        if line.count(b"{") + line.count(b"[") > _MAX_LEVELS:
            try:
                loads(b"[" * ADDED_LEVELS + line + b"]" * ADDED_LEVELS)
            except orjson.JSONDecodeError:
                raise bad_row(f"--pack: nested more than {_MAX_LEVELS} levels deep") from None


def load_counter(settings: Settings) -> Callable[[dict[str, Any]], int]:
    """Returns what tells how many tokens a row has; it raises `RowInvalid` where it cannot be told."""
    function: Callable[[dict[str, Any]], Any]
    if (name := str(settings.measure)) == SWIFT:
        function = functools.partial(_longest, _open_swift(**settings.swift, option="--measure")[0])
    elif FUNCTION.fullmatch(name):
        function = load_function(name, "--measure")
    else:
        function = _tokenizer(name, settings.measure_field)

    def count(row: dict[str, Any]) -> int:
        found, tokens = call_user("--measure", function, row), -1
        with contextlib.suppress(TypeError):
            tokens = -1 if isinstance(found, bool) else operator.index(found)
        if not 0 <= tokens <= MAX_TOKENS:
            expected = f"expected a whole number of tokens from 0 to {MAX_TOKENS}"
            raise bad_row(f"--measure returned {name_value(found, _SHOWN)}, {expected}")
        return tokens

    return count


def _longest(encode: Callable[[dict[str, Any]], dict[str, Any]], row: dict[str, Any]) -> int:
    encoded = encode(row)
    # As ms-swift groups rows: of one with several sequences the longest counts.
    return int(encoded["length"] if encoded.get("lengths") is None else max(encoded["lengths"]))


def _tokenizer(folder: str, field: str | None) -> Callable[[dict[str, Any]], int]:
    """Returns what measures rows by the tokenizer in a folder. Nothing is fetched, and none of its code is run."""
    if not os.path.isdir(folder):
        raise _setting("--measure", f"expected the folder of a tokenizer, swift or MODULE:FUNCTION, got {folder!r}")
    # There are as many processes as are wanted.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers = load_extra("--measure DIRECTORY", "transformers", None)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
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


def _found(row: dict[str, Any], key: str) -> str:
    return reprlib.repr(row[key]) if key in row else f"none among its keys ({key_names(row)})"


def key_names(row: dict[str, Any]) -> str:
    """Returns the first keys of a row, for messages."""
    return ", ".join(key[:_SHOWN] for key in list(row)[:8]) or "none"
