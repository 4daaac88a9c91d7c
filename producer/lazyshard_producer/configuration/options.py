"""The options that say what a run is to do: one table, from which flags, TOML keys, help and example are made.

The flag of an option is its name with dashes, its TOML key the name itself, in the table that is named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lazyshard.plan.balance import PER_TOKEN_SQUARED
from lazyshard_producer.configuration.option_kinds import (
    AMOUNT_OR_NONE,
    BYTES,
    BYTES_OR_NONE,
    COLUMNS,
    NAMES,
    NUMBER,
    NUMBER_OR_NONE,
    RETAIN,
    SETTINGS,
    TEXT,
    WHOLE,
    WHOLE_OR_NONE,
    Kind,
    choice,
)

DEFAULT_MAX_BAD_ROWS: Final = 1000
"""Where bad rows do not end the run: a broken transform is noticed before it has eaten a data set."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option.

    Attributes:
        name: its TOML key.
        table: the TOML table it belongs to: "" for the top of the file, "source" for each ``[[source]]``.
        kind: how its value is written.
        metavar: what stands for the value in the help.
        help: what it does, in a sentence or two; ends with its default where it has one.
        example: a value in TOML, for the example file.
        repeat: whether its flag may be given several times.
    """

    name: str
    table: str
    kind: Kind
    metavar: str
    help: str
    example: str
    repeat: bool = False

    @property
    def flag(self) -> str:
        """What it is called on the command line."""
        return "--" + self.name.replace("_", "-")


PANELS: Final = {
    "source": "Sources",
    "": "Stream",
    "rows": "Rows",
    "encoding": "Encoding: rows hold what the trainer needs",
    "limits": "Limits: how far ahead of training, and what is deleted",
}
"""Headings of the help, by table."""

SOURCE_OPTIONS: Final = (
    Option(
        "weight",
        "source",
        NUMBER,
        "NUMBER",
        "Mix the sources by these shares, not one after another. Belongs to the --source or --follow before it: all "
        "have one, or none. Several files of one --source divide theirs evenly.",
        "0.7",
        repeat=True,
    ),
    Option(
        "pattern",
        "source",
        TEXT,
        "GLOB",
        "Names of the files in a followed directory; with .gz or .zst behind too. Default: *.jsonl.",
        '"*.jsonl"',
    ),
    Option(
        "finished_by",
        "source",
        choice("rename", "marker", "idle"),
        "rename|marker|idle",
        "When a file in a followed directory is complete: as it appears under its name, when its marker is there, or "
        "when it has not grown for --idle-seconds. Default: rename.",
        '"rename"',
    ),
    Option(
        "marker",
        "source",
        TEXT,
        "NAME",
        "Name of a file's marker, with {name} for the file's own. Default: {name}.done.",
        '"{name}.done"',
    ),
    Option(
        "idle_seconds",
        "source",
        NUMBER,
        "SECONDS",
        "How long a file must not have grown to be complete. Default: 60.",
        "60",
    ),
    Option(
        "end_marker",
        "source",
        TEXT,
        "NAME",
        "A file of this name in a followed directory says that no other comes. Default: _END.",
        '"_END"',
    ),
    Option(
        "resume",
        "source",
        choice("skip", "append"),
        "skip|append",
        "What a second start does with standard input or a pipe: skip as many rows as are published, or take all as "
        "new ones. Default: skip.",
        '"skip"',
    ),
    Option(
        "indexed_rows",
        "source",
        choice("document", "sequence"),
        "document|sequence",
        "What of Megatron's .idx files makes a row: a document with all its sequences, or each sequence. Default: "
        "document.",
        '"document"',
    ),
)
"""Those of a source. On the command line all but the weight hold for every source that they can be about."""

OPTIONS: Final = (
    Option(
        "out",
        "",
        TEXT,
        "STREAM",
        "The stream's directory, made if it is not there; or its place in an object store: s3://BUCKET/PREFIX, any "
        "URL of fsspec.",
        '"/shared/stream"',
    ),
    Option(
        "samples_per_chunk",
        "",
        WHOLE,
        "N",
        "Rows in a chunk. Never changes for a stream.",
        "1000",
    ),
    Option(
        "rate",
        "",
        NUMBER_OR_NONE,
        "SAMPLES_PER_SECOND|none",
        "Publish no faster than this. Default: none, no limit.",
        "500",
    ),
    Option(
        "metrics_port",
        "",
        WHOLE_OR_NONE,
        "PORT|none",
        "Serve metrics for Prometheus on this TCP port; 0 takes a free one and says which. Default: none are served.",
        "9464",
    ),
    Option(
        "metrics_host",
        "",
        TEXT,
        "ADDRESS",
        "Address of that port. Whoever reaches it can read the metrics. Default: 127.0.0.1.",
        '"127.0.0.1"',
    ),
    Option(
        "log_every_seconds",
        "",
        NUMBER,
        "SECONDS",
        "Time between two lines of the log, where there is no terminal. Default: 60.",
        "60",
    ),
    Option(
        "spool",
        "",
        TEXT,
        "DIRECTORY",
        "Where chunks lie that are on their way to an object store. A disk of this machine that outlives the process. "
        "Default: lazyshard in the user's folder for state, ~/.local/state.",
        '"/var/lib/lazyshard"',
    ),
    Option(
        "max_spool",
        "",
        BYTES,
        "SIZE",
        "Wait where chunks of this size are on their way to an object store; one may always be. Default: 4GiB.",
        '"4GiB"',
    ),
    Option(
        "store_patience_seconds",
        "",
        NUMBER,
        "SECONDS",
        "How long an object store may be away before the run fails. Default: 600.",
        "600",
    ),
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
        "Where --pack and --balance find the tokens of a row: a whole number under this key. With --encode the encoder "
        "tells them. Default: length.",
        '"length"',
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
        "Processes that run a slow --transform, or --encode; the order is kept. Default: 0, this process.",
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
        "With --encode swift: the model's folder, or its name where ms-swift finds it. Its weights are not loaded.",
        '"/models/Qwen3-8B"',
    ),
    Option(
        "template",
        "encoding",
        TEXT,
        "NAME",
        "With --encode swift: the template, as --template in training. Default: the model's.",
        '"qwen3"',
    ),
    Option(
        "max_length",
        "encoding",
        WHOLE,
        "N",
        "With --encode swift: tokens of a sample, as --max_length in training; a longer row is a bad row, unless "
        "truncation_strategy says otherwise. Default: what the model takes; any with --split.",
        "8192",
    ),
    Option(
        "encode_option",
        "encoding",
        SETTINGS,
        "NAME=VALUE",
        "With --encode swift: any other option of ms-swift by which it encodes, under the name that it has there: "
        "truncation_strategy=left, loss_scale=last_round. Repeat it for several.",
        '{ truncation_strategy = "left" }',
        repeat=True,
    ),
    Option(
        "max_ahead",
        "limits",
        AMOUNT_OR_NONE,
        "AMOUNT|none",
        "Wait where so much is published beyond the slowest reader: 64chunks, 1000000samples, 20GB. Default: none, no "
        "limit.",
        '"64chunks"',
    ),
    Option(
        "max_disk",
        "limits",
        BYTES_OR_NONE,
        "SIZE|none",
        "Wait where the stream takes so much: 500GB, 2TiB. Default: none, no limit.",
        '"500GB"',
    ),
    Option(
        "min_free_disk",
        "limits",
        BYTES_OR_NONE,
        "SIZE|none",
        "Wait where less than this is free on the stream's filesystem. Default: none, no limit.",
        '"50GB"',
    ),
    Option(
        "retain",
        "limits",
        RETAIN,
        "all|consumed|N",
        "Which chunks stay: all, those that some consumer still needs, or besides those the last N. Default: all.",
        '"consumed"',
    ),
    Option(
        "consumers",
        "limits",
        NAMES,
        "NAME,...",
        "Nothing is deleted before these consumers have registered.",
        '["train"]',
        repeat=True,
    ),
)
"""Those of a run."""

BY_NAME: Final = {option.name: option for option in (*SOURCE_OPTIONS, *OPTIONS)}
