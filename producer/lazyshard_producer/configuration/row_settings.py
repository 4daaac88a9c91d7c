"""What is made of rows: transforms, shuffling, packing, cutting, padding, dealing, encoding, and bad rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, Literal

from annotated_types import Interval, Le, MinLen

from lazyshard.plan.balance import PER_TOKEN, PER_TOKEN_SQUARED
from lazyshard.plan.splitting import SplitRule
from lazyshard_producer.configuration.quantities import MAX_ROW_BYTES
from lazyshard_producer.configuration.values import (
    OR_NONE,
    Bytes,
    Columns,
    FromOne,
    FromZero,
    NotNegative,
    Pairs,
    Whole,
    option,
)

SWIFT: Final = "swift"
"""What --encode calls ms-swift."""

MAX_SHUFFLE: Final = 10**9
"""Rows that are held to be put into another order."""

MAX_LENGTH: Final = 2**31 - 1
"""Tokens of a sample that ms-swift can be told."""

DEFAULT_MAX_BAD_ROWS: Final = 1000
"""Where bad rows do not end the run: a broken transform is noticed before it has eaten a data set."""

Buffer = Annotated[Whole, Interval(ge=1, le=MAX_SHUFFLE)]
Sequence = Annotated[Whole, Interval(ge=0, le=2**24)]
Token = Annotated[Whole, Interval(ge=0, le=2**31 - 1)]

_row = partial(option, table="rows")
_encoding = partial(option, table="encoding")


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
class RowSettings:
    """What is made of rows. Each field is an option; its help says what it is."""

    transform: str | None = _row(
        "MODULE:FUNCTION",
        "A function that gets (row), a dict, or (row, index) and returns a row, None for none, or a list of rows. "
        "This runs code: MODULE is imported and the function called, with all rights of this command.",
        '"my_rows:clean"',
        None,
    )
    where: str | None = _row(
        "MODULE:FUNCTION",
        "A function that gets (row) or (row, index) and says whether the row is taken. Runs code, as transform does.",
        '"my_rows:is_wanted"',
        None,
    )
    columns: Columns = _row(
        "NEW=OLD,...",
        "Rows hold just these columns, under new names; NAME alone keeps its name.",
        '{ prompt = "question", response = "answer" }',
        (),
        repeat=True,
    )
    shuffle: Annotated[Whole, Interval(ge=0, le=MAX_SHUFFLE)] = _row(
        "N", "Shuffle, N rows at a time. Default: 0, the order in which they come.", "10000", 0
    )
    seed: FromZero = _row("N", "Seed of --shuffle and --balance. Default: 0.", "0", 0)
    balance: Annotated[FromOne | None, OR_NONE] = _row(
        "RANKS|none",
        "Deal rows, or packs, by cost, a chunk for each of so many data-parallel ranks at a time, so that those that "
        "meet in a step cost the same. Holds all rows of these chunks in memory. Default: none, as they come.",
        "64",
        None,
    )
    micro_batch_size: FromOne = _row(
        "N", "Rows of one rank in a micro batch, for --balance. Default: 1.", "4", 1, needs="balance"
    )
    cost_per_token: NotNegative = _row(
        "NUMBER",
        "What a token costs by itself, for --balance; only its ratio to --cost-per-token-squared counts. Default: 1.",
        "1",
        PER_TOKEN,
        needs="balance",
    )
    cost_per_token_squared: NotNegative = _row(
        "NUMBER",
        "What a row costs for the square of its tokens, for --balance: about 1 / (6 * hidden size) of what a token "
        "costs. Default: 4e-05.",
        "4e-05",
        PER_TOKEN_SQUARED,
        needs="balance",
    )
    pack: Annotated[Whole, Interval(ge=0, le=2**32 - 1)] = _row(
        "TOKENS",
        "Publish packs: whole rows put together, at most so many tokens in a pack. --samples-per-chunk and --rate "
        "then count packs. Default: 0, rows as they are.",
        "8192",
        0,
    )
    length_field: Annotated[str, MinLen(1)] = _row(
        "NAME",
        "Where --pack and --balance find the tokens of a row: a whole number under this key. With --encode or "
        "--measure these tell them. Default: length.",
        '"length"',
        "length",
    )
    measure: Annotated[str, MinLen(1)] | None = _row(
        "DIRECTORY|swift|MODULE:FUNCTION",
        "Seal how many tokens each row has, and publish it as it is: by the tokenizer in this folder; swift, as "
        "ms-swift trains the row, with --model; or by a function of yours that gets a row and returns a number. Runs "
        "code, as transform does. Default: lengths come from --encode, or with the rows of a stream.",
        '"/models/Qwen3-8B"',
        None,
    )
    measure_field: str | None = _row(
        "NAME",
        "With --measure DIRECTORY: the key of the text to measure. Default: messages by the chat template, or else "
        "text.",
        '"text"',
        None,
        needs="measure",
    )
    pack_buffer: Buffer = _row(
        "N", "Rows among which --pack looks for those that fit together. Default: 10000.", "10000", 10_000, needs="pack"
    )
    pack_buffer_bytes: Bytes = _row(
        "SIZE",
        "Bytes of these rows, as they are published, with which they are packed though they are fewer; bounds the "
        "memory. Default: 1GiB.",
        '"1GiB"',
        1 << 30,
        needs="pack",
    )
    split: Sequence = _row(
        "TOKENS",
        "Publish sequences of exactly so many tokens: the input_ids of all rows, one row behind the other, cut "
        "wherever that falls, as for pre-training. Each token comes once; only the last sequence may be shorter. "
        "Default: 0, rows as they are.",
        "4096",
        0,
    )
    split_bos: Annotated[Token | None, OR_NONE] = _row(
        "TOKEN|none", "With --split: this token goes in front of each row. Default: none.", "1", None, needs="split"
    )
    split_eos: Annotated[Token | None, OR_NONE] = _row(
        "TOKEN|none",
        "With --split: this token goes behind each row, or between rows, as a separator does. Default: none.",
        "2",
        None,
        needs="split",
    )
    split_every_bos: Annotated[Token | None, OR_NONE] = _row(
        "TOKEN|none",
        "With --split: this token goes in front of each sequence that does not begin with a row's BOS. Default: none.",
        "1",
        None,
        needs="split",
    )
    split_every_eos: Annotated[Token | None, OR_NONE] = _row(
        "TOKEN|none",
        "With --split: this token goes behind each sequence that does not end in a row's EOS. Default: none.",
        "2",
        None,
        needs="split",
    )
    split_overlap: Annotated[Whole, Interval(ge=0, le=1)] = _row(
        "0|1",
        "With --split: 1 for sequences of one token more, with which the next one begins, as Megatron's GPTDataset "
        "has them. Default: 0.",
        "1",
        0,
        needs="split",
    )
    pad: Sequence = _row(
        "TOKENS",
        "Publish each row with exactly so many input_ids: padded, with an attention_mask. A longer row is a bad row. "
        "Default: 0, rows as they are.",
        "4096",
        0,
    )
    pad_token: Token = _row("TOKEN", "With which token --pad pads. Default: 0.", "0", 0, needs="pad")
    workers: Annotated[Whole, Interval(ge=0, le=1024)] = _row(
        "N",
        "Processes that run a slow --transform, --encode or --measure; the order is kept. Default: 0, this process.",
        "4",
        0,
    )
    on_bad_row: Literal["fail", "skip", "quarantine"] = _row(
        "fail|skip|quarantine",
        "What becomes of a row that is no JSON object, is too long, or at which the transform or the encoder raised: "
        "the run ends there, it is left out, or it goes to STREAM/quarantine.jsonl. Default: fail.",
        '"quarantine"',
        "fail",
    )
    max_bad_rows: Annotated[FromZero | None, OR_NONE] = _row(
        "N|none",
        "So many rows may be left out or quarantined; one more ends the run. Default: 1000; none means no limit.",
        "1000",
        None,
        reload=True,
    )
    max_row_bytes: Annotated[Bytes, Le(1 << 40)] = _row(
        "SIZE", "Longest row that is accepted; bounds the memory. Default: 64MiB.", '"64MiB"', MAX_ROW_BYTES
    )
    encode: str | None = _encoding(
        "swift|MODULE:FUNCTION",
        "Encode each row, after the options above: swift, with ms-swift's template as training would; or a function "
        "of yours that gets a row and returns a dict, which may hold numpy arrays. Runs code, as transform does. "
        "Never changes for a stream.",
        '"swift"',
        None,
    )
    model: str | None = _encoding(
        "DIRECTORY",
        "With --encode or --measure swift: the model's folder, or its name where ms-swift finds it. Its weights are "
        "not loaded.",
        '"/models/Qwen3-8B"',
        None,
    )
    template: str | None = _encoding(
        "NAME",
        "With --encode or --measure swift: the template, as --template in training. Default: the model's.",
        '"qwen3"',
        None,
    )
    max_length: Annotated[Whole, Interval(ge=1, le=MAX_LENGTH)] | None = _encoding(
        "N",
        "With --encode or --measure swift: tokens of a sample, as --max_length in training; a longer row is a bad "
        "row, unless truncation_strategy says otherwise. Default: what the model takes; any with --split.",
        "8192",
        None,
    )
    encode_option: Pairs = _encoding(
        "NAME=VALUE",
        "With --encode or --measure swift: any other option of ms-swift by which it encodes, under the name that it "
        "has there: truncation_strategy=left, loss_scale=last_round. Repeat it for several.",
        '{ truncation_strategy = "left" }',
        (),
        repeat=True,
    )

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
