"""The lengths of rows in tokens: as the rows themselves or their encoder tell them, or as they are measured.

Those of rows that are to be packed or dealt by cost are checked here too.
"""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Callable
from typing import Any, Final

import orjson

from lazyshard.errors import RowInvalid, SkipSample
from lazyshard.format.arrays import ARRAY_KEY
from lazyshard.format.batch import ADDED_LEVELS, EncodedRow
from lazyshard.memory import loads, raise_if_short
from lazyshard_producer.configuration.problems import FUNCTION
from lazyshard_producer.configuration.settings import MeasureSettings
from lazyshard_producer.errors import ExtraMissing, SettingInvalid
from lazyshard_producer.rows.encoding import MAX_TOKENS, open_swift, refuse
from lazyshard_producer.user_functions import load_function, name_error, name_value

_MAX_LEVELS: Final = 1024
"""How deep readers nest."""

_SHOWN: Final = 60
"""Characters of a key or a value that are told."""


class Measure:
    """Tells how many tokens a row has.

    Args:
        field: the key under which they stand, in rows that are not encoded.
        pack: tokens of a pack; 0 where rows are not packed.
    """

    def __init__(self, field: str, pack: int) -> None:
        self.field = field
        self._pack = pack

    def tokens(self, row: dict[str, Any], line: bytes) -> int:
        """Returns the tokens of a row.

        Raises:
            RowInvalid: it does not tell them, has more than go into a pack, or is nested too deep to lie in one.
        """
        tokens = row.get(self.field)
        if not self._pack:
            if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
                found = reprlib.repr(tokens) if self.field in row else f"none among its keys ({key_names(row)})"
                expected = f"expected a whole number of tokens from 1 to {MAX_TOKENS}"
                raise refuse(f"--length-field {self.field}: {expected}, found {found}")
            _check_ids("--balance", row, tokens, f"under {self.field!r}")
            return tokens
        if type(tokens) is not int or tokens < 1:
            found = repr(tokens)[:_SHOWN] if self.field in row else "none"
            raise refuse(f"--pack: the tokens of a row are a whole number from 1 under {self.field!r}, found {found}")
        self._check_pack(tokens, f"under {self.field!r}", line)
        _check_ids("--pack", row, tokens, f"under {self.field!r}")
        return tokens

    def encoded_tokens(self, row: EncodedRow) -> int:
        """Returns the tokens of an encoded row, which its encoder tells. Raises as `tokens` does."""
        tokens, option = row.tokens, "--pack" if self._pack else "--balance"
        if tokens is None:
            raise refuse(f"{option}: --encode returned {_found_length(row)}")
        self.check(tokens, row.line, "--encode")
        return tokens

    def check(self, tokens: int, line: bytes, told_by: str) -> None:
        """Looks whether a row of this length can be packed, or dealt. Raises as `tokens` does."""
        if not tokens:
            option = "--pack" if self._pack else "--balance"
            raise refuse(f"{option}: {told_by} returned a length of 0, expected one from 1")
        if self._pack:
            self._check_pack(tokens, f"as {told_by} returned it", line)

    def _check_pack(self, tokens: int, where: str, line: bytes) -> None:
        """Looks whether a row can lie in a pack."""
        if tokens > self._pack:
            raise refuse(f"--pack: {tokens} tokens {where}, more than the {self._pack} of a pack")
        # Every level takes an opening bracket, so few rows are parsed a second time.
        if line.count(b"{") + line.count(b"[") > _MAX_LEVELS - ADDED_LEVELS:
            try:
                loads(b"[" * ADDED_LEVELS + line + b"]" * ADDED_LEVELS)
            except orjson.JSONDecodeError:
                raise refuse(f"--pack: nested more than {_MAX_LEVELS - ADDED_LEVELS} levels deep") from None


