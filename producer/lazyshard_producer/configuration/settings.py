"""The settings of a run: one model, from which flags, TOML keys, help, example and checks are derived.

The docstring of an option is its help: one or two sentences, and its default if it has one.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

from annotated_types import Ge, Gt, Interval, Le, MinLen
from pydantic import AfterValidator, BeforeValidator, StringConstraints

from lazyshard.cli.output import size
from lazyshard.format.records import MAX_SAMPLES_PER_CHUNK, Declared
from lazyshard.format.state import check_consumer
from lazyshard.format.writers import WRITERS, check_declared, check_writer_name
from lazyshard.part import parse_size
from lazyshard.plan.balance import PER_TOKEN, PER_TOKEN_SQUARED
from lazyshard.plan.sequences import Pad, Split

SWIFT: Final = "swift"  # what --encode calls ms-swift
MAX_AMOUNT: Final = 2**63 - 1
MAX_SHUFFLE: Final = 10**9  # rows that are held to be reordered
MAX_LENGTH: Final = 2**31 - 1  # tokens of a sample, the largest value that ms-swift accepts
PANELS: Final = {
    "source": "Sources",
    "": "Stream",
    "rows": "Rows",
    "encoding": "Encoding: publish rows as the trainer needs them",
    "limits": "Limits: how far to run ahead of training, and what to delete",
}
"""Headings of the help by TOML table: "" for the top of the file, "source" for each ``[[source]]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """An amount of data, 0 or more."""

    number: int
    unit: Literal["chunks", "samples", "bytes"]

    def __str__(self) -> str:
        """Returns the amount for people."""
        if self.unit == "bytes":
            return size(self.number)
        return f"{self.number:,} {self.unit if self.number != 1 else self.unit[:-1]}"


def parse_bytes(text: str) -> int:
    """Returns a number of bytes, rounded down. Raises ValueError."""
    try:
        return parse_size(text, 0)
    except ValueError:
        raise ValueError("a size such as 20GB or 512MiB, or a number of bytes") from None


def parse_amount(text: str) -> Amount:
    """Returns an amount of chunks (the default unit), samples or bytes. Raises ValueError."""
    found = re.fullmatch(r"([0-9.]{1,19}) *(|chunks?|samples?)", text.strip().lower())
    try:
        number = int(found[1]) if found else parse_bytes(text)
    except ValueError:
        number = MAX_AMOUNT + 1
    if number > MAX_AMOUNT:
        raise ValueError("an amount such as 64chunks, 1000000samples or 20GB")
    return Amount(number=number, unit="bytes" if not found else "samples" if found[2][:1] == "s" else "chunks")


def parse_retain(text: str) -> str | int:
    """Returns "all", "consumed", or the number of ``last N`` or ``N``. Raises ValueError."""
    if text in ("all", "consumed"):
        return text
    number = re.fullmatch(r"(?:last[ :]*)?([0-9]{1,19})", text.strip())
    if number is None or not 1 <= int(number[1]) <= MAX_AMOUNT:
        raise ValueError('"all", "consumed" or a number of chunks from 1')
    return int(number[1])


def _whole(value: Any) -> Any:
    if isinstance(value, str) and "." in value:
        # pydantic would accept 5.0 from a flag.
        raise ValueError("a whole number")
    return value


# Repeatable flags arrive as a tuple of all texts, TOML values as a list or a table.


