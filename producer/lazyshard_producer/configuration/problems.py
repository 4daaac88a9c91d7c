"""What cannot be about settings: every check that needs no look at any file, and all that is wrong at once.

Pure functions; a problem names the option, what was expected and found, and what would do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from lazyshard.format.cursor import check_consumer
from lazyshard.format.indexed import INDEX_SUFFIX
from lazyshard.format.manifest import MAX_SAMPLES_PER_CHUNK
from lazyshard_producer.errors import Problem

if TYPE_CHECKING:
    from lazyshard_producer.configuration.settings import Limits, Settings, SourceSettings

MAX_SEED: Final = 2**63 - 1

MAX_NAME_BYTES: Final = 255
"""Of a file's name, on Linux. A file of a longer name never comes, however long it is waited for."""

_MAX_ROW_BYTES_MAX: Final = 1 << 40
_MAX_AMOUNT: Final = 2**63 - 1
_MAX_SHUFFLE: Final = 10**9
_MAX_TOKENS: Final = 2**32 - 1
_MAX_SEQUENCE: Final = 2**24
_MAX_TOKEN: Final = 2**31 - 1
_MAX_WORKERS: Final = 1024
_MAX_PORT: Final = 65535

_FUNCTION: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ONE_SLASH: Final = re.compile(r"(s3a?|gc?s|az|abfss?|adl|hdfs|https?|oss):/[^/]", re.IGNORECASE)
_PYTHON: Final = "python:"
_STDIN: Final = "-"

SWIFT: Final = "swift"
"""What --encode calls ms-swift."""

MAX_LENGTH: Final = 2**31 - 1
"""Tokens of a sample that ms-swift can be told."""

_OPTION_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_OWN_OPTIONS: Final = {"model": "--model", "template": "--template", "max_length": "--max-length"}


def find_problems(settings: Settings, given: frozenset[str] = frozenset()) -> tuple[Problem, ...]:
    """Returns all that cannot be, in the order of the options; mostly nothing.

    Args:
        settings: to be looked at.
        given: names of those that were given, where that is known. What is for another option that is not there is
            refused with its default value too.
    """
    return (
        *_of_sources(settings.sources),
        *_of_path("--out", settings.out),
        *(_of_store(settings) if is_url(settings.out) else _of_no_store(settings)),
        *_of_numbers(settings),
        *_of_functions(settings),
        *_of_columns(settings.columns),
        *_of_balance(settings, given),
        *_of_packing(settings, given),
        *_of_splitting(settings, given),
        *_of_padding(settings, given),
        *_of_tokens(settings),
        *_of_lengths(settings, given),
        *_of_encoding(settings),
        *_of_bad_rows(settings),
        *_of_limits(settings.limits),
    )


def is_live(source: SourceSettings) -> bool:
    """Whether a source may have no row at the moment and some later, as far as its settings say.

    A named pipe is not told from a file here: that takes a look at it.
    """
    return source.follow or source.path == _STDIN or is_python(source.path)


def is_url(out: str) -> bool:
    """Whether a stream's place is a URL, which is one in an object store, and no path."""
    return _URL.match(out) is not None


def is_python(path: str) -> bool:
    """Whether a path stands for a Python function."""
    return path.startswith(_PYTHON)


def _of_sources(sources: tuple[SourceSettings, ...]) -> Iterator[Problem]:
    if not sources:
        yield Problem("--source", "at least one source is needed, got none; give --source FILE or --follow DIRECTORY")
    for number, source in enumerate(sources):
        yield from _of_source(number, source)
    yield from _of_weights(sources)
    if sum(source.path == _STDIN for source in sources) > 1:
        yield Problem("--source", "standard input can be read once, got it more often; leave all but one - out")


def _of_source(number: int, source: SourceSettings) -> Iterator[Problem]:
    path = _option(source)
    broken = list(_of_path(path, source.path))
    if broken:
        yield broken[0]._replace(source=number)
        return
    for option, text in (*_of_kind(source), *(_of_following(source) if source.follow else _of_not_following(source))):
        yield Problem(option, f"{source.path}: {text}", number)


