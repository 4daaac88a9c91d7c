"""Rows as tokens: encoding by ms-swift's template or the user's function, extracting, padding and measuring.

The stream's manifest keeps the settings of the encoding as plain values. Only `lazyshard_swift` depends on ms-swift; it
is loaded by name here and not imported.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import re
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
from lazyshard_producer.errors import SettingInvalid, load_extra, load_function
from lazyshard_producer.opening import stream_form
from lazyshard_producer.position import plain_name
from lazyshard_producer.rows.reader import Size
from lazyshard_producer.sources.source import bad_row

_SHOWN: Final = 60  # characters of a key or a value in messages
MAX_TOKENS: Final = 2**32 - 1  # the largest length that a seal can store
_MAX_LEVELS: Final = 1024 - ADDED_LEVELS  # deepest nesting of a row in a pack, limited by readers
_PER_TOKEN: Final = ("loss_mask", "loss_scale", "token_type_ids")  # keys of other values per token
_GRIDS: Final = re.compile(r"grid_t?hws?$")  # keys of (frames,) height and width of each image or video, in patches
_PIXELS: Final = re.compile("pixel_values")  # keys of pixels; in two dimensions there is a row for each patch


def encode(function: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> EncodedRow:
    """Returns an encoded row. Raises RowInvalid if the encoder raises, or its result cannot be published."""
    found = call_user("--encode", function, row)
    if not isinstance(found, Mapping):
        raise bad_row(f"--encode returned {name_value(found, 2 * _SHOWN)}, expected a dict")
    row = dict(found)
    # A number computed with numpy counts as a whole number.
    row |= {name: int(row[name]) for name in ("length", "patches") if isinstance(row.get(name), np.integer)}
    tokens, ids = row.get("length"), row.get("input_ids", ())
    plain = ids.ndim == 1 if isinstance(ids, np.ndarray) else isinstance(ids, list) and ids and type(ids[0]) is int
    if type(tokens) is not int:
        tokens = None
    elif not 0 <= tokens <= MAX_TOKENS:
        raise bad_row(f"--encode returned a length of {tokens}, expected one from 0 to {MAX_TOKENS}")
    elif plain and len(ids) > tokens:
        raise bad_row(f"--encode returned a length of {tokens}, but {len(ids)} input_ids")
    try:
        return EncodedRow(*pack_row(row), tokens, count_patches(row))
    except RowInvalid as cause:
        raise bad_row(f"--encode returned an invalid row: {cause.reason or cause}") from cause


def count_patches(row: dict[str, Any]) -> int | None:
    """Returns how many patches of images a row holds: its whole number `patches`, or by its arrays; None if unknown."""
    if type(found := row.get("patches")) is not int:
        grids = [one for one in _arrays(row, _GRIDS) if one.ndim and one.dtype.kind in "iu"]
        pixels = [] if grids else _arrays(row, _PIXELS)
        if not grids and (found is not None or any(one.ndim != 2 for one in pixels)):
            return None
        found = sum(int(grid.prod(axis=-1, dtype=np.float64).sum()) for grid in grids) + sum(map(len, pixels))
    if not 0 <= found <= MAX_TOKENS:
        raise bad_row(f"expected from 0 to {MAX_TOKENS} patches, found {found}")
    return int(found)


def _arrays(row: dict[str, Any], names: re.Pattern[str]) -> list[npt.NDArray[Any]]:
    each = (values_in(value) for name, value in row.items() if isinstance(name, str) and names.search(name))
    return [one for values in each for one in values if isinstance(one, np.ndarray)]


def call_user(option: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's function and returns its result. Its errors, except lack of memory, refuse the row."""
    try:
        return function(*arguments)
    except (RowInvalid, KeyboardInterrupt):
        raise
    except SkipSample as why:
        raise bad_row(f"{option} makes no sample of this row: {why}") from why
    except BaseException as error:
        # SystemExit too: it would end the run as if it had finished.
        raise_if_short(error)
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        where = f" ({os.path.basename(frame.f_code.co_filename)}:{line})"
        raise bad_row(f"{option} raised {name_error(error)}{where}") from error


