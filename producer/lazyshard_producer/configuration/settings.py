"""What a run is to do: one model, of which flags, TOML keys, help, example and checks are made.

The docstring of an option is its help: what it does, in a sentence or two, and its default where it has one.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

from annotated_types import Ge, Gt, Interval, Le, MinLen
from pydantic import AfterValidator, BeforeValidator, StringConstraints

from lazyshard.cli.output import size
from lazyshard.format.records import MAX_SAMPLES_PER_CHUNK, parse_size
from lazyshard.format.state import check_consumer
from lazyshard.plan.sequences import Pad, Split
from lazyshard.plan.shuffle import PER_TOKEN, PER_TOKEN_SQUARED

SWIFT: Final = "swift"  # what --encode calls ms-swift
MAX_AMOUNT: Final = 2**63 - 1
MAX_SHUFFLE: Final = 10**9  # rows that are held to be put into another order
MAX_LENGTH: Final = 2**31 - 1  # tokens of a sample that ms-swift can be told
PANELS: Final = {
    "source": "Sources",
    "": "Stream",
    "rows": "Rows",
    "encoding": "Encoding: rows hold what the trainer needs",
    "limits": "Limits: how far ahead of training, and what is deleted",
}
"""Headings of the help, by TOML table: "" for the top of the file, "source" for each ``[[source]]``."""


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
    """Returns a number of bytes, rounded down; raises ValueError if it is none."""
    try:
        return parse_size(text, 0)
    except ValueError:
        raise ValueError("a size such as 20GB or 512MiB, or a number of bytes") from None


def parse_amount(text: str) -> Amount:
    """Returns an amount of chunks (where no unit is given), samples or bytes; raises ValueError if it is none."""
    found = re.fullmatch(r"([0-9.]{1,19}) *(|chunks?|samples?)", text.strip().lower())
    try:
        number = int(found[1]) if found else parse_bytes(text)
    except ValueError:
        number = MAX_AMOUNT + 1
    if number > MAX_AMOUNT:
        raise ValueError("an amount such as 64chunks, 1000000samples or 20GB")
    return Amount(number=number, unit="bytes" if not found else "samples" if found[2][:1] == "s" else "chunks")


def parse_retain(text: str) -> str | int:
    """Returns what a stream keeps: "all", "consumed", or the number of ``last N`` or ``N``; else raises ValueError."""
    if text in ("all", "consumed"):
        return text
    number = re.fullmatch(r"(?:last[ :]*)?([0-9]{1,19})", text.strip())
    if number is None or not 1 <= int(number[1]) <= MAX_AMOUNT:
        raise ValueError('"all", "consumed" or a number of chunks from 1')
    return int(number[1])


def _whole(value: Any) -> Any:
    if isinstance(value, str) and "." in value:
        # 5.0 behind a flag is a whole number to pydantic.
        raise ValueError("a whole number")
    return value


# Of flags that may be repeated all texts come as a tuple, from TOML a list or a table.


def _names(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return tuple(name.strip() for text in value for name in text.split(","))
    return tuple(value if isinstance(value, list) else [value])


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
    """Reads a value that is written as text, as a flag or in TOML, or as a whole number there."""
    return BeforeValidator(lambda value: parse(str(value) if type(value) in (str, int) else ""))


OR_NONE: Final = BeforeValidator(lambda value: None if value == "none" else value)
"""Of a value that may be "none": no limit, also where a configuration file sets one."""

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
OldName = Annotated[str, StringConstraints(pattern="^[^=]+$")]
Columns = Annotated[tuple[tuple[Text, OldName], ...], BeforeValidator(_columns)]
SwiftName = Annotated[str, StringConstraints(pattern="^[a-z][a-z0-9_]*$")]
Pairs = Annotated[tuple[tuple[SwiftName, str], ...], BeforeValidator(_pairs)]
Sequence = Annotated[Whole, Interval(ge=0, le=2**24)]
Token = Annotated[Whole, Interval(ge=0, le=2**31 - 1)]


def _stream(default: Any, metavar: str, example: str = "", **more: Any) -> Any:
    """Returns the field of an option, see `Option`; one with the default ... has to be given."""
    shown = f'"{default}"' if isinstance(default, str) else f"{default:g}" if isinstance(default, float) else default
    about = {"metavar": metavar, "example": example or str(shown), **more}
    return field(default=MISSING if default is ... else default, metadata=about)


_source = partial(_stream, table="source")
_row = partial(_stream, table="rows")
_encoding = partial(_stream, table="encoding")
_limit = partial(_stream, table="limits", reload=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Where rows come from: `path` is as the user gave it, `follow` a directory that other programs write into."""

    path: str = _source(..., "FILE...", '"data.jsonl"')
    """Where rows come from: JSON lines (.gz and .zst too), Parquet, Arrow, the directory of a Hugging Face data set, a
    stream (a directory with stream.json, or with chunk files and their .completed markers; a URL), - for standard
    input, a named pipe, python:MODULE:FUNCTION (which runs that code, with all rights of this command), PREFIX.idx or
    megatron:PREFIX for Megatron's IndexedDataset, megatron-blend:FILE for a file of such prefixes. Repeat it, or give
    several files after it, or a quoted pattern; they are read in this order."""
    follow: bool = _source(False, "DIRECTORY", '"incoming"')
    """A directory into which other programs write files: takes them as they are completed."""
    weight: Positive | None = _source(None, "NUMBER", "0.7", repeat=True)
    """Mix the sources by these shares, not one after another. Belongs to the --source or --follow before it: all have
    one, or none. Several files of one --source divide theirs evenly."""
    pattern: str = _source("*.jsonl", "GLOB", needs="follow")
    """Names of the files in a followed directory; with .gz or .zst behind too. Default: *.jsonl."""
    finished_by: Literal["rename", "marker", "idle"] = _source("rename", "rename|marker|idle", needs="follow")
    """When a file in a followed directory is complete: as it appears under its name, when its marker is there, or when
    it has not grown for --idle-seconds. Default: rename."""
    marker: str = _source("{name}.done", "NAME", needs="follow")
    """Name of a file's marker, with {name} for the file's own. Default: {name}.done."""
    idle_s: Positive = _source(60.0, "SECONDS", needs="follow", name="idle_seconds")
    """How long a file must not have grown to be complete. Default: 60."""
    end_marker: str = _source("_END", "NAME", needs="follow")
    """A file of this name in a followed directory says that no other comes. Default: _END."""
    resume: Literal["skip", "append"] = _source("skip", "skip|append")
    """What a second start does with standard input or a pipe: skip as many rows as are published, or take all as new
    ones. Default: skip."""
    indexed_rows: Literal["document", "sequence"] = _source("document", "document|sequence")
    """What of Megatron's .idx files makes a row: a document with all its sequences, or each sequence. Default:
    document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far ahead of its readers a run may get, and what it may delete."""

    max_ahead: Annotated[Ahead | None, OR_NONE] = _limit(None, "AMOUNT|none", '"64chunks"')
    """Wait where so much is published beyond the slowest reader: 64chunks, 1000000samples, 20GB. Default: none, no
    limit."""
    max_disk: Annotated[Bytes | None, OR_NONE] = _limit(None, "SIZE|none", '"500GB"')
    """Wait where the stream takes so much: 500GB, 2TiB. Default: none, no limit."""
    min_free_disk: Annotated[BytesFromZero | None, OR_NONE] = _limit(None, "SIZE|none", '"50GB"')
    """Wait where less than this is free on the stream's filesystem. Default: none, no limit."""
    retain: Retain = _limit("all", "all|consumed|N", '"consumed"')
    """Which chunks stay: all, those that some consumer still needs, or besides those the last N. Default: all."""
    consumers: Names = _limit((), "NAME,...", '["train"]', repeat=True)
    """With --retain: nothing is deleted before these consumers have registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is to do; `assembly.assemble` makes and checks it. Positions name sources by their order."""

    sources: tuple[SourceSettings, ...]
    limits: Limits = Limits()
    out: str = _stream(..., "STREAM", '"/shared/stream"')
    """The stream's directory, made if it is not there; or its place in an object store: s3://BUCKET/PREFIX, any URL of
    fsspec."""
    samples_per_chunk: Annotated[Whole, Interval(ge=1, le=MAX_SAMPLES_PER_CHUNK)] = _stream(..., "N", "1000")
    """Rows in a chunk. Never changes for a stream."""
    rate: Annotated[Positive | None, OR_NONE] = _stream(None, "SAMPLES_PER_SECOND|none", "500", reload=True)
    """Publish no faster than this. Default: none, no limit."""
    metrics_port: Annotated[Port | None, OR_NONE] = _stream(None, "PORT|none", "9464")
    """Serve metrics for Prometheus on this TCP port; 0 takes a free one and says which. Default: none are served."""
    metrics_host: Text = _stream("127.0.0.1", "ADDRESS")
    """Address of that port. Whoever reaches it can read the metrics. Default: 127.0.0.1."""
    log_every_s: Positive = _stream(60.0, "SECONDS", name="log_every_seconds", reload=True)
    """Time between two lines of the log, where there is no terminal. Default: 60."""
    spool: str | None = _stream(None, "DIRECTORY", '"/var/lib/lazyshard"')
    """Where chunks lie that are on their way to an object store. A disk of this machine that outlives the process.
    Default: lazyshard in the user's folder for state, ~/.local/state."""
    max_spool: Bytes = _stream(4 << 30, "SIZE", '"4GiB"')
    """Wait where chunks of this size are on their way to an object store; one may always be. Default: 4GiB."""
    store_patience_s: NotNegative = _stream(600.0, "SECONDS", name="store_patience_seconds")
    """How long an object store may be away before the run fails. Default: 600."""
    transform: str | None = _row(None, "MODULE:FUNCTION", '"my_rows:clean"')
    """A function that gets (row), a dict, or (row, index) and returns a row, None for none, or a list of rows. This
    runs code: MODULE is imported and the function called, with all rights of this command."""
    where: str | None = _row(None, "MODULE:FUNCTION", '"my_rows:is_wanted"')
    """A function that gets (row) or (row, index) and says whether the row is taken. Runs code, as transform does."""
    columns: Columns = _row((), "NEW=OLD,...", '{ prompt = "question", response = "answer" }', repeat=True)
    """Rows hold just these columns, under new names; NAME alone keeps its name."""
    shuffle: Annotated[Whole, Interval(ge=0, le=MAX_SHUFFLE)] = _row(0, "N", "10000")
    """Shuffle, N rows at a time. Default: 0, the order in which they come."""
    seed: FromZero = _row(0, "N")
    """Seed of --shuffle and --balance. Default: 0."""
    balance: Annotated[FromOne | None, OR_NONE] = _row(None, "RANKS|none", "64")
    """Deal rows, or packs, by cost, a chunk for each of so many data-parallel ranks at a time, so that those that meet
    in a step cost the same. Holds all rows of these chunks in memory. Default: none, as they come."""
    micro_batch_size: FromOne = _row(1, "N", "4", needs="balance")
    """Rows of one rank in a micro batch, for --balance. Default: 1."""
    cost_per_token: NotNegative = _row(PER_TOKEN, "NUMBER", needs="balance")
    """What a token costs by itself, for --balance; only its ratio to --cost-per-token-squared counts. Default: 1."""
    cost_per_token_squared: NotNegative = _row(PER_TOKEN_SQUARED, "NUMBER", needs="balance")
    """What a row costs for the square of its tokens, for --balance: about 1 / (6 * hidden size) of what a token costs.
    Default: 4e-05."""
    pack: Annotated[Whole, Interval(ge=0, le=2**32 - 1)] = _row(0, "TOKENS", "8192")
    """Publish packs: whole rows put together, at most so many tokens in a pack. --samples-per-chunk and --rate then
    count packs. Default: 0, rows as they are."""
    length_field: Annotated[str, MinLen(1)] = _row("length", "NAME", needs="pack balance")
    """Where --pack and --balance find the tokens of a row: a whole number under this key. With --encode or --measure
    these tell them. Default: length."""
    measure: Annotated[str, MinLen(1)] | None = _row(None, "DIRECTORY|swift|MODULE:FUNCTION", '"/models/Qwen3-8B"')
    """Seal how many tokens each row has, and publish it as it is: by the tokenizer in this folder; swift, as ms-swift
    trains the row, with --model; or by a function of yours that gets a row and returns a number. Runs code, as
    transform does. Default: lengths come from --encode, or with the rows of a stream."""
    measure_field: str | None = _row(None, "NAME", '"text"', needs="measure")
    """With --measure DIRECTORY: the key of the text to measure. Default: messages by the chat template, or else
    text."""
    pack_buffer: Annotated[Whole, Interval(ge=1, le=MAX_SHUFFLE)] = _row(10_000, "N", needs="pack")
    """Rows among which --pack looks for those that fit together. Default: 10000."""
    pack_buffer_bytes: Bytes = _row(1 << 30, "SIZE", '"1GiB"', needs="pack")
    """Bytes of these rows, as they are published, with which they are packed though they are fewer; bounds the memory.
    Default: 1GiB."""
    split: Sequence = _row(0, "TOKENS", "4096")
    """Publish sequences of exactly so many tokens: the input_ids of all rows, one row behind the other, cut wherever
    that falls, as for pre-training. Each token comes once; only the last sequence may be shorter. Default: 0, rows as
    they are."""
    split_bos: Annotated[Token | None, OR_NONE] = _row(None, "TOKEN|none", "1", needs="split")
    """With --split: this token goes in front of each row. Default: none."""
    split_eos: Annotated[Token | None, OR_NONE] = _row(None, "TOKEN|none", "2", needs="split")
    """With --split: this token goes behind each row, or between rows, as a separator does. Default: none."""
    split_every_bos: Annotated[Token | None, OR_NONE] = _row(None, "TOKEN|none", "1", needs="split")
    """With --split: this token goes in front of each sequence that does not begin with a row's BOS. Default: none."""
    split_every_eos: Annotated[Token | None, OR_NONE] = _row(None, "TOKEN|none", "2", needs="split")
    """With --split: this token goes behind each sequence that does not end in a row's EOS. Default: none."""
    split_overlap: Annotated[Whole, Interval(ge=0, le=1)] = _row(0, "0|1", "1", needs="split")
    """With --split: 1 for sequences of one token more, with which the next one begins, as Megatron's GPTDataset has
    them. Default: 0."""
    pad: Sequence = _row(0, "TOKENS", "4096")
    """Publish each row with exactly so many input_ids: padded, with an attention_mask. A longer row is a bad row.
    Default: 0, rows as they are."""
    pad_token: Token = _row(0, "TOKEN", needs="pad")
    """With which token --pad pads. Default: 0."""
    workers: Annotated[Whole, Interval(ge=0, le=1024)] = _row(0, "N", "4")
    """Processes that run a slow --transform, --encode or --measure; the order is kept. Default: 0, this process."""
    on_bad_row: Literal["fail", "skip", "quarantine"] = _row("fail", "fail|skip|quarantine", '"quarantine"')
    """What becomes of a row that is no JSON object, is too long, or at which the transform or the encoder raised: the
    run ends there, it is left out, or it goes to STREAM/quarantine.jsonl. Default: fail."""
    max_bad_rows: Annotated[FromZero | None, OR_NONE] = _row(None, "N|none", "1000", reload=True)
    """So many rows may be left out or quarantined; one more ends the run. Default: 1000; none means no limit."""
    max_row_bytes: Annotated[Bytes, Le(1 << 40)] = _row(64 << 20, "SIZE", '"64MiB"')
    """Longest row that is accepted; bounds the memory. Default: 64MiB."""
    encode: str | None = _encoding(None, "swift|MODULE:FUNCTION", '"swift"')
    """Encode each row, after the options above: swift, with ms-swift's template as training would; or a function of
    yours that gets a row and returns a dict, which may hold numpy arrays. Runs code, as transform does. Never changes
    for a stream."""
    model: str | None = _encoding(None, "DIRECTORY", '"/models/Qwen3-8B"')
    """With --encode or --measure swift: the model's folder, or its name where ms-swift finds it. Its weights are not
    loaded."""
    template: str | None = _encoding(None, "NAME", '"qwen3"')
    """With --encode or --measure swift: the template, as --template in training. Default: the model's."""
    max_length: Annotated[Whole, Interval(ge=1, le=MAX_LENGTH)] | None = _encoding(None, "N", "8192")
    """With --encode or --measure swift: tokens of a sample, as --max_length in training; a longer row is a bad row,
    unless truncation_strategy says otherwise. Default: what the model takes; any with --split."""
    encode_option: Pairs = _encoding((), "NAME=VALUE", '{ truncation_strategy = "left" }', repeat=True)
    """With --encode or --measure swift: any other option of ms-swift by which it encodes, under the name that it has
    there: truncation_strategy=left, loss_scale=last_round. Repeat it for several."""

    @property
    def form(self) -> Literal["split", "pad"] | None:
        """Whether rows are cut or padded: then they are no longer what an encoder has made."""
        return "split" if self.split else "pad" if self.pad else None

    @property
    def swift(self) -> dict[str, Any]:
        """By what ms-swift encodes."""
        # Rows that are cut may be longer than what the model takes.
        longest = MAX_LENGTH if self.max_length is None and self.split else self.max_length
        return {"model": self.model, "template": self.template, "max_length": longest, "options": self.encode_option}

    @property
    def splitting(self) -> Split | None:
        """How rows are cut into sequences; None where they are not."""
        more = {name: getattr(self, f"split_{name}") for name in ("bos", "eos", "every_bos", "every_eos", "overlap")}
        return Split(self.split, **more) if self.split else None

    @property
    def padding(self) -> Pad | None:
        """How rows are padded; None where they are not."""
        return Pad(self.pad, self.pad_token) if self.pad else None