def _of_kind(source: SourceSettings) -> Iterator[tuple[str, str]]:
    path = _option(source)
    python = is_python(source.path)
    if source.follow and (source.path == _STDIN or python):
        yield path, "only a directory can be followed; give it as --source"
    elif python and not _FUNCTION.fullmatch(source.path[len(_PYTHON) :]):
        yield path, "a Python source is written python:MODULE:FUNCTION"
    if source.weight is not None and not (math.isfinite(source.weight) and source.weight > 0):
        yield "--weight", f"a number above 0 is needed, got {source.weight:g}; for no rows of it leave the source out"
    if source.resume != "skip" and (source.follow or python):
        yield "--resume", "it is for standard input and pipes, and this goes on where it was; leave it out"
    if source.indexed_rows != "document" and (source.follow or not source.path.endswith(INDEX_SUFFIX)):
        yield "--indexed-rows", f"it is for Megatron's {INDEX_SUFFIX} files, and this is none; leave it out"


def _of_not_following(source: SourceSettings) -> Iterator[tuple[str, str]]:
    plain = type(source)(path=source.path)
    for option, name in (
        ("--pattern", "pattern"),
        ("--finished-by", "finished_by"),
        ("--marker", "marker"),
        ("--idle-seconds", "idle_s"),
        ("--end-marker", "end_marker"),
    ):
        if getattr(source, name) != getattr(plain, name):
            yield option, "only followed directories have it; give this one with --follow, or leave the option out"


def _of_following(source: SourceSettings) -> Iterator[tuple[str, str]]:
    plain = type(source)(path=source.path)
    if not _is_name_part(source.pattern):
        yield "--pattern", f'a pattern for file names is needed, such as "*.jsonl", got {source.pattern!r}'
    if not _is_file_name(source.marker) or "{name}" not in source.marker or source.marker == "{name}":
        expected = 'a file name with {name} in it, and more than that, is needed, such as "{name}.done"'
        yield "--marker", f"{expected}, got {source.marker!r}"
    elif source.marker != plain.marker and source.finished_by != "marker":
        yield "--marker", f"it needs --finished-by marker, got --finished-by {source.finished_by}"
    if not (math.isfinite(source.idle_s) and source.idle_s > 0):
        yield "--idle-seconds", f"a number of seconds above 0 is needed, got {source.idle_s:g}"
    elif source.idle_s != plain.idle_s and source.finished_by != "idle":
        yield "--idle-seconds", f"it needs --finished-by idle, got --finished-by {source.finished_by}"
    if not _is_file_name(source.end_marker):
        yield (
            "--end-marker",
            f'the name of a file in the directory is needed, such as "_END", got {source.end_marker!r}',
        )


def _of_weights(sources: tuple[SourceSettings, ...]) -> Iterator[Problem]:
    weighted = [source.weight is not None for source in sources]
    if all(weighted):
        return
    if any(weighted):
        for number, source in enumerate(sources):
            if source.weight is None:
                text = "has none and others have; give all sources a --weight (mixed), or none (in order)"
                yield Problem("--weight", f"{source.path}: {text}", number)
        return
    for number, source in enumerate(sources[:-1]):
        if is_live(source):
            text = (
                "may never end, and the sources after it would wait for that; put it last, or give all of them a "
                "--weight (then they are mixed)"
            )
            yield Problem(_option(source), f"{source.path}: {text}", number)


def _of_store(settings: Settings) -> Iterator[Problem]:
    scheme, _, place = settings.out.partition("://")
    if scheme.lower() in ("file", "local"):
        yield Problem("--out", f"a directory is given by its path, without {scheme}://, got {settings.out!r}")
    elif not place.strip("/"):
        yield Problem("--out", f"a place behind {scheme}:// is needed, such as BUCKET/PREFIX, got {settings.out!r}")
    if settings.spool is not None:
        yield from _of_path("--spool", settings.spool)
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
        ("--shuffle", settings.shuffle, 0, _MAX_SHUFFLE),
        ("--seed", settings.seed, 0, MAX_SEED),
        ("--pack", settings.pack, 0, _MAX_TOKENS),
        ("--pack-buffer", settings.pack_buffer, 1, _MAX_SHUFFLE),
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


def _of_functions(settings: Settings) -> Iterator[Problem]:
    for option, function in (("--transform", settings.transform), ("--where", settings.where)):
        if function is not None and not _FUNCTION.fullmatch(function):
            yield Problem(option, f"MODULE:FUNCTION is needed, such as my_rows:clean, got {function!r}")
    if settings.workers > 0 and settings.transform is None and settings.encode is None:
        text = f"they run --transform and --encode, and there is neither, got {settings.workers}; leave it out"
        yield Problem("--workers", text)


