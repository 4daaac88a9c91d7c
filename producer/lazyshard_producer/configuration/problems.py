"""What cannot be about settings: every check that needs no look at any file, and all that is wrong at once.

Pure functions; a problem names the option, what was expected and found, and what would do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from lazyshard.format.cursor import check_consumer
from lazyshard.format.records import MAX_SAMPLES_PER_CHUNK
from lazyshard_producer.configuration.row_problems import row_problems
from lazyshard_producer.configuration.setting_checks import MAX_SHUFFLE, path_problems
from lazyshard_producer.configuration.source_problems import source_problems
from lazyshard_producer.errors import Problem

if TYPE_CHECKING:
    from lazyshard_producer.configuration.settings import Limits, Settings

MAX_SEED: Final = 2**63 - 1

_MAX_ROW_BYTES_MAX: Final = 1 << 40
_MAX_AMOUNT: Final = 2**63 - 1
_MAX_TOKENS: Final = 2**32 - 1
_MAX_SEQUENCE: Final = 2**24
_MAX_TOKEN: Final = 2**31 - 1
_MAX_WORKERS: Final = 1024
_MAX_PORT: Final = 65535

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ONE_SLASH: Final = re.compile(r"(s3a?|gc?s|az|abfss?|adl|hdfs|https?|oss):/[^/]", re.IGNORECASE)


def find_problems(settings: Settings, given: frozenset[str] = frozenset()) -> tuple[Problem, ...]:
    """Returns all that cannot be, in the order of the options; mostly nothing.

    Args:
        settings: to be looked at.
        given: names of those that were given, where that is known. What is for another option that is not there is
            refused with its default value too.
    """
    return (
        *source_problems(settings.sources),
        *path_problems("--out", settings.out),
        *(_of_store(settings) if is_url(settings.out) else _of_no_store(settings)),
        *_of_numbers(settings),
        *row_problems(settings, given),
        *_of_bad_rows(settings),
        *_of_limits(settings.limits, given),
    )


def is_url(out: str) -> bool:
    """Whether a stream's place is a URL, which is one in an object store, and no path."""
    return _URL.match(out) is not None


def _of_store(settings: Settings) -> Iterator[Problem]:
    scheme, _, place = settings.out.partition("://")
    if scheme.lower() in ("file", "local"):
        yield Problem("--out", f"a directory is given by its path, without {scheme}://, got {settings.out!r}")
    elif not place.strip("/"):
        yield Problem("--out", f"a place behind {scheme}:// is needed, such as BUCKET/PREFIX, got {settings.out!r}")
    if settings.spool is not None:
        yield from path_problems("--spool", settings.spool)
    if not 1 <= settings.max_spool <= _MAX_AMOUNT:
        yield Problem("--max-spool", f"a number of bytes from 1 to {_MAX_AMOUNT} is needed, got {settings.max_spool}")
    if not (math.isfinite(settings.store_patience_s) and settings.store_patience_s >= 0):
        text = f"a number of seconds from 0 on is needed, got {settings.store_patience_s:g}"
        yield Problem("--store-patience-seconds", text)
    if settings.limits.min_free_disk is not None:
        yield Problem("--min-free-disk", "nobody can say what is free in an object store; give --max-disk")


def _of_no_store(settings: Settings) -> Iterator[Problem]:
    if _ONE_SLASH.match(settings.out):
        scheme, _, place = settings.out.partition(":/")
        yield Problem("--out", f"a URL has two slashes, {scheme}://{place}; for a directory write ./{settings.out}")
    if settings.spool is not None:
        yield Problem("--spool", f"it is for object stores, and --out is a directory, got {settings.spool!r}")


