"""How a row is measured: by a function of the user's, a tokenizer, or ms-swift's template.

A measure also has a text, which goes into the files: two chunks of the same text were measured alike. It names what
the lengths depend on as far as that can be seen: the function with its module's source, the tokenizer's files, the
template.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import xxhash

from lazyshard.config.named_function import FunctionMissing, named_function
from lazyshard.errors import MeasureRefused
from lazyshard.format.tokens import MAX_TOKENS

Kind = Literal["function", "tokenizer", "template"]

_TEMPLATE: Final = "lazyshard_swift.encoding:open_template"
"""Takes model, template, max_length, model_type and the digest of the tokenizer's files; returns measure and text.
Named and not imported: what knows ms-swift stands above this."""

_TOKENIZER_FILES: Final = (
    *("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*"),
)
"""Of a model's folder, what decides how a text becomes tokens."""


class Loaded(NamedTuple):
    """A measure that is ready.

    Attributes:
        measure: returns the tokens of a row; raises `SkipSample` where no sample is made of it.
        text: what it is, for the files.
    """

    measure: Callable[[dict[str, Any]], int]
    text: str


@dataclass(frozen=True, slots=True)
class Measure:
    """What the user has asked for.

    Attributes:
        kind: "function", "tokenizer" or "template".
        name: ``MODULE:FUNCTION`` of a function that takes a row and returns a number of tokens; or the folder of a
            tokenizer, or of a model.
        field: of a tokenizer: the text to measure; None for `messages` by the chat template, or else `text`.
        template: of ms-swift; None for that of the model.
        max_length: of ms-swift: longer rows make no sample; None for what the model takes.
        model_type: of ms-swift, where the folder does not tell; None for what it tells.
    """

    kind: Kind
    name: str
    field: str | None = None
    template: str | None = None
    max_length: int | None = None
    model_type: str | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        if self.kind not in get_args(Kind):
            raise ValueError(f"a measure is one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if not self.name:
            raise ValueError(f"a {self.kind} has a name, got an empty one")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length is 1 or more, got {self.max_length}")

    def values(self) -> dict[str, Any]:
        """Returns the fields as JSON can hold them."""
        return asdict(self)

    def open(self) -> Loaded:
        """Gets it ready: imports the function, or loads the tokenizer.

        Raises:
            MeasureRefused: it cannot be used.
        """
        if self.kind == "function":
            return _function(self.name)
        if self.kind == "tokenizer":
            return _tokenizer(self.name, self.field)
        return self._template()

    def _template(self) -> Loaded:
        files = tokenizer_digest(self.name)
        try:
            open_template = named_function(_TEMPLATE)
        except FunctionMissing as cause:
            raise MeasureRefused(f"--model measures by ms-swift's template: {cause}") from cause
        return Loaded(*open_template(self.name, self.template, self.max_length, self.model_type, files))


def checked_length(value: Any) -> int:
    """Returns a length that a function has returned.

    Raises:
        ValueError: it is none.
    """
    try:
        length = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        length = None
    if length is None or not 0 <= length <= MAX_TOKENS:
        shown = repr(value)[:80] if isinstance(value, (int, float, str, bool)) else f"a {type(value).__name__}"
        raise ValueError(f"a length is an integer from 0 to {MAX_TOKENS}, the function returned {shown}")
    return length


def tokenizer_digest(folder: str) -> str:
    """Returns a digest of the files of a folder that make a tokenizer: XXH3 (64 bits), 16 hexadecimal digits.

    Raises:
        MeasureRefused: there is no such folder, or no such file in it.
        OSError: a file cannot be read.
    """
    path = Path(folder)
    files = sorted({file for pattern in _TOKENIZER_FILES for file in path.glob(pattern) if file.is_file()})
    if not files:
        what = "there is no tokenizer in it" if path.is_dir() else "there is no such folder"
        raise MeasureRefused(f"{folder}: {what}; give the folder of a model, or of its tokenizer, on this machine")
    digest = xxhash.xxh3_64()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _function(name: str) -> Loaded:
    try:
        function = named_function(name)
    except FunctionMissing as cause:
        raise MeasureRefused(f"--function {name}: {cause}") from cause

    def measure(row: dict[str, Any]) -> int:
        return checked_length(function(row))

    source = _source(name.partition(":")[0])
    return Loaded(measure, f"function {name}" + (f", source {source}" if source else ""))


def _source(module: str) -> str | None:
    """Returns a digest of a module's source, None where it has none."""
    try:
        file = inspect.getsourcefile(sys.modules[module])
        return None if file is None else xxhash.xxh3_64_hexdigest(Path(file).read_bytes())
    except (TypeError, OSError, KeyError):
        return None


def _tokenizer(folder: str, field: str | None) -> Loaded:
    files = tokenizer_digest(folder)
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as cause:
        if cause.name != "transformers":
            raise
        raise MeasureRefused(
            "--tokenizer needs transformers, which is not installed: pip install transformers"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as cause:
        raise MeasureRefused(f"{folder}: its tokenizer cannot be loaded: {type(cause).__name__}: {cause}") from cause

    def measure(row: dict[str, Any]) -> int:
        if field is not None:
            text = row.get(field)
            if not isinstance(text, str):
                raise ValueError(f"expected a text {field!r}, found {_named(row, field)}")
            return len(tokenizer(text)["input_ids"])
        if isinstance(row.get("messages"), (list, tuple)):
            made = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)
            return len(made["input_ids"])
        if isinstance(row.get("text"), str):
            return len(tokenizer(row["text"])["input_ids"])
        raise ValueError("expected a list `messages` or a text `text`; another field is named with --field")

    asked = "messages or text" if field is None else f"field {field}"
    return Loaded(measure, f"tokenizer {files}, {asked}")


def _named(row: dict[str, Any], field: str) -> str:
    return f"a {type(row[field]).__name__}" if field in row else "none"
