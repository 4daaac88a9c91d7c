"""The options about what is made of rows: transforms, shuffling, packing, cutting, padding, dealing, encoding."""

from __future__ import annotations

from typing import Final

from lazyshard.plan.balance import PER_TOKEN_SQUARED
from lazyshard_producer.configuration.option import Option
from lazyshard_producer.configuration.option_kinds import (
    BYTES,
    COLUMNS,
    NUMBER,
    SETTINGS,
    TEXT,
    WHOLE,
    WHOLE_OR_NONE,
    choice,
)

DEFAULT_MAX_BAD_ROWS: Final = 1000
"""Where bad rows do not end the run: a broken transform is noticed before it has eaten a data set."""

ROW_OPTIONS: Final = (
    Option(
        "transform",
        "rows",
        TEXT,
        "MODULE:FUNCTION",
        "A function that gets (row), a dict, or (row, index) and returns a row, None for none, or a list of rows. This "
        "runs code: MODULE is imported and the function called, with all rights of this command.",
        '"my_rows:clean"',
    ),
    Option(
        "where",
        "rows",
        TEXT,
        "MODULE:FUNCTION",
        "A function that gets (row) or (row, index) and says whether the row is taken. Runs code, as transform does.",
        '"my_rows:is_wanted"',
    ),
    Option(
        "columns",
        "rows",
        COLUMNS,
        "NEW=OLD,...",
        "Rows hold just these columns, under new names; NAME alone keeps its name.",
        '{ prompt = "question", response = "answer" }',
        repeat=True,
    ),
    Option(
        "shuffle",
        "rows",
        WHOLE,
        "N",
        "Shuffle, N rows at a time. Default: 0, the order in which they come.",
        "10000",
    ),
    Option("seed", "rows", WHOLE, "N", "Seed of --shuffle and --balance. Default: 0.", "0"),
    Option(
        "balance",
        "rows",
        WHOLE_OR_NONE,
        "RANKS|none",
        "Deal rows, or packs, by cost, a chunk for each of so many data-parallel ranks at a time, so that those that "
        "meet in a step cost the same. Holds all rows of these chunks in memory. Default: none, as they come.",
        "64",
    ),
    Option(
        "micro_batch_size",
        "rows",
        WHOLE,
        "N",
        "Rows of one rank in a micro batch, for --balance. Default: 1.",
        "4",
    ),
    Option(
        "cost_per_token",
        "rows",
        NUMBER,
        "NUMBER",
        "What a token costs by itself, for --balance; only its ratio to --cost-per-token-squared counts. Default: 1.",
        "1",
    ),
    Option(
        "cost_per_token_squared",
        "rows",
        NUMBER,
        "NUMBER",
        f"What a row costs for the square of its tokens, for --balance: about 1 / (6 * hidden size) of what a token "
        f"costs. Default: {PER_TOKEN_SQUARED:g}.",
        f"{PER_TOKEN_SQUARED:g}",
    ),
    Option(
        "pack",
        "rows",
        WHOLE,
        "TOKENS",
        "Publish packs: whole rows put together, at most so many tokens in a pack. --samples-per-chunk and --rate then "
        "count packs. Default: 0, rows as they are.",
        "8192",
    ),
    Option(
        "length_field",
        "rows",
        TEXT,
        "NAME",
        "Where --pack and --balance find the tokens of a row: a whole number under this key. With --encode or "
        "--measure these tell them. Default: length.",
        '"length"',
    ),
    Option(
        "measure",
        "rows",
        TEXT,
        "DIRECTORY|swift|MODULE:FUNCTION",
        "Seal how many tokens each row has, and publish it as it is: by the tokenizer in this folder; swift, as "
        "ms-swift trains the row, with --model; or by a function of yours that gets a row and returns a number. Runs "
        "code, as transform does. Default: lengths come from --encode, or with the rows of a stream.",
        '"/models/Qwen3-8B"',
    ),
    Option(
        "measure_field",
        "rows",
        TEXT,
        "NAME",
        "With --measure DIRECTORY: the key of the text to measure. Default: messages by the chat template, or else "
        "text.",
        '"text"',
    ),
    Option(
        "pack_buffer",
        "rows",
        WHOLE,
        "N",
        "Rows among which --pack looks for those that fit together. Default: 10000.",
        "10000",
    ),
    Option(
        "pack_buffer_bytes",
        "rows",
        BYTES,
        "SIZE",
        "Bytes of these rows, as they are published, with which they are packed though they are fewer; bounds the "
        "memory. Default: 1GiB.",
        '"1GiB"',
    ),
    Option(
        "split",
        "rows",
        WHOLE,
        "TOKENS",
        "Publish sequences of exactly so many tokens: the input_ids of all rows, one row behind the other, cut "
        "wherever that falls, as for pre-training. Each token comes once; only the last sequence may be shorter. "
        "Default: 0, rows as they are.",
        "4096",
    ),
    Option(
        "split_bos",
        "rows",
        WHOLE_OR_NONE,
        "TOKEN|none",
        "With --split: this token goes in front of each row. Default: none.",
        "1",
    ),
    Option(
        "split_eos",
        "rows",
        WHOLE_OR_NONE,
        "TOKEN|none",
        "With --split: this token goes behind each row, or between rows, as a separator does. Default: none.",
        "2",
    ),
    Option(
        "split_every_bos",
        "rows",
        WHOLE_OR_NONE,
        "TOKEN|none",
        "With --split: this token goes in front of each sequence that does not begin with a row's BOS. Default: none.",
        "1",
    ),
    Option(
        "split_every_eos",
        "rows",
        WHOLE_OR_NONE,
        "TOKEN|none",
        "With --split: this token goes behind each sequence that does not end in a row's EOS. Default: none.",
        "2",
    ),
    Option(
        "split_overlap",
        "rows",
        WHOLE,
        "0|1",
        "With --split: 1 for sequences of one token more, with which the next one begins, as Megatron's GPTDataset has "
        "them. Default: 0.",
        "1",
    ),
    Option(
        "pad",
        "rows",
        WHOLE,
        "TOKENS",
        "Publish each row with exactly so many input_ids: padded, with an attention_mask. A longer row is a bad row. "
        "Default: 0, rows as they are.",
        "4096",
    ),
    Option("pad_token", "rows", WHOLE, "TOKEN", "With which token --pad pads. Default: 0.", "0"),
    Option(
        "workers",
        "rows",
        WHOLE,
        "N",
        "Processes that run a slow --transform, --encode or --measure; the order is kept. Default: 0, this process.",
        "4",
    ),
    Option(
        "on_bad_row",
        "rows",
        choice("fail", "skip", "quarantine"),
        "fail|skip|quarantine",
        "What becomes of a row that is no JSON object, is too long, or at which the transform or the encoder raised: "
        "the run ends there, it is left out, or it goes to STREAM/quarantine.jsonl. Default: fail.",
        '"quarantine"',
    ),
    Option(
        "max_bad_rows",
        "rows",
        WHOLE_OR_NONE,
        "N|none",
        f"So many rows may be left out or quarantined; one more ends the run. Default: {DEFAULT_MAX_BAD_ROWS}; none "
        "means no limit.",
        "1000",
    ),
    Option(
        "max_row_bytes",
        "rows",
        BYTES,
        "SIZE",
        "Longest row that is accepted; bounds the memory. Default: 64MiB.",
        '"64MiB"',
    ),
)
"""What is made of rows, and of those that cannot be used."""