def _setting(option: str, reason: str) -> SettingInvalid:
    return SettingInvalid(f"{option}: {reason}", option=option)


class Form(NamedTuple):
    """The form of a stream's rows: `arrays`: they may contain arrays; `carried`: rows of the sources may."""

    arrays: bool
    encoding: Encoding | None
    carried: bool = False


def form_of(settings: Settings) -> Form:
    """Returns the form of a run's rows, from its options and the streams among its sources. Raises SettingInvalid."""
    forms = [(plain_name(source.path), *(stream_form(source) or (False, None))) for source in settings.sources]
    arrays = bool(settings.embed) or any(holds for _, holds, _ in forms)
    first, encoding = next(((name, encoding) for name, _, encoding in forms if encoding is not None), ("", None))
    if settings.encode is not None:
        if encoding is not None:
            hint = "remove it, or use the rows from before encoding"
            raise _setting("--encode", f"the rows of {first} are already encoded; {hint}")
        return Form(True, load_encoder(settings)[1], arrays)
    if encoding is None or settings.transform is not None or settings.columns or settings.embed:
        # A function may have changed encoded rows, so the encoding is no longer known.
        return Form(arrays, None, arrays)
    if other := next((name for name, _, one in forms if one != encoding), None):
        alike = "but all rows of a stream must have the same encoding; make a stream of each"
        raise _setting("--source", f"the rows of {first} and {other} have different encodings, {alike}")
    return Form(arrays, _formed(encoding, settings), arrays)


def _formed(encoding: Encoding, settings: Settings) -> Encoding:
    # Split or padded rows differ from the encoder's output, and readers have to know that.
    return encoding if settings.form is None else {**encoding, "form": settings.form}


def load_encoder(settings: Settings) -> tuple[Callable[[dict[str, Any]], Any], Encoding]:
    """Returns the function of --encode, and its encoding as the manifest keeps it. Raises SettingInvalid."""
    if settings.encode == SWIFT:
        function, encoding = _open_swift(**settings.swift, option="--encode")
        return function, check_encoding(_formed(encoding, settings))
    name, function = str(settings.encode), load_function(str(settings.encode), "--encode")
    own = _formed({"kind": "function", "function": name}, settings)
    given = getattr(function, "fingerprint", {})
    if isinstance(given, Mapping) and (taken := [fact for fact in own if fact in given]):
        reason = f"its fingerprint contains {taken[0]!r}, a name that lazyshard uses itself; choose another name"
        raise _setting("--encode", f"{name}: {reason}")
    try:
        return function, check_encoding({**given, **own}, f"the attribute fingerprint of {name}")
    except TypeError as cause:
        reason = f"its fingerprint must be a dict of plain values, got {name_value(given, 2 * _SHOWN)}"
        raise _setting("--encode", f"{name}: {reason}") from cause
    except ValueError as cause:
        raise _setting("--encode", str(cause)) from cause


@functools.cache
def _open_swift(*, option: str, **swift: Any) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], Encoding]:
    """Returns a function that encodes rows as ms-swift does for training, and the encoding.

    Opening ms-swift takes seconds, so the result is cached for the process.
    """
    opener = load_function("lazyshard_swift.rows:open_encoder", option)
    try:
        opened: tuple[Any, Encoding] = opener(**swift)
        return opened
    except KeyboardInterrupt:
        raise
    except LazyShardError as cause:
        raise _setting(option, str(cause)) from cause
    except BaseException as error:
        # SystemExit too, which argument parsers raise.
        raise _setting(option, f"ms-swift raised {name_error(error)}") from error


