"""What a run is to do: one model, of which flags, TOML keys, help, example and checks are made.

The docstring of an option is its help: what it does, in a sentence or two, and its default where it has one.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from annotated_types import Ge, Gt, Interval, Le, MinLen
from pydantic import AfterValidator, BeforeValidator, StringConstraints

from lazyshard.format.cursor import check_consumer
from lazyshard.format.records import MAX_SAMPLES_PER_CHUNK
from lazyshard.plan.balance import PER_TOKEN, PER_TOKEN_SQUARED
from lazyshard.plan.sequences import Pad, Split
from lazyshard_producer.configuration import quantities
from lazyshard_producer.configuration.quantities import MAX_AMOUNT, MAX_ROW_BYTES, Amount

SWIFT: Final = "swift"  # what --encode calls ms-swift
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


def _written(parse: Callable[[str], Any]) -> BeforeValidator:
    """Reads a value that is written as text, as a flag or in TOML, or as a whole number there."""
    return BeforeValidator(lambda value: parse(str(value) if type(value) in (str, int) else ""))


OR_NONE: Final = BeforeValidator(lambda value: None if value == "none" else value)
"""Of a value that may be "none": no limit, also where a configuration file sets one."""

Whole = Annotated[int, BeforeValidator(quantities.read_whole)]
FromZero = Annotated[Whole, Interval(ge=0, le=MAX_AMOUNT)]
FromOne = Annotated[Whole, Interval(ge=1, le=MAX_AMOUNT)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Bytes = Annotated[int, Interval(ge=1, le=MAX_AMOUNT), _written(quantities.parse_bytes)]
BytesFromZero = Annotated[int, Interval(ge=0, le=MAX_AMOUNT), _written(quantities.parse_bytes)]
AheadAmount = Annotated[Amount, _written(quantities.parse_amount)]
Retain = Annotated[Literal["all", "consumed"] | int, _written(quantities.parse_retain)]
Text = Annotated[str, StringConstraints(pattern="^[^\0]+$")]
OldName = Annotated[str, StringConstraints(pattern="^[^=]+$")]
SwiftName = Annotated[str, StringConstraints(pattern="^[a-z][a-z0-9_]*$")]
Names = Annotated[tuple[Annotated[str, AfterValidator(check_consumer)], ...], BeforeValidator(quantities.read_names)]
Columns = Annotated[tuple[tuple[Text, OldName], ...], BeforeValidator(quantities.read_columns)]
Pairs = Annotated[tuple[tuple[SwiftName, str], ...], BeforeValidator(quantities.read_pairs)]
Buffer = Annotated[Whole, Interval(ge=1, le=MAX_SHUFFLE)]
Sequence = Annotated[Whole, Interval(ge=0, le=2**24)]
Token = Annotated[Whole, Interval(ge=0, le=2**31 - 1)]
Port = Annotated[Whole, Interval(ge=0, le=65535)]


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
class EncodingSettings:
    """How rows are encoded: `encode` is "swift" or "MODULE:FUNCTION". Can be pickled.

    Of ms-swift are the others but `form`: "split" or "pad" where what was encoded is cut or padded, else None.
    """

    encode: str
    model: str | None = None
    template: str | None = None
    max_length: int | None = None
    options: tuple[tuple[str, str], ...] = ()
    form: Literal["split", "pad"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSettings:
    """How the lengths of rows are measured that are published as they are. Can be pickled.

    `measure` is "MODULE:FUNCTION" or a tokenizer's folder; of this `field` is the text, None for `messages` by the chat
    template, or else `text`. With `encoding` it is "swift".
    """

    measure: str
    field: str | None = None
    encoding: EncodingSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Where rows come from: `path` is as the user gave it, `follow` a directory that other programs write into."""

    path: str
    """Where rows come from: JSON lines (.gz and .zst too), Parquet, Arrow, the directory of a Hugging Face data set, a
    stream (a directory with stream.json, or with chunk files and their .completed markers; a URL), - for standard
    input, a named pipe, python:MODULE:FUNCTION (which runs that code, with all rights of this command), PREFIX.idx or
    megatron:PREFIX for Megatron's IndexedDataset, megatron-blend:FILE for a file of such prefixes. Repeat it, or give
    several files after it, or a quoted pattern; they are read in this order."""
    follow: bool = False
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

    max_ahead: Annotated[AheadAmount | None, OR_NONE] = _limit(None, "AMOUNT|none", '"64chunks"')
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
    length_field: Annotated[str, MinLen(1)] = _row("length", "NAME")
    """Where --pack and --balance find the tokens of a row: a whole number under this key. With --encode or --measure
    these tell them. Default: length."""
    measure: Annotated[str, MinLen(1)] | None = _row(None, "DIRECTORY|swift|MODULE:FUNCTION", '"/models/Qwen3-8B"')
    """Seal how many tokens each row has, and publish it as it is: by the tokenizer in this folder; swift, as ms-swift
    trains the row, with --model; or by a function of yours that gets a row and returns a number. Runs code, as
    transform does. Default: lengths come from --encode, or with the rows of a stream."""
    measure_field: str | None = _row(None, "NAME", '"text"', needs="measure")
    """With --measure DIRECTORY: the key of the text to measure. Default: messages by the chat template, or else
    text."""
    pack_buffer: Buffer = _row(10_000, "N", needs="pack")
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
    max_row_bytes: Annotated[Bytes, Le(1 << 40)] = _row(MAX_ROW_BYTES, "SIZE", '"64MiB"')
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
    def encoding(self) -> EncodingSettings | None:
        """How rows are encoded; None where they are not."""
        return None if self.encode is None else self._encoding(self.encode)

    @property
    def measuring(self) -> MeasureSettings | None:
        """How lengths are measured; None where they are not."""
        if self.measure is None:
            return None
        encoding = self._encoding(SWIFT) if self.measure == SWIFT else None
        return MeasureSettings(measure=self.measure, field=self.measure_field, encoding=encoding)

    def _encoding(self, encode: str) -> EncodingSettings:
        swift: dict[str, Any] = {"model": self.model, "template": self.template, "options": self.encode_option}
        # Rows that are cut may be longer than what the model takes.
        longest = MAX_LENGTH if self.max_length is None and self.split and encode == SWIFT else self.max_length
        form: Literal["split", "pad"] | None = "split" if self.split else "pad" if self.pad else None
        return EncodingSettings(encode=encode, max_length=longest, form=form, **swift)

    @property
    def splitting(self) -> Split | None:
        """How rows are cut into sequences; None where they are not."""
        more = {name: getattr(self, f"split_{name}") for name in ("bos", "eos", "every_bos", "every_eos", "overlap")}
        return Split(self.split, **more) if self.split else None

    @property
    def padding(self) -> Pad | None:
        """How rows are padded; None where they are not."""
        return Pad(self.pad, self.pad_token) if self.pad else None