def load_counter(settings: MeasureSettings) -> Callable[[dict[str, Any]], int]:
    """Returns what tells how many tokens a row has; it raises `RowInvalid` where it cannot be told.

    Raises:
        SettingInvalid: it cannot be had.
        ExtraMissing: transformers is not installed.
    """
    function: Callable[[dict[str, Any]], Any]
    if settings.encoding is not None:
        function = _longest(open_swift(settings.encoding, "--measure")[0])
    elif FUNCTION.fullmatch(settings.measure):
        function = load_function(settings.measure, "--measure")
    else:
        function = _tokenizer(settings.measure, settings.field)

    def count(row: dict[str, Any]) -> int:
        try:
            return _checked(function(row))
        except (RowInvalid, KeyboardInterrupt):
            raise
        except SkipSample as why:
            raise refuse(f"--measure makes no sample of this row: {why}") from why
        except BaseException as error:
            # SystemExit too: it would end the run as if all were done.
            raise_if_short(error)
            raise refuse(f"--measure raised {name_error(error)}") from error

    return count


def _longest(encode: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], int]:
    """Returns what measures rows as ms-swift groups them: of one with several sequences the longest counts."""

    def measure(row: dict[str, Any]) -> int:
        encoded = encode(row)
        lengths = encoded.get("lengths")
        return int(encoded["length"]) if lengths is None else int(max(lengths))

    return measure


def _checked(value: Any) -> int:
    try:
        tokens = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        tokens = None
    if tokens is None or not 0 <= tokens <= MAX_TOKENS:
        expected = f"expected a whole number of tokens from 0 to {MAX_TOKENS}"
        raise refuse(f"--measure returned {name_value(value, _SHOWN)}, {expected}")
    return tokens


def _tokenizer(folder: str, field: str | None) -> Callable[[dict[str, Any]], int]:
    """Returns what measures rows by the tokenizer in a folder. Nothing is fetched, and none of its code is run."""
    if not os.path.isdir(folder):
        reason = f"expected the folder of a tokenizer, swift or MODULE:FUNCTION, got {folder!r}"
        raise SettingInvalid(f"--measure: {reason}", option="--measure")
    # There are as many processes as are wanted.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as cause:
        if cause.name != "transformers":
            raise
        raise ExtraMissing(
            "--measure DIRECTORY needs transformers, which is not installed: pip install transformers",
            package="transformers",
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        reason = f"{folder}: its tokenizer cannot be loaded: {name_error(error)}"
        raise SettingInvalid(f"--measure: {reason}", option="--measure") from error

    def measure(row: dict[str, Any]) -> int:
        if field is None and isinstance(row.get("messages"), list):
            made = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)
            return len(made["input_ids"])
        key = "text" if field is None else field
        if not isinstance(row.get(key), str):
            hint = "; name another with --measure-field" if field is None else ""
            raise refuse(f"--measure: no text {key!r} among its keys ({key_names(row)}){hint}")
        return len(tokenizer(row[key])["input_ids"])

    return measure


def _check_ids(option: str, row: dict[str, Any], tokens: int, where: str) -> None:
    """Refuses a row with more token ids than it says; fewer are right, where images stand for some."""
    ids = row.get("input_ids")
    if isinstance(ids, list) and len(ids) > tokens:
        raise refuse(f"{option}: {tokens} tokens {where}, but {len(ids)} input_ids")


def _found_length(row: EncodedRow) -> str:
    """Returns what stands where the length of an encoded row is looked for, which is no whole number."""
    expected = "expected a whole number of tokens under 'length'"
    made = loads(row.line)
    if "length" not in made:
        return f"no length among its keys ({key_names(made)}): {expected}"
    found = made["length"]
    if isinstance(found, dict) and ARRAY_KEY in found:
        dtype, shape, _ = found[ARRAY_KEY]
        return f"a length that is an array of {dtype} of shape {tuple(shape)}: {expected}, such as .item() makes of it"
    return f"a length of {reprlib.repr(found)} ({type(found).__name__}): {expected}"


def key_names(row: dict[str, Any]) -> str:
    """Returns the first keys of a row, for messages."""
    return ", ".join(key[:_SHOWN] for key in list(row)[:8]) or "none"