def read_document(row: dict[str, Any], line: bytes | EncodedRow) -> tuple[EncodedRow, Size]:
    """Returns the tokens of a row, and nothing else, as an EncodedRow, and its size.

    `row` is used if the row is not encoded; `line` is the row as it would be published without splitting.
    """
    fields = document_of(line) if isinstance(line, EncodedRow) else row
    tokens = _tokens("--split", fields, _PER_TOKEN)
    if isinstance(line, EncodedRow):
        # Arrays of images, for example: without them their placeholder tokens would be trained alone.
        replaced = (INPUT_IDS, LABELS, POSITION_IDS, ATTENTION_MASK)  # sequences have their own
        for name, value in fields.items():
            if name not in replaced and any(isinstance(one, np.ndarray) for one in values_in(value)):
                raise bad_row(f"--split: there is an array under {name!r:.80}, which would be lost")
    count = len(tokens[INPUT_IDS])
    return EncodedRow(*pack_row({name: ids.astype(np.int32) for name, ids in tokens.items()}), count), Size(count)


def document_of(row: EncodedRow) -> dict[str, Any]:
    """Returns the fields of an encoded row, arrays as views of its bytes; for a row of `read_document`, the tokens."""
    found: dict[str, Any] = loads(row.line)
    fill_row(found, np.frombuffer(row.arrays, np.uint8))
    return found


def pad_row(settings: Pad, row: dict[str, Any], line: bytes | EncodedRow) -> tuple[bytes | EncodedRow, int]:
    """Returns a row with padded tokens, a mask and its length, and its number of tokens; see `read_document`."""
    fields = document_of(line) if isinstance(line, EncodedRow) else row
    tokens = _tokens("--pad", fields, (*_PER_TOKEN, POSITION_IDS))
    count = len(tokens[INPUT_IDS])
    if count > settings.size:
        raise bad_row(f"--pad: {count} tokens, more than the {settings.size} to which rows are padded")
    padded = pad_tokens(tokens, settings.size, settings.token)
    return write_tokens(padded, count, arrays=isinstance(line, EncodedRow), of=fields), count


def write_tokens(
    tokens: Mapping[str, npt.NDArray[np.int64]], length: int, *, arrays: bool, of: Mapping[str, Any] | None = None
) -> bytes | EncodedRow:
    """Returns the published form of a row with these tokens and the other fields of `of`."""
    row: dict[str, Any] = {**(of or {})}  # tokens as int32: `tokens_of` has checked that they fit
    row |= {name: values.astype(np.int32) if arrays else values.tolist() for name, values in tokens.items()}
    row["length"] = length
    return EncodedRow(*pack_row(row), length) if arrays else encode_row(row)


def _tokens(option: str, fields: dict[str, Any], beside: tuple[str, ...]) -> dict[str, npt.NDArray[np.int64]]:
    for name in beside:
        if fields.get(name) is not None:
            raise bad_row(f"{option}: {name!r} has a value for each token, which would no longer match; remove it")
    if (mask := fields.get(ATTENTION_MASK)) is not None:
        full: Any = False
        with contextlib.suppress(TypeError, ValueError):
            full = np.all(np.asarray(mask) == 1)
        if not full:
            hint = "which would be attended to; remove these tokens and the mask"
            raise bad_row(f"{option}: {ATTENTION_MASK!r} masks some tokens of the row, {hint}")
    try:
        tokens = tokens_of(fields)
    except ValueError as cause:
        raise bad_row(f"{option}: {cause}") from cause
    if not len(tokens[INPUT_IDS]):
        raise bad_row(f"{option}: input_ids are empty, expected at least one token")
    return tokens


