"""What a run is to do: one model, of which flags, TOML keys, help, example and checks are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

from annotated_types import Interval, MinLen

from lazyshard.format.records import MAX_SAMPLES_PER_CHUNK
from lazyshard_producer.configuration.row_settings import RowSettings
from lazyshard_producer.configuration.values import (
    OR_NONE,
    AheadAmount,
    Bytes,
    BytesFromZero,
    Names,
    NotNegative,
    Option,
    Positive,
    Retain,
    Whole,
    option,
)

_source = partial(option, table="source")
_stream = option
_limit = partial(option, table="limits", reload=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Where rows come from.

    Attributes:
        path: as the user gave it: a file, a directory, "-" for standard input, "python:MODULE:FUNCTION".
        follow: a directory that other programs write into.

    The others are options; their help says what they are.
    """

    path: str
    follow: bool = False
    weight: float | None = _source(
        "NUMBER",
        "Mix the sources by these shares, not one after another. Belongs to the --source or --follow before it: all "
        "have one, or none. Several files of one --source divide theirs evenly.",
        "0.7",
        None,
        repeat=True,
    )
    pattern: str = _source(
        "GLOB",
        "Names of the files in a followed directory; with .gz or .zst behind too. Default: *.jsonl.",
        '"*.jsonl"',
        "*.jsonl",
        needs="follow",
    )
    finished_by: Literal["rename", "marker", "idle"] = _source(
        "rename|marker|idle",
        "When a file in a followed directory is complete: as it appears under its name, when its marker is there, or "
        "when it has not grown for --idle-seconds. Default: rename.",
        '"rename"',
        "rename",
        needs="follow",
    )
    marker: str = _source(
        "NAME",
        "Name of a file's marker, with {name} for the file's own. Default: {name}.done.",
        '"{name}.done"',
        "{name}.done",
        needs="follow",
    )
    idle_s: Positive = _source(
        "SECONDS",
        "How long a file must not have grown to be complete. Default: 60.",
        "60",
        60.0,
        needs="follow",
        name="idle_seconds",
    )
    end_marker: str = _source(
        "NAME",
        "A file of this name in a followed directory says that no other comes. Default: _END.",
        '"_END"',
        "_END",
        needs="follow",
    )
    resume: Literal["skip", "append"] = _source(
        "skip|append",
        "What a second start does with standard input or a pipe: skip as many rows as are published, or take all as "
        "new ones. Default: skip.",
        '"skip"',
        "skip",
    )
    indexed_rows: Literal["document", "sequence"] = _source(
        "document|sequence",
        "What of Megatron's .idx files makes a row: a document with all its sequences, or each sequence. Default: "
        "document.",
        '"document"',
        "document",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far ahead of its readers a run may get, and what it may delete."""

    max_ahead: Annotated[AheadAmount | None, OR_NONE] = _limit(
        "AMOUNT|none",
        "Wait where so much is published beyond the slowest reader: 64chunks, 1000000samples, 20GB. Default: none, no "
        "limit.",
        '"64chunks"',
        None,
    )
    max_disk: Annotated[Bytes | None, OR_NONE] = _limit(
        "SIZE|none", "Wait where the stream takes so much: 500GB, 2TiB. Default: none, no limit.", '"500GB"', None
    )
    min_free_disk: Annotated[BytesFromZero | None, OR_NONE] = _limit(
        "SIZE|none",
        "Wait where less than this is free on the stream's filesystem. Default: none, no limit.",
        '"50GB"',
        None,
    )
    retain: Retain = _limit(
        "all|consumed|N",
        "Which chunks stay: all, those that some consumer still needs, or besides those the last N. Default: all.",
        '"consumed"',
        "all",
    )
    consumers: Names = _limit(
        "NAME,...",
        "With --retain: nothing is deleted before these consumers have registered.",
        '["train"]',
        (),
        repeat=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RowSettings):
    """What a run is to do.

    Attributes:
        sources: where rows come from, in the order given: that is how positions name them.
        limits: how far ahead of its readers it may get, and what it may delete.

    The others are options; their help says what they are. `assembly.assemble` makes settings of what a user gives and
    checks them; made otherwise they are not checked.
    """

    sources: tuple[SourceSettings, ...]
    limits: Limits = Limits()
    out: str = _stream(
        "STREAM",
        "The stream's directory, made if it is not there; or its place in an object store: s3://BUCKET/PREFIX, any "
        "URL of fsspec.",
        '"/shared/stream"',
        ...,
    )
    samples_per_chunk: Annotated[Whole, Interval(ge=1, le=MAX_SAMPLES_PER_CHUNK)] = _stream(
        "N", "Rows in a chunk. Never changes for a stream.", "1000", ...
    )
    rate: Annotated[Positive | None, OR_NONE] = _stream(
        "SAMPLES_PER_SECOND|none", "Publish no faster than this. Default: none, no limit.", "500", None, reload=True
    )
    metrics_port: Annotated[Annotated[Whole, Interval(ge=0, le=65535)] | None, OR_NONE] = _stream(
        "PORT|none",
        "Serve metrics for Prometheus on this TCP port; 0 takes a free one and says which. Default: none are served.",
        "9464",
        None,
    )
    metrics_host: Annotated[str, MinLen(1)] = _stream(
        "ADDRESS",
        "Address of that port. Whoever reaches it can read the metrics. Default: 127.0.0.1.",
        '"127.0.0.1"',
        "127.0.0.1",
    )
    log_every_s: Positive = _stream(
        "SECONDS",
        "Time between two lines of the log, where there is no terminal. Default: 60.",
        "60",
        60.0,
        name="log_every_seconds",
        reload=True,
    )
    spool: str | None = _stream(
        "DIRECTORY",
        "Where chunks lie that are on their way to an object store. A disk of this machine that outlives the process. "
        "Default: lazyshard in the user's folder for state, ~/.local/state.",
        '"/var/lib/lazyshard"',
        None,
    )
    max_spool: Bytes = _stream(
        "SIZE",
        "Wait where chunks of this size are on their way to an object store; one may always be. Default: 4GiB.",
        '"4GiB"',
        4 << 30,
    )
    store_patience_s: NotNegative = _stream(
        "SECONDS",
        "How long an object store may be away before the run fails. Default: 600.",
        "600",
        600.0,
        name="store_patience_seconds",
    )


PANELS: Final = {
    "source": "Sources",
    "": "Stream",
    "rows": "Rows",
    "encoding": "Encoding: rows hold what the trainer needs",
    "limits": "Limits: how far ahead of training, and what is deleted",
}
"""Headings of the help, by table."""


class Described(NamedTuple):
    """An option of a run.

    Attributes:
        name: its TOML key.
        field: its field in `owner`.
        owner: the class of settings that it belongs to.
        about: what else it is.
    """

    name: str
    field: str
    owner: type
    about: Option

    @property
    def flag(self) -> str:
        """What it is called on the command line."""
        return "--" + self.name.replace("_", "-")


def _described(owner: Any) -> Iterator[Described]:
    for one in fields(owner):
        about = one.metadata.get("option")
        if about is not None:
            yield Described(about.name or one.name, one.name, owner, about)


SOURCE_OPTIONS: Final = tuple(_described(SourceSettings))
"""Those of a source. On the command line all but the weight hold for every source that they can be about."""

OPTIONS: Final = tuple(
    sorted((*_described(Settings), *_described(Limits)), key=lambda one: list(PANELS).index(one.about.table))
)
"""Those of a run, in the order of the help."""

BY_NAME: Final = {one.name: one for one in (*SOURCE_OPTIONS, *OPTIONS)}