ENCODING_OPTIONS: Final = (
    Option(
        "encode",
        "encoding",
        TEXT,
        "swift|MODULE:FUNCTION",
        "Encode each row, after the options above: swift, with ms-swift's template as training would; or a function of "
        "yours that gets a row and returns a dict, which may hold numpy arrays. Runs code, as transform does. Never "
        "changes for a stream.",
        '"swift"',
    ),
    Option(
        "model",
        "encoding",
        TEXT,
        "DIRECTORY",
        "With --encode or --measure swift: the model's folder, or its name where ms-swift finds it. Its weights are "
        "not loaded.",
        '"/models/Qwen3-8B"',
    ),
    Option(
        "template",
        "encoding",
        TEXT,
        "NAME",
        "With --encode or --measure swift: the template, as --template in training. Default: the model's.",
        '"qwen3"',
    ),
    Option(
        "max_length",
        "encoding",
        WHOLE,
        "N",
        "With --encode or --measure swift: tokens of a sample, as --max_length in training; a longer row is a bad row, "
        "unless truncation_strategy says otherwise. Default: what the model takes; any with --split.",
        "8192",
    ),
    Option(
        "encode_option",
        "encoding",
        SETTINGS,
        "NAME=VALUE",
        "With --encode or --measure swift: any other option of ms-swift by which it encodes, under the name that it "
        "has there: truncation_strategy=left, loss_scale=last_round. Repeat it for several.",
        '{ truncation_strategy = "left" }',
        repeat=True,
    ),
)
"""How rows are encoded."""