def _names(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return tuple(name.strip() for text in value for name in text.split(","))
    return tuple(value if isinstance(value, list) else [value])


def _declared(value: Any) -> Declared:
    if isinstance(value, str):
        value = int(value) if value.isdecimal() and len(value) < 10 else _names((value,))
    if not isinstance(value, int | tuple | list):
        raise ValueError("a number of writers, or their names")
    return check_declared(value)


def _columns(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        parts = (name.partition("=") for name in _names(value))
        return tuple((new.strip(), old.strip() if equals else new) for new, equals, old in parts)
    if not isinstance(value, dict | list):
        raise ValueError("names of columns as NEW=OLD")
    return tuple(value.items() if isinstance(value, dict) else ((name, name) for name in value))


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(value, tuple) and all("=" in text for text in value):
        return tuple((name.strip(), item) for name, _, item in (text.partition("=") for text in value))
    if not isinstance(value, dict) or not all(type(item) in (str, int, float, bool) for item in value.values()):
        raise ValueError("settings as NAME=VALUE")
    return tuple((name, str(item).lower() if type(item) is bool else str(item)) for name, item in value.items())


def _written(parse: Callable[[str], Any]) -> BeforeValidator:
    """Reads a value that is a text, as a flag or in TOML, or a whole number in TOML."""
    return BeforeValidator(lambda value: parse(str(value) if type(value) in (str, int) else ""))


OR_NONE: Final = BeforeValidator(lambda value: None if value == "none" else value)
"""For a value that may be "none": no limit, even if a configuration file sets one."""

Whole = Annotated[int, BeforeValidator(_whole)]
FromZero = Annotated[Whole, Interval(ge=0, le=MAX_AMOUNT)]
FromOne = Annotated[Whole, Interval(ge=1, le=MAX_AMOUNT)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Bytes = Annotated[int, Interval(ge=1, le=MAX_AMOUNT), _written(parse_bytes)]
BytesFromZero = Annotated[int, Interval(ge=0, le=MAX_AMOUNT), _written(parse_bytes)]
Ahead = Annotated[Amount, _written(parse_amount)]
Port = Annotated[Whole, Interval(ge=0, le=65535)]
Retain = Annotated[Literal["all", "consumed"] | int, _written(parse_retain)]
Text = Annotated[str, StringConstraints(pattern="^[^\0]+$")]
Names = Annotated[tuple[Annotated[str, AfterValidator(check_consumer)], ...], BeforeValidator(_names)]
Keys = Annotated[tuple[Text, ...], BeforeValidator(_names)]
Writer = Annotated[str, AfterValidator(check_writer_name)]
Writers = Annotated[int | tuple[str, ...], BeforeValidator(_declared)]
OldName = Annotated[str, StringConstraints(pattern="^[^=]+$")]
Columns = Annotated[tuple[tuple[Text, OldName], ...], BeforeValidator(_columns)]
SwiftName = Annotated[str, StringConstraints(pattern="^[a-z][a-z0-9_]*$")]
Pairs = Annotated[tuple[tuple[SwiftName, str], ...], BeforeValidator(_pairs)]
Sequence = Annotated[Whole, Interval(ge=0, le=2**24)]
Token = Annotated[Whole, Interval(ge=0, le=2**31 - 1)]


def _stream(default: Any, metavar: str, example: str = "", **more: Any) -> Any:
    """Returns the field of an option, see `Option`; the default ... makes the option required."""
    shown = f'"{default}"' if isinstance(default, str) else f"{default:g}" if isinstance(default, float) else default
    about = {"metavar": metavar, "example": example or str(shown), **more}
    return field(default=MISSING if default is ... else default, metadata=about)


_source = partial(_stream, table="source")
_row = partial(_stream, table="rows")
_encoding = partial(_stream, table="encoding")
_limit = partial(_stream, table="limits", reload=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """A source of rows: `path` is as the user gave it. If `follow`, it is a directory that other programs write to."""

    path: str = _source(..., "FILE...", '"data.jsonl"')
    """Read rows from JSON lines (also .gz and .zst), Parquet, Arrow, the directory of a Hugging Face data set, a stream
    (a directory with stream.json, or with chunk files and their .completed markers; a URL), standard input (-), a named
    pipe, python:MODULE:FUNCTION (runs this code with all permissions of this command), Megatron's IndexedDataset
    (PREFIX.idx or megatron:PREFIX), or a file of such prefixes (megatron-blend:FILE). Repeat the option, or give
    several files or a quoted pattern after it; sources are read in this order, each to its present end: for files that
    are still being written use --follow."""
    follow: bool = _source(False, "DIRECTORY", '"incoming"')
    """Read files that other programs write to this directory, each as soon as it is complete."""
    weight: Positive | None = _source(None, "NUMBER", "0.7", repeat=True)
    """Mix the sources by weight instead of reading one after another. Belongs to the preceding --source or --follow;
    give it for all or for none. Several files of one --source share its weight evenly."""
    pattern: str = _source("*.jsonl", "GLOB", needs="follow")
    """Names of the files in a followed directory, also with .gz or .zst appended. Default: *.jsonl."""
    finished_by: Literal["rename", "marker", "idle"] = _source("rename", "rename|marker|idle", needs="follow")
    """When a file in a followed directory is complete: when it appears under its name, when its marker exists, or when
    it has not grown for --idle-seconds. Default: rename."""
    marker: str = _source("{name}.done", "NAME", needs="follow")
    """Name of a file's marker; {name} is the name of the file. Default: {name}.done."""
    idle_s: Positive = _source(60.0, "SECONDS", needs="follow", name="idle_seconds")
    """Time without growth after which a file is complete. Default: 60."""
    end_marker: str = _source("_END", "NAME", needs="follow")
    """No more files follow once a file of this name exists in a followed directory. Default: _END."""
    resume: Literal["skip", "append"] = _source("skip", "skip|append")
    """How a restart reads standard input or a pipe: skip as many rows as are published, or append all rows as new.
    Default: skip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a run may be ahead of its readers, and what it may delete."""

    max_ahead: Annotated[Ahead | None, OR_NONE] = _limit(None, "AMOUNT|none", '"64chunks"')
    """Wait while this much is published ahead of the slowest reader: 64chunks, 1000000samples, 20GB. Default: none, no
    limit."""
    max_disk: Annotated[Bytes | None, OR_NONE] = _limit(None, "SIZE|none", '"500GB"')
    """Wait before the stream takes more than this: 500GB, 2TiB. Default: none, no limit."""
    min_free_disk: Annotated[BytesFromZero | None, OR_NONE] = _limit(None, "SIZE|none", '"50GB"')
    """Wait before less than this is free on the stream's filesystem. Default: none, no limit."""
    retain: Retain = _limit("all", "all|consumed|N", '"consumed"')
    """Which chunks to keep: all, those that a consumer still needs, or these and the last N. Default: all."""
    consumers: Names = _limit((), "NAME,...", '["train"]', repeat=True)
    """With --retain: delete nothing before these consumers have registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run, made and checked by `given.assemble`. Positions refer to sources by their order."""

    sources: tuple[SourceSettings, ...]
    limits: Limits = Limits()
    out: str = _stream(..., "STREAM", '"/shared/stream"')
    """The stream's directory, created if it does not exist; or its URL in an object store: s3://BUCKET/PREFIX, or any
    other fsspec URL."""
    samples_per_chunk: Annotated[Whole, Interval(ge=1, le=MAX_SAMPLES_PER_CHUNK)] = _stream(..., "N", "1000")
    """Rows per chunk. Cannot change for a stream."""
    writer: Writer | None = _stream(None, "NAME", '"vllm-3"')
    """Write to the stream together with other runs, each under its own name. Sources and restarts are those of this
    writer alone; limits hold for the whole stream, so give them to all. Default: this run is the only producer."""
    writers: Writers | None = _stream(None, "N|NAME,...", "8", needs="writer")
    """With --writer: how many writers the stream has, or their names; it ends when all of them have ended. Cannot
    change for a stream. Default: 0, it ends by lazyshard-producer end."""
    rate: Annotated[Positive | None, OR_NONE] = _stream(None, "SAMPLES_PER_SECOND|none", "500", reload=True)
    """Publish at most this many samples per second. Default: none, no limit."""
    metrics_port: Annotated[Port | None, OR_NONE] = _stream(None, "PORT|none", "9464")
    """Serve Prometheus metrics on this TCP port; 0 chooses a free port and reports it. Default: none."""
    metrics_host: Text = _stream("127.0.0.1", "ADDRESS")
    """Address to serve metrics on. Anyone who can connect can read them. Default: 127.0.0.1."""
    log_every_s: Positive = _stream(60.0, "SECONDS", name="log_every_seconds", reload=True)
    """Interval between progress lines in the log, without a terminal. Default: 60."""
    spool: str | None = _stream(None, "DIRECTORY", '"/var/lib/lazyshard"')
    """Directory for chunks that are not yet uploaded to an object store, on a disk of this machine that outlives the
    process. Default: lazyshard in the user's state directory, ~/.local/state."""
    max_spool: Bytes = _stream(4 << 30, "SIZE", '"4GiB"')
    """Wait before more than this is pending upload to an object store; one chunk is always allowed. Default: 4GiB."""
    store_patience_s: NotNegative = _stream(600.0, "SECONDS", name="store_patience_seconds")
    """How long an object store may be unavailable before the run fails. Default: 600."""
    transform: str | None = _row(None, "MODULE:FUNCTION", '"my_rows:clean"')
    """Apply this function to each row, a dict. It gets (row) or (row, index) and returns a row, None to drop the row,
    or a list of rows. Runs code: MODULE is imported and the function called, with all permissions of this command."""
    where: str | None = _row(None, "MODULE:FUNCTION", '"my_rows:is_wanted"')
    """Keep only rows for which this function returns true. It gets (row) or (row, index). Runs code, as transform."""
    columns: Columns = _row((), "NEW=OLD,...", '{ prompt = "question", response = "answer" }', repeat=True)
    """Keep only these columns, renamed from OLD to NEW; a NAME alone is kept as it is."""
    embed: Keys = _row((), "NAME,...", '["images", "audios"]', repeat=True)
    """Replace paths under these keys, or lists of them, by the bytes of the files, after the options above. A missing
    or truncated file is a bad row. Publishes any file that a row names, with all permissions of this command."""
    shuffle: Annotated[Whole, Interval(ge=0, le=MAX_SHUFFLE)] = _row(0, "N", "10000")
    """Shuffle the rows in blocks of N. Default: 0, keep their order."""
    seed: FromZero = _row(0, "N")
    """Seed of --shuffle and --balance. Default: 0."""
    balance: Annotated[FromOne | None, OR_NONE] = _row(None, "RANKS|none", "64")
    """Balance rows, or packs, by cost among this many data-parallel ranks, one chunk for each rank at a time, so that
    the ranks have equal cost in each step. Holds all rows of these chunks in memory. Default: none, keep the order."""
    micro_batch_size: FromOne = _row(1, "N", "4", needs="balance")
    """With --balance: rows per micro batch of a rank. Default: 1."""
    cost_per_token: NotNegative = _row(PER_TOKEN, "NUMBER", needs="balance")
    """With --balance: linear cost of a token; only its ratio to --cost-per-token-squared matters. Default: 1."""
    cost_per_token_squared: NotNegative = _row(PER_TOKEN_SQUARED, "NUMBER", needs="balance")
    """With --balance: cost per square of a row's tokens, about --cost-per-token / (6 * hidden size). Default: 4e-05."""
    cost_per_patch: NotNegative = _row(0.0, "NUMBER", "0.3", needs="balance")
    """With --balance: cost of a patch of an image or a video, which the vision encoder processes. Default: 0."""
    pack: Annotated[Whole, Interval(ge=0, le=2**32 - 1)] = _row(0, "TOKENS", "8192")
    """Publish packs of whole rows with at most this many tokens. --samples-per-chunk and --rate then count packs.
    Default: 0, no packing."""
    pack_patches: Annotated[Whole, Interval(ge=0, le=2**32 - 1)] = _row(0, "PATCHES", "16384", needs="pack")
    """With --pack: at most this many patches of images and videos in a pack, which the vision encoder processes. From
    the encoder, or a row's key patches; a row without has none. Default: 0, no limit."""
    length_field: Annotated[str, MinLen(1)] = _row("length", "NAME", needs="pack balance")
    """With --pack or --balance: key of a row's number of tokens. Not needed with --encode or --measure, which count the
    tokens. Default: length."""
    measure: Annotated[str, MinLen(1)] | None = _row(None, "DIRECTORY|swift|MODULE:FUNCTION", '"/models/Qwen3-8B"')
    """Store each row's number of tokens in the seal and publish the row unchanged. Counted by the tokenizer in this
    directory; by swift, as ms-swift trains the row, with --model; or by your function, which gets a row and returns a
    number. Runs code, as transform. Default: lengths come from --encode, or with the rows of a stream."""
    measure_field: str | None = _row(None, "NAME", '"text"', needs="measure")
    """With --measure DIRECTORY: the key of the text to measure. Default: messages with the chat template, or else
    text."""
    pack_buffer: Annotated[Whole, Interval(ge=1, le=MAX_SHUFFLE)] = _row(10_000, "N", needs="pack")
    """With --pack: number of rows to choose from. Default: 10000."""
    pack_buffer_bytes: Bytes = _row(1 << 30, "SIZE", '"1GiB"', needs="pack")
    """With --pack: pack fewer rows if they have this many bytes as published; bounds the memory. Default: 1GiB."""
    split: Sequence = _row(0, "TOKENS", "4096")
    """Publish sequences of exactly this many tokens, as for pre-training: the input_ids of all rows are concatenated
    and cut. Each token appears once; only the last sequence may be shorter. Default: 0, no splitting."""
    split_bos: Annotated[Token | None, OR_NONE] = _row(None, "TOKEN|none", "1", needs="split")
    """With --split: add this token before each row. Default: none."""
    split_eos: Annotated[Token | None, OR_NONE] = _row(None, "TOKEN|none", "2", needs="split")
    """With --split: add this token after each row, or as a separator between rows. Default: none."""
    split_every_bos: Annotated[Token | None, OR_NONE] = _row(None, "TOKEN|none", "1", needs="split")
    """With --split: add this token before each sequence that does not begin with a row's BOS. Default: none."""
    split_every_eos: Annotated[Token | None, OR_NONE] = _row(None, "TOKEN|none", "2", needs="split")
    """With --split: add this token after each sequence that does not end with a row's EOS. Default: none."""
    split_overlap: Annotated[Whole, Interval(ge=0, le=1)] = _row(0, "0|1", "1", needs="split")
    """With --split: 1 makes each sequence one token longer and starts the next sequence with that token, as Megatron's
    GPTDataset does. Default: 0."""
    pad: Sequence = _row(0, "TOKENS", "4096")
    """Pad the input_ids of each row to exactly this many, and add an attention_mask. A longer row is a bad row.
    Default: 0, no padding."""
    pad_token: Token = _row(0, "TOKEN", needs="pad")
    """With --pad: the padding token. Default: 0."""
    workers: Annotated[Whole, Interval(ge=0, le=1024)] = _row(0, "N", "4")
    """Number of processes for a slow --transform, --encode or --measure; the order is kept. Default: 0, this process
    only."""
    on_bad_row: Literal["fail", "skip", "quarantine"] = _row("fail", "fail|skip|quarantine", '"quarantine"')
    """What to do with a row that is not a JSON object, is too long, or for which the transform or the encoder raises:
    end the run, skip the row, or write it to STREAM/quarantine.jsonl. Default: fail."""
    max_bad_rows: Annotated[FromZero | None, OR_NONE] = _row(None, "N|none", "1000", reload=True)
    """Number of rows that may be skipped or quarantined; one more ends the run. Default: 1000; none means no limit."""
    max_row_bytes: Annotated[Bytes, Le(1 << 40)] = _row(64 << 20, "SIZE", '"64MiB"')
    """Size of the longest accepted row; bounds the memory. Default: 64MiB."""
    encode: str | None = _encoding(None, "swift|MODULE:FUNCTION", '"swift"')
    """Encode each row, after the options above: swift, with ms-swift's template as in training; or your function, which
    gets a row and returns a dict that may contain numpy arrays. Runs code, as transform. Cannot change for a stream."""
    model: str | None = _encoding(None, "DIRECTORY", '"/models/Qwen3-8B"')
    """With --encode or --measure swift: the model's directory, or a name known to ms-swift. Weights are not loaded."""
    template: str | None = _encoding(None, "NAME", '"qwen3"')
    """With --encode or --measure swift: the template, as --template in training. Default: the model's."""
    max_length: Annotated[Whole, Interval(ge=1, le=MAX_LENGTH)] | None = _encoding(None, "N", "8192")
    """With --encode or --measure swift: maximum tokens of a sample, as --max_length in training; a longer row is a bad
    row, unless truncation_strategy truncates it. Default: the model's maximum; no maximum with --split."""
    encode_option: Pairs = _encoding((), "NAME=VALUE", '{ truncation_strategy = "left" }', repeat=True)
    """With --encode or --measure swift: any other ms-swift option that affects encoding, by its ms-swift name:
    truncation_strategy=left, loss_scale=last_round. Repeatable."""

    @property
    def place(self) -> str:
        """Where this run publishes: the stream, or the folder of its writer in it."""
        return self.out if self.writer is None else os.path.join(self.out, WRITERS, self.writer)

    @property
    def form(self) -> Literal["split", "pad"] | None:
        """Whether rows are split or padded, so that they differ from the encoder's output."""
        return "split" if self.split else "pad" if self.pad else None

    @property
    def swift(self) -> dict[str, Any]:
        """The settings with which ms-swift encodes."""
        # Rows that are split may be longer than the model's maximum.
        longest = MAX_LENGTH if self.max_length is None and self.split else self.max_length
        return {"model": self.model, "template": self.template, "max_length": longest, "options": self.encode_option}

    @property
    def splitting(self) -> Split | None:
        """How rows are split into sequences; None without --split."""
        more = {name: getattr(self, f"split_{name}") for name in ("bos", "eos", "every_bos", "every_eos", "overlap")}
        return Split(self.split, **more) if self.split else None

    @property
    def padding(self) -> Pad | None:
        """How rows are padded; None without --pad."""
        return Pad(self.pad, self.pad_token) if self.pad else None


class Option(NamedTuple):
    """An option of a run."""

    field: str  # its name in `owner`, the class of settings that it belongs to
    owner: type
    help: str  # its docstring, on one line
    metavar: str
    example: str
    default: Any  # MISSING if the option is required
    name: str  # its TOML key
    table: str = ""
    needs: str = ""  # fields of which at least one must be set for the option to have an effect
    repeat: bool = False  # whether its flag may be given several times
    reload: bool = False  # whether it may change during a run

    @property
    def flag(self) -> str:
        """The name of the option on the command line."""
        return flag(self.name)

    def of(self, settings: Settings | SourceSettings) -> Any:
        """Returns the option's value."""
        return getattr(settings.limits if self.owner is Limits else settings, self.field)  # type: ignore[union-attr]

    def is_set(self, settings: Settings | SourceSettings) -> bool:
        """Whether the option is not required and its value differs from the default."""
        return self.default is not MISSING and self.of(settings) != self.default

    def show(self, settings: Settings | SourceSettings) -> str:
        """Returns the option's value as text for users."""
        value = self.of(settings)
        if isinstance(value, tuple):
            return ", ".join(one if isinstance(one, str) else "=".join(one) for one in value) or "none"
        if value is not None and self.metavar.startswith("SIZE"):
            return size(value)
        return "none" if value is None else str(value)


def flag(name: str) -> str:
    """Returns the flag of the option with this TOML key."""
    return "--source" if name == "path" else "--" + name.replace("_", "-")


def _options(owner: type) -> Iterator[Option]:
    help: dict[str, str] = {}
    # The docstring after each field, which Python does not keep; there is none if the source is not installed.
    with contextlib.suppress(OSError, TypeError):
        made: Any = ast.parse(inspect.getsource(owner)).body[0]
        for before, after in itertools.pairwise(made.body):
            if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr):
                help[ast.unparse(before.target)] = " ".join(ast.literal_eval(after.value).split())
    for one in fields(owner):
        if one.metadata:
            more = {"default": one.default, "name": one.name, **one.metadata}
            yield Option(one.name, owner, help.get(one.name, ""), **more)


PATH, FOLLOW, *SOURCE_OPTIONS = _options(SourceSettings)
"""The options of a source. On the command line all except the weight apply to every source of a suitable kind."""

OPTIONS: Final = sorted((*_options(Settings), *_options(Limits)), key=lambda one: list(PANELS).index(one.table))
"""The options of a run, in the order of the help."""

BY_NAME: Final = {one.name: one for one in (PATH, FOLLOW, *SOURCE_OPTIONS, *OPTIONS)}