AnySettings: TypeAlias = Settings | SourceSettings


class Option(NamedTuple):
    """An option of a run."""

    field: str  # its name in `owner`, the class of settings that it belongs to
    owner: type
    help: str  # its docstring, on one line
    metavar: str  # what stands for the value in the help
    example: str
    name: str  # its TOML key
    table: str = ""
    needs: str | None = None  # the field without which it means nothing
    repeat: bool = False  # whether its flag may be given several times
    reload: bool = False  # whether it may change while a run goes on

    @property
    def flag(self) -> str:
        """What it is called on the command line."""
        return flag(self.name)

    def of(self, settings: AnySettings) -> Any:
        """Returns its value."""
        return getattr(settings.limits if self.owner is Limits else settings, self.field)  # type: ignore[union-attr]

    def show(self, settings: AnySettings) -> str:
        """Returns its value for people."""
        value = self.of(settings)
        if isinstance(value, tuple):
            return ", ".join(one if isinstance(one, str) else "=".join(one) for one in value) or "none"
        if value is not None and self.metavar.startswith("SIZE"):
            return quantities.show_bytes(value)
        return "none" if value is None else str(value)


def flag(name: str) -> str:
    """Returns the flag of an option."""
    return "--" + name.replace("_", "-")


def _docstrings() -> Iterator[tuple[tuple[str, str], str]]:
    """Yields the text behind each field of a class, which Python drops."""
    try:
        source = inspect.getsource(sys.modules[__name__])
    except (OSError, TypeError):
        return  # installed without its source: the options have no help
    for one in ast.parse(source).body:
        if isinstance(one, ast.ClassDef):
            for before, after in itertools.pairwise(one.body):
                if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr):
                    yield (one.name, ast.unparse(before.target)), " ".join(ast.literal_eval(after.value).split())


HELP: Final = dict(_docstrings())
"""Of each field of a class of settings: its docstring, on one line."""

SOURCE_OPTIONS, _LIMITS, _OTHERS = (
    tuple(
        Option(one.name, owner, HELP.get((owner.__name__, one.name), ""), **{"name": one.name, **one.metadata})
        for one in fields(owner)
        if one.metadata
    )
    for owner in (SourceSettings, Limits, Settings)
)
"""Those of a source. On the command line all but the weight hold for every source that they can be about."""

OPTIONS: Final = tuple(sorted((*_OTHERS, *_LIMITS), key=lambda one: list(PANELS).index(one.table)))
"""Those of a run, in the order of the help."""

BY_NAME: Final = {one.name: one for one in (*SOURCE_OPTIONS, *OPTIONS)}