class Measure:
    """Returns the size of rows: from --measure, from their encoder, or from the length field and `patches`."""

    def __init__(self, settings: Settings) -> None:
        self._counter = load_counter(settings) if settings.measure else None
        self._field, self._pack, self._encodes = settings.length_field, settings.pack, settings.encode is not None
        self._option = "--pack" if settings.pack else "--balance" if settings.balance is not None else None
        by_patches = {"--pack-patches": settings.pack_patches, "--cost-per-patch": settings.cost_per_patch}
        self._by_patches = next((option for option, value in by_patches.items() if value), None)
        self._most_patches = settings.pack_patches or MAX_TOKENS

    def of(self, row: dict[str, Any], line: bytes | EncodedRow) -> Size:
        """Returns the size of a row. Raises RowInvalid if it is unknown or too large."""
        field, where, by = self._field, f"under {self._field!r}", ""
        tokens, patches = row.get(field), line.patches if isinstance(line, EncodedRow) else 0
        if self._counter is not None:
            (tokens, counted), by = self._counter(row), "--measure"
            patches = patches if counted == 0 else counted
            if self._option is None:
                return Size(int(tokens), patches or 0)
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
            # Fewer input_ids are right if some tokens belong to images.
            if isinstance(ids, list) and len(ids) > tokens:
                raise bad_row(f"{self._option}: {tokens} tokens {where}, but {len(ids)} input_ids")
        if not tokens:
            raise bad_row(f"{self._option}: {by} returned a length of 0, expected one from 1")
        if self._pack:
            self._check_pack(tokens, f"as {by} returned it" if by else where, line)
        return Size(int(tokens), self._patches(patches, row))

    def _patches(self, patches: int | None, row: dict[str, Any]) -> int:
        if self._by_patches is None:
            return patches or 0
        if patches == 0 and not self._encodes:
            patches = count_patches(row)
        if patches is None:
            expected = "a whole number under 'patches', or the grids of its images such as image_grid_thw"
            raise bad_row(f"{self._by_patches}: the patches of the row are unknown: expected {expected}")
        if patches > self._most_patches:
            raise bad_row(f"--pack-patches: {patches} patches, more than the {self._most_patches} of a pack")
        return patches

    def _check_pack(self, tokens: int, where: str, row: bytes | EncodedRow) -> None:
        if tokens > self._pack:
            raise bad_row(f"--pack: {tokens} tokens {where}, more than the {self._pack} of a pack")
        line = row if isinstance(row, bytes) else row.line
        # Each level needs an opening bracket, so only few rows are parsed a second time.
        if line.count(b"{") + line.count(b"[") > _MAX_LEVELS:
            try:
                loads(b"[" * ADDED_LEVELS + line + b"]" * ADDED_LEVELS)
            except orjson.JSONDecodeError:
                raise bad_row(f"--pack: nested more than {_MAX_LEVELS} levels deep") from None


def load_counter(settings: Settings) -> Callable[[dict[str, Any]], tuple[int, int | None]]:
    """Returns the function of --measure, which counts the tokens of a row and raises RowInvalid if it cannot.

    It also returns the patches, 0 except with swift, which encodes the row.
    """
    function: Callable[[dict[str, Any]], Any]
    if (name := str(settings.measure)) == SWIFT:
        function = functools.partial(_longest, _open_swift(**settings.swift, option="--measure")[0])
    elif FUNCTION.fullmatch(name):
        function = load_function(name, "--measure")
    else:
        function = _tokenizer(name, settings.measure_field)

    def count(row: dict[str, Any]) -> tuple[int, int | None]:
        found, patches, tokens = call_user("--measure", function, row), 0, -1
        if name == SWIFT:
            found, patches = found
        with contextlib.suppress(TypeError):
            tokens = -1 if isinstance(found, bool) else operator.index(found)
        if not 0 <= tokens <= MAX_TOKENS:
            expected = f"expected a whole number of tokens from 0 to {MAX_TOKENS}"
            raise bad_row(f"--measure returned {name_value(found, _SHOWN)}, {expected}")
        return tokens, patches

    return count


def _longest(encode: Callable[[dict[str, Any]], dict[str, Any]], row: dict[str, Any]) -> tuple[int, int | None]:
    encoded = encode(row)
    # As ms-swift groups rows: for a row with several sequences the longest one counts.
    longest = int(encoded["length"] if encoded.get("lengths") is None else max(encoded["lengths"]))
    return longest, count_patches(encoded)


def _tokenizer(folder: str, field: str | None) -> Callable[[dict[str, Any]], int]:
    """Returns a counter that uses the tokenizer in a directory. Downloads nothing and runs none of its code."""
    if not os.path.isdir(folder):
        raise _setting("--measure", f"expected the directory of a tokenizer, swift or MODULE:FUNCTION, got {folder!r}")
    # --workers sets the number of processes.
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
