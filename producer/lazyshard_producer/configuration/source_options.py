"""The options of a source."""

from __future__ import annotations

from typing import Final

from lazyshard_producer.configuration.option import Option
from lazyshard_producer.configuration.option_kinds import NUMBER, TEXT, choice

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
