"""What a run is to do: the options of the command as one checked value."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Final, Literal

from lazyshard.plan.balance import PER_TOKEN, PER_TOKEN_SQUARED
from lazyshard.plan.splitting import SplitRule
from lazyshard_producer.configuration.problems import find_problems
from lazyshard_producer.configuration.row_problems import MAX_LENGTH
from lazyshard_producer.configuration.setting_checks import SWIFT
from lazyshard_producer.errors import SettingsInvalid

MAX_ROW_BYTES: Final = 64 << 20
"""Longest row by default, in bytes: far above any text sample, and a few of them fit into any machine."""

LENGTH_FIELD: Final = "length"
"""Where a row's length in tokens is looked for by default."""

MAX_SPOOL_BYTES: Final = 4 << 30
"""What waits on this machine's disk for an object store by default, in bytes: minutes of a fast producer."""

PACK_BUFFER: Final = 10_000
"""Rows that are packed together by default: enough that the last packs of a buffer, which stay the emptiest, weigh
nothing, and few enough that a restart reads them again at once."""

PACK_BUFFER_BYTES: Final = 1 << 30
"""Bytes of these at the most by default: ten thousand rows of text come nowhere near, and rows with the features of
images do not fill the memory."""

STORE_PATIENCE_S: Final = 600.0
"""How long an object store may be away by default, in seconds: an outage of minutes passes, a mistake is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Where rows come from.

    Attributes:
        path: as the user gave it: a file, a directory, "-" for standard input, "python:MODULE:FUNCTION".
        weight: its share of the rows where sources are mixed, above 0; None where they are read one after another.
        follow: a directory that other programs write into.
        pattern: names of the files in a followed directory; those with .gz or .zst behind belong too.
        finished_by: how a file in a followed directory is known to be complete: by appearing under its name at all
            (rename), by another file (marker), by not having grown for a while (idle).
        marker: name of that other file, with {name} for the file's own.
        idle_s: that while, in seconds.
        end_marker: name of a file in a followed directory after which no other comes.
        resume: what a second start does with the rows of standard input or a pipe: skip as many as were published, or
            append them all.
        indexed_rows: what of an IndexedDataset of Megatron's makes a row: a document, or a sequence.
    """

    path: str
    weight: float | None = None
    follow: bool = False
    pattern: str = "*.jsonl"
    finished_by: Literal["rename", "marker", "idle"] = "rename"
    marker: str = "{name}.done"
    idle_s: float = 60.0
    end_marker: str = "_END"
    resume: Literal["skip", "append"] = "skip"
    indexed_rows: Literal["document", "sequence"] = "document"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingSettings:
    """How rows are encoded. Can be pickled.

    Attributes:
        encode: "swift" for ms-swift's template, or "MODULE:FUNCTION".
        model: of ms-swift: the model's folder or name.
        template: of ms-swift: the template's name; None for the model's.
        max_length: of ms-swift: tokens of a sample at the most; None for what the model takes.
        options: of ms-swift: other options, (name, value as on its command line).
        form: "split" or "pad" where what was encoded is cut or padded before it is published, else None.
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

    Attributes:
        measure: "MODULE:FUNCTION", or the folder of a tokenizer; with `encoding` "swift".
        field: of a tokenizer: the text to measure; None for `messages` by the chat template, or else `text`.
        encoding: of ms-swift: what encodes the row whose length it is; None for the others.
    """

    measure: str
    field: str | None = None
    encoding: EncodingSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSettings:
    """How rows are put one behind the other and cut; see `lazyshard.plan.splitting`. Can be pickled.

    Attributes:
        size: tokens of a sequence, all BOS and EOS included, `overlap` not.
        bos: token in front of each row; None for none.
        eos: token behind each row; None for none.
        every_bos: token in front of each sequence that does not begin with a row's BOS; None for none.
        every_eos: token behind each sequence that does not end in a row's EOS; None for none.
        overlap: 1 for sequences of which the last token is the first of the next one.
    """

    size: int
    bos: int | None = None
    eos: int | None = None
    every_bos: int | None = None
    every_eos: int | None = None
    overlap: int = 0

    @property
    def rule(self) -> SplitRule:
        """What it comes to, whichever tokens these are. Raises as `SplitRule`."""
        return SplitRule(
            size=self.size,
            bos=self.bos is not None,
            eos=self.eos is not None,
            every_bos=self.every_bos is not None,
            every_eos=self.every_eos is not None,
            overlap=self.overlap,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PadSettings:
    """How each row is padded. Can be pickled.

    Attributes:
        size: tokens of a row.
        token: with which it is padded.
    """

    size: int
    token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """An amount of data.

    Attributes:
        number: how much, 0 or more.
        unit: of what.
    """

    number: int
    unit: Literal["chunks", "samples", "bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far ahead of its readers a run may get, and what it may delete.

    Attributes:
        max_ahead: beyond the slowest reader's mark; None for no limit.
        max_disk: bytes of the stream's directory; None for no limit.
        min_free_disk: bytes that stay free on its filesystem; None for no limit.
        retain: chunks that stay: all; those that some consumer is not done with; besides those the last so many.
        consumers: names that must have a cursor before anything is deleted.
    """

    max_ahead: Amount | None = None
    max_disk: int | None = None
    min_free_disk: int | None = None
    retain: Literal["all", "consumed"] | int = "all"
    consumers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is to do.

    Attributes:
        sources: where rows come from, in the order given: that is how positions name them.
        out: path of the stream's directory, or URL of the place in an object store.
        samples_per_chunk: rows in a chunk.
        rate: at most so many samples a second; None for no limit.
        max_row_bytes: longest row that is accepted, in bytes without its line end.
        transform: "MODULE:FUNCTION" that makes of a row another one, none (None) or several (a list); None for none.
        columns: (new name, old name) of what rows are to hold, and of nothing else; empty for rows as they are.
        where: "MODULE:FUNCTION" that says of a row, or of (row, its index), whether it is taken; None for all.
        shuffle: rows that are shuffled together; 0 for the order in which they come.
        seed: of that shuffling, or of the balancing, and of nothing else.
        balance: data-parallel ranks for which rows are dealt by cost, a chunk for each at a time; None for none.
        micro_batch_size: rows of one rank in a micro batch, with `balance`.
        cost_per_token: what a token costs by itself, with `balance`.
        cost_per_token_squared: what a row costs for the square of its tokens, with `balance`.
        pack: tokens of a pack, where rows are packed; 0 for rows as they are.
        length_field: the key of a row under which its tokens stand, with `balance` or `pack`, unless it is encoded.
        measure: "swift", "MODULE:FUNCTION" or the folder of a tokenizer, by which lengths are measured; None for none.
        measure_field: see `MeasureSettings`.
        pack_buffer: rows that are packed together.
        pack_buffer_bytes: bytes of these with which a buffer ends before.
        split: tokens of a sequence, where rows are put one behind the other and cut; 0 for rows as they are.
        split_bos, split_eos, split_every_bos, split_every_eos, split_overlap: see `SplitSettings`.
        pad: tokens to which each row is padded; 0 for rows as they are.
        pad_token: with which token.
        encode: "swift" or "MODULE:FUNCTION", by which rows are encoded; None for rows that are not.
        model, template, max_length, encode_option: see `EncodingSettings`; of ms-swift also as a measure.
        workers: processes that run transform, encoder and measure; 0 for this one.
        on_bad_row: what a row that is refused does: end the run, nothing, or go to the stream's quarantine.jsonl.
        max_bad_rows: so many rows may be refused, one more ends the run; None for any number.
        limits: how far ahead of its readers it may get, and what it may delete.
        metrics_port: TCP port on which Prometheus finds the metrics, 0 for any that is free; None for no metrics.
        metrics_host: address on which that port is opened.
        log_every_s: seconds between two lines of the log.
        spool: directory for what is on its way to an object store; None for that of the user.
        max_spool: bytes of chunks that may wait there.
        store_patience_s: seconds that an object store may be away before the run fails.
        given: names of those that the user has given, though it be their default; for the checks, and not kept.

    Raises:
        SettingsInvalid: some of them cannot be, or not together; it lists every problem.
    """

    sources: tuple[SourceSettings, ...]
    out: str
    samples_per_chunk: int
    rate: float | None = None
    max_row_bytes: int = MAX_ROW_BYTES
    transform: str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    where: str | None = None
    shuffle: int = 0
    seed: int = 0
    balance: int | None = None
    micro_batch_size: int = 1
    cost_per_token: float = PER_TOKEN
    cost_per_token_squared: float = PER_TOKEN_SQUARED
    pack: int = 0
    length_field: str = LENGTH_FIELD
    measure: str | None = None
    measure_field: str | None = None
    pack_buffer: int = PACK_BUFFER
    pack_buffer_bytes: int = PACK_BUFFER_BYTES
    split: int = 0
    split_bos: int | None = None
    split_eos: int | None = None
    split_every_bos: int | None = None
    split_every_eos: int | None = None
    split_overlap: int = 0
    pad: int = 0
    pad_token: int = 0
    encode: str | None = None
    model: str | None = None
    template: str | None = None
    max_length: int | None = None
    encode_option: tuple[tuple[str, str], ...] = ()
    workers: int = 0
    on_bad_row: Literal["fail", "skip", "quarantine"] = "fail"
    max_bad_rows: int | None = None
    limits: Limits = Limits()
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    log_every_s: float = 60.0
    spool: str | None = None
    max_spool: int = MAX_SPOOL_BYTES
    store_patience_s: float = STORE_PATIENCE_S
    given: InitVar[frozenset[str]] = frozenset()

    def __post_init__(self, given: frozenset[str]) -> None:
        """Checks what can be checked without looking at any file."""
        problems = find_problems(self, given)
        if problems:
            raise SettingsInvalid.of(problems)

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
        longest = self.max_length
        if longest is None and self.split and encode == SWIFT:
            # Rows that are cut may be longer than what the model takes.
            longest = MAX_LENGTH
        return EncodingSettings(
            encode=encode,
            model=self.model,
            template=self.template,
            max_length=longest,
            options=self.encode_option,
            form="split" if self.split else "pad" if self.pad else None,
        )

    @property
    def splitting(self) -> SplitSettings | None:
        """How rows are cut into sequences; None where they are not."""
        if not self.split:
            return None
        return SplitSettings(
            size=self.split,
            bos=self.split_bos,
            eos=self.split_eos,
            every_bos=self.split_every_bos,
            every_eos=self.split_every_eos,
            overlap=self.split_overlap,
        )

    @property
    def padding(self) -> PadSettings | None:
        """How rows are padded; None where they are not."""
        return PadSettings(size=self.pad, token=self.pad_token) if self.pad else None
