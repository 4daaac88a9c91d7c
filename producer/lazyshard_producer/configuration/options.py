"""The options that say what a run is to do, all of them in the order of the help."""

from __future__ import annotations

from typing import Final

from lazyshard_producer.configuration.option import Option
from lazyshard_producer.configuration.option_kinds import (
    AMOUNT_OR_NONE,
    BYTES,
    BYTES_OR_NONE,
    NAMES,
    NUMBER,
    NUMBER_OR_NONE,
    RETAIN,
    TEXT,
    WHOLE,
    WHOLE_OR_NONE,
)
from lazyshard_producer.configuration.row_options import ENCODING_OPTIONS, ROW_OPTIONS
from lazyshard_producer.configuration.source_options import SOURCE_OPTIONS

_STREAM: Final = (
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
)

_LIMITS: Final = (
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
        "With --retain: nothing is deleted before these consumers have registered.",
        '["train"]',
        repeat=True,
    ),
)

OPTIONS: Final = (*_STREAM, *ROW_OPTIONS, *ENCODING_OPTIONS, *_LIMITS)
"""Those of a run."""

BY_NAME: Final = {option.name: option for option in (*SOURCE_OPTIONS, *OPTIONS)}