def _of_numbers(settings: Settings) -> Iterator[Problem]:
    for option, value, low, high in (
        ("--samples-per-chunk", settings.samples_per_chunk, 1, MAX_SAMPLES_PER_CHUNK),
        ("--max-row-bytes", settings.max_row_bytes, 1, _MAX_ROW_BYTES_MAX),
        ("--shuffle", settings.shuffle, 0, MAX_SHUFFLE),
        ("--seed", settings.seed, 0, MAX_SEED),
        ("--pack", settings.pack, 0, _MAX_TOKENS),
        ("--pack-buffer", settings.pack_buffer, 1, MAX_SHUFFLE),
        ("--pack-buffer-bytes", settings.pack_buffer_bytes, 1, _MAX_AMOUNT),
        ("--split", settings.split, 0, _MAX_SEQUENCE),
        ("--split-bos", settings.split_bos, 0, _MAX_TOKEN),
        ("--split-eos", settings.split_eos, 0, _MAX_TOKEN),
        ("--split-every-bos", settings.split_every_bos, 0, _MAX_TOKEN),
        ("--split-every-eos", settings.split_every_eos, 0, _MAX_TOKEN),
        ("--split-overlap", settings.split_overlap, 0, 1),
        ("--pad", settings.pad, 0, _MAX_SEQUENCE),
        ("--pad-token", settings.pad_token, 0, _MAX_TOKEN),
        ("--workers", settings.workers, 0, _MAX_WORKERS),
        ("--metrics-port", settings.metrics_port, 0, _MAX_PORT),
    ):
        if value is not None and not low <= value <= high:
            yield Problem(option, f"a number from {low} to {high} is needed, got {value}")
    if settings.rate is not None and not (math.isfinite(settings.rate) and settings.rate > 0):
        text = f"a number of samples a second above 0 is needed, got {settings.rate:g}; none means no limit"
        yield Problem("--rate", text)
    if not (math.isfinite(settings.log_every_s) and settings.log_every_s > 0):
        yield Problem("--log-every-seconds", f"a number of seconds above 0 is needed, got {settings.log_every_s:g}")
    if not settings.metrics_host or "\0" in settings.metrics_host:
        yield Problem("--metrics-host", f"an address is needed, such as 127.0.0.1, got {settings.metrics_host!r}")


def _of_bad_rows(settings: Settings) -> Iterator[Problem]:
    if settings.max_bad_rows is None:
        return
    if not 0 <= settings.max_bad_rows <= _MAX_AMOUNT:
        text = f"a number from 0 to {_MAX_AMOUNT} is needed, got {settings.max_bad_rows}"
        yield Problem("--max-bad-rows", text)
    if settings.on_bad_row == "fail":
        text = "the first bad row ends the run with --on-bad-row fail; give --on-bad-row skip or quarantine with it"
        yield Problem("--max-bad-rows", text)


def _of_limits(limits: Limits, given: frozenset[str]) -> Iterator[Problem]:
    ahead = limits.max_ahead.number if limits.max_ahead is not None else None
    last = limits.retain if isinstance(limits.retain, int) else None
    for option, value, low, of in (
        ("--max-ahead", ahead, 0, ""),
        ("--max-disk", limits.max_disk, 1, " of bytes"),
        ("--min-free-disk", limits.min_free_disk, 0, " of bytes"),
        ("--retain", last, 1, " of chunks"),
    ):
        if value is not None and not low <= value <= _MAX_AMOUNT:
            yield Problem(option, f"a number{of} from {low} to {_MAX_AMOUNT} is needed, got {value}")
    named = list(_of_consumers(limits.consumers))
    yield from named
    # Who says that all are kept knows: a flag may put aside what the file says, or a reload is to change it later.
    if limits.retain == "all" and "consumers" in given and "retain" not in given and not named:
        text = (
            "nothing is deleted without --retain, so it has no effect; give --retain consumed with it, or leave it out"
        )
        yield Problem("--consumers", text)


def _of_consumers(names: Iterable[str]) -> Iterator[Problem]:
    for name in names:
        try:
            check_consumer(name)
        except ValueError as cause:
            yield Problem("--consumers", str(cause))