def _of_columns(columns: tuple[tuple[str, str], ...]) -> Iterator[Problem]:
    for new, old in columns:
        if not new or not old or "=" in old:
            yield Problem("--columns", f"names of columns as NEW=OLD are needed, got {new!r} = {old!r}")
    names = [new for new, _ in columns]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem("--columns", f"every new name once, got {name!r} {names.count(name)} times")


def _of_balance(settings: Settings, given: frozenset[str]) -> Iterator[Problem]:
    ranks, batch = settings.balance, settings.micro_batch_size
    if ranks is None:
        for name in ("micro_batch_size", "cost_per_token", "cost_per_token_squared"):
            if _is_set(settings, name, given):
                yield Problem(_flag(name), f"it is for --balance, and there is none, got {getattr(settings, name)!r}")
        return
    most = max(1, _MAX_SHUFFLE // max(1, settings.samples_per_chunk))
    if not 1 <= ranks <= most:
        yield Problem("--balance", f"a number of ranks from 1 to {most} is needed, got {ranks}; none deals nothing")
    if settings.shuffle:
        text = "rows dealt by cost are in an order by chance already, as far as costs allow; leave out one of --shuffle"
        yield Problem("--balance", f"{text} {settings.shuffle} and --balance {ranks}")
    if batch < 1 or settings.samples_per_chunk % batch:
        text = f"a number of rows of which --samples-per-chunk {settings.samples_per_chunk} is a multiple is needed"
        yield Problem("--micro-batch-size", f"{text}, got {batch}")
    costs = settings.cost_per_token, settings.cost_per_token_squared
    for name, cost in zip(("cost_per_token", "cost_per_token_squared"), costs, strict=True):
        if not (math.isfinite(cost) and cost >= 0):
            yield Problem(_flag(name), f"a number from 0 on is needed, got {cost:g}")
    if not any(costs):
        text = "a number above 0 is needed here or as --cost-per-token-squared, or rows cost nothing; got 0 for both"
        yield Problem("--cost-per-token", text)


def _of_packing(settings: Settings, given: frozenset[str]) -> Iterator[Problem]:
    if settings.pack:
        if settings.shuffle:
            text = "--pack goes by lengths, so the order of the rows in its buffer counts for nothing; leave it out"
            yield Problem("--shuffle", f"{text}, and shuffle packs in training")
        if settings.encode == SWIFT and ("mode", "rlhf") in settings.encode_option:
            text = "--pack is for samples of one sequence, and ms-swift trains no packs with mode=rlhf; leave one out"
            yield Problem("--encode-option", text)
        names = [new for new, _ in settings.columns]
        # A transform may add it.
        if names and settings.length_field not in names and settings.transform is None and settings.encode is None:
            text = f"--pack needs the tokens of a row under {settings.length_field!r}; take that column in"
            yield Problem("--columns", f"{text}, or name another with --length-field")
        return
    for name in ("pack_buffer", "pack_buffer_bytes"):
        if _is_set(settings, name, given):
            yield Problem(_flag(name), "it is for --pack, and there is none; leave it out")


def _of_splitting(settings: Settings, given: frozenset[str]) -> Iterator[Problem]:
    every = [name for name in ("split_every_bos", "split_every_eos") if getattr(settings, name) is not None]
    if not settings.split:
        for name in ("split_bos", "split_eos", *every, "split_overlap"):
            if _is_set(settings, name, given):
                yield Problem(_flag(name), "it is for --split, and there is none; leave it out")
    elif every and 0 < settings.split <= len(every):
        text = f"a number from {1 + len(every)} is needed, so that a sequence has room for a row's token beside its own"
        yield Problem("--split", f"{text}, got {settings.split}")
    elif every and settings.split_overlap == 1:
        text = f"it goes not with {_flag(every[0])}, whose token is none of what follows; leave out one of the two"
        yield Problem("--split-overlap", text)


def _of_padding(settings: Settings, given: frozenset[str]) -> Iterator[Problem]:
    if not settings.pad and _is_set(settings, "pad_token", given):
        yield Problem("--pad-token", "it is for --pad, and there is none; leave it out")


def _of_tokens(settings: Settings) -> Iterator[Problem]:
    """Yields what is wrong about --split and --pad alike."""
    forms = [name for name in ("pack", "split", "pad") if getattr(settings, name)]
    if forms in ([], ["pack"]):
        return
    if len(forms) > 1:
        text = "a row is packed whole, cut or padded, and one of these alone; leave out all but one of"
        yield Problem(_flag(forms[-1]), f"{text} {', '.join(map(_flag, forms))}")
        return
    form = _flag(forms[0])
    if settings.balance is not None:
        text = f"{form} gives rows of the same number of tokens, so there is nothing to be evened out"
        yield Problem("--balance", f"{text}; leave it out")
    if settings.encode == SWIFT and ("mode", "rlhf") in settings.encode_option:
        text = f"{form} is for samples of one sequence, and those of mode=rlhf have several; leave one out"
        yield Problem("--encode-option", text)
    names = [new for new, _ in settings.columns]
    if names and "input_ids" not in names and settings.transform is None and settings.encode is None:
        yield Problem("--columns", f"{form} needs the tokens of a row under 'input_ids'; take that column in")


def _of_lengths(settings: Settings, given: frozenset[str]) -> Iterator[Problem]:
    if not settings.length_field:
        yield Problem("--length-field", "the name of a key is needed, got an empty one")
    elif not _is_set(settings, "length_field", given):
        return
    elif not settings.pack and settings.balance is None:
        yield Problem("--length-field", "it is for --pack and --balance, and there is neither; leave it out")
    elif settings.encode is not None:
        text = "the encoder tells the tokens of a row, as the 'length' of what it returns; leave it out"
        yield Problem("--length-field", text)


def _of_encoding(settings: Settings) -> Iterator[Problem]:
    swift = settings.encode == SWIFT
    if settings.encode is not None and not swift and not _FUNCTION.fullmatch(settings.encode):
        yield Problem("--encode", f"{SWIFT} or MODULE:FUNCTION is needed, got {settings.encode!r}")
    if swift and not settings.model:
        yield Problem("--model", f"--encode {SWIFT} needs the model's folder, got none; give --model DIRECTORY")
    given = (
        ("--model", settings.model),
        ("--template", settings.template),
        ("--max-length", settings.max_length),
        ("--encode-option", settings.encode_option or None),
    )
    if not swift:
        for option, value in given:
            if value is not None:
                yield Problem(option, f"it is for --encode {SWIFT}, got {value!r}; leave it out")
        return
    if settings.max_length is not None and not 1 <= settings.max_length <= MAX_LENGTH:
        yield Problem("--max-length", f"a number from 1 to {MAX_LENGTH} is needed, got {settings.max_length}")
    names = [name for name, _ in settings.encode_option]
    for name in sorted(set(names)):
        if not _OPTION_NAME.fullmatch(name):
            yield Problem("--encode-option", f"the name of an option of ms-swift is needed, got {name!r}")
        elif name in _OWN_OPTIONS:
            yield Problem("--encode-option", f"{name} has an option of its own; give {_OWN_OPTIONS[name]}")
        elif names.count(name) > 1:
            yield Problem("--encode-option", f"every name once, got {name} {names.count(name)} times")


def _of_bad_rows(settings: Settings) -> Iterator[Problem]:
    if settings.max_bad_rows is None:
        return
    if not 0 <= settings.max_bad_rows <= _MAX_AMOUNT:
        text = f"a number from 0 to {_MAX_AMOUNT} is needed, got {settings.max_bad_rows}"
        yield Problem("--max-bad-rows", text)
    if settings.on_bad_row == "fail":
        text = "the first bad row ends the run with --on-bad-row fail; give --on-bad-row skip or quarantine with it"
        yield Problem("--max-bad-rows", text)


def _of_limits(limits: Limits) -> Iterator[Problem]:
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
    for name in limits.consumers:
        try:
            check_consumer(name)
        except ValueError as cause:
            yield Problem("--consumers", str(cause))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_set(settings: Settings, name: str, given: frozenset[str]) -> bool:
    """Whether somebody wants this, be it the default."""
    return name in given or bool(getattr(settings, name) != _default(settings, name))


def _default(settings: Settings, name: str) -> Any:
    return next(one.default for one in fields(settings) if one.name == name)


def _option(source: SourceSettings) -> str:
    return "--follow" if source.follow else "--source"


def _is_file_name(text: str) -> bool:
    return _is_name_part(text) and len(text.encode("utf-8", "surrogateescape")) <= MAX_NAME_BYTES


def _is_name_part(text: str) -> bool:
    return bool(text) and text not in (".", "..") and not set(text) & {"/", "\0"}


def _of_path(option: str, path: str) -> Iterator[Problem]:
    if not path:
        yield Problem(option, "a path is needed, got an empty one")
    elif "\0" in path:
        yield Problem(option, f"a path cannot hold a NUL character, got {path!r}")