class Option(NamedTuple):
    """An option of a run."""

    field: str  # its name in `owner`, the class of settings that it belongs to
    owner: type
    help: str  # its docstring, on one line
    metavar: str  # what stands for the value in the help
    example: str
    default: Any  # MISSING where it has to be given
    name: str  # its TOML key
    table: str = ""
    needs: str = ""  # the fields without all of which it means nothing
    repeat: bool = False  # whether its flag may be given several times
    reload: bool = False  # whether it may change while it runs

    @property
    def flag(self) -> str:
        """What it is called on the command line."""
        return flag(self.name)

    def of(self, settings: Settings | SourceSettings) -> Any:
        """Returns its value."""
        return getattr(settings.limits if self.owner is Limits else settings, self.field)  # type: ignore[union-attr]

    def is_set(self, settings: Settings | SourceSettings) -> bool:
        """Whether it can be left out, and has another value than by default."""
        return self.default is not MISSING and self.of(settings) != self.default

    def show(self, settings: Settings | SourceSettings) -> str:
        """Returns its value for people."""
        value = self.of(settings)
        if isinstance(value, tuple):
            return ", ".join(one if isinstance(one, str) else "=".join(one) for one in value) or "none"
        if value is not None and self.metavar.startswith("SIZE"):
            return size(value)
        return "none" if value is None else str(value)


def flag(name: str) -> str:
    """Returns the flag of an option."""
    return "--source" if name == "path" else "--" + name.replace("_", "-")


def _options(owner: type) -> Iterator[Option]:
    help: dict[str, str] = {}
    # The text behind each field, which Python drops; none where the source is not installed.
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
"""Those of a source. On the command line all but the weight hold for every source that they can be about."""

OPTIONS: Final = sorted((*_options(Settings), *_options(Limits)), key=lambda one: list(PANELS).index(one.table))
"""Those of a run, in the order of the help."""

BY_NAME: Final = {one.name: one for one in (PATH, FOLLOW, *SOURCE_OPTIONS, *OPTIONS)}
