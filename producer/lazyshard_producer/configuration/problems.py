"""Settings that do not go together, and texts that cannot be what they are for; all at once, without a look at files.

Types and bounds are pydantic's to check. A problem names the option, what was expected and found, and what would do.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Set
from typing import Final

from lazyshard.conversion.indexed import INDEX_SUFFIX
from lazyshard.format.cursor import check_consumer
from lazyshard_producer.configuration.settings import MAX_SHUFFLE, OPTIONS, SOURCE_OPTIONS, SWIFT, Settings, flag
from lazyshard_producer.configuration.settings import SourceSettings as Source
from lazyshard_producer.errors import Problem

FUNCTION: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""MODULE:FUNCTION."""

MAX_NAME_BYTES: Final = 255  # of a file's name, on Linux: one of a longer name never comes
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ONE_SLASH: Final = re.compile(r"(s3a?|gc?s|az|abfss?|adl|hdfs|https?|oss):/[^/]", re.IGNORECASE)
_OPTION_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_PYTHON: Final = "python:"
_STDIN: Final = "-"


def find_problems(settings: Settings, given: Set[str]) -> list[Problem]:
    """Returns all that does not go together, in the order of the options; `given` names those that were given."""
    return [
        *_of_sources(settings.sources),
        *_of_place(settings),
        *_of_needs(settings, given),
        *_of_functions(settings),
        *_of_columns(settings),
        *_of_balance(settings),
        *_of_forms(settings),
        *_of_lengths(settings, given),
        *_of_encoding(settings),
        *_of_limits(settings, given),
    ]


def is_python(path: str) -> bool:
    """Whether a path stands for a Python function."""
    return path.startswith(_PYTHON)


def is_live(source: Source) -> bool:
    """Whether a source may have no row now and some later; a named pipe is not told from a file here."""
    return source.follow or source.path == _STDIN or is_python(source.path)


def _of_path(option: str, path: str) -> Iterator[Problem]:
    if not path:
        yield Problem(option, "a path is needed, got an empty one")
    elif "\0" in path:
        yield Problem(option, f"a path cannot hold a NUL character, got {path!r}")


def _of_sources(sources: tuple[Source, ...]) -> Iterator[Problem]:
    if not sources:
        yield Problem("--source", "at least one source is needed, got none; give --source FILE or --follow DIRECTORY")
    for number, source in enumerate(sources):
        broken = list(_of_path(_path_flag(source), source.path))
        if broken:
            yield broken[0]._replace(source=number)
            continue
        about = _of_following(source) if source.follow else _of_not_following(source)
        for option, text in (*_of_kind(source), *about):
            yield Problem(option, f"{source.path}: {text}", number)
    yield from _of_weights(sources)
    if sum(source.path == _STDIN for source in sources) > 1:
        yield Problem("--source", "standard input can be read once, got it more often; leave all but one - out")


def _path_flag(source: Source) -> str:
    return "--follow" if source.follow else "--source"


def _of_kind(source: Source) -> Iterator[tuple[str, str]]:
    python = is_python(source.path)
    if source.follow and (source.path == _STDIN or python):
        yield "--follow", "only a directory can be followed; give it as --source"
    elif python and not FUNCTION.fullmatch(source.path[len(_PYTHON) :]):
        yield "--source", "a Python source is written python:MODULE:FUNCTION"
    if source.weight is not None and not (math.isfinite(source.weight) and source.weight > 0):
        yield "--weight", f"a number above 0 is needed, got {source.weight:g}; for no rows of it leave the source out"
    if source.resume != "skip" and (source.follow or python):
        yield "--resume", "it is for standard input and pipes, and this goes on where it was; leave it out"
    if source.indexed_rows != "document" and (source.follow or not source.path.endswith(INDEX_SUFFIX)):
        yield "--indexed-rows", f"it is for Megatron's {INDEX_SUFFIX} files, and this is none; leave it out"


def _of_not_following(source: Source) -> Iterator[tuple[str, str]]:
    plain = Source(path=source.path)
    for option in SOURCE_OPTIONS:
        if option.needs == "follow" and getattr(source, option.field) != getattr(plain, option.field):
            yield option.flag, "only followed directories have it; give this one with --follow, or leave the option out"


def _of_following(source: Source) -> Iterator[tuple[str, str]]:
    plain = Source(path=source.path)
    if not _is_name(source.pattern, sys.maxsize):
        yield "--pattern", f'a pattern for file names is needed, such as "*.jsonl", got {source.pattern!r}'
    if not _is_name(source.marker) or "{name}" not in source.marker or source.marker == "{name}":
        yield "--marker", f'more than {{name}} is needed, such as "{{name}}.done", got {source.marker!r}'
    elif source.marker != plain.marker and source.finished_by != "marker":
        yield "--marker", f"it needs --finished-by marker, got --finished-by {source.finished_by}"
    if source.idle_s != plain.idle_s and source.finished_by != "idle":
        yield "--idle-seconds", f"it needs --finished-by idle, got --finished-by {source.finished_by}"
    if not _is_name(source.end_marker):
        yield "--end-marker", f'the name of a file is needed, such as "_END", got {source.end_marker!r}'


def _is_name(text: str, most: int = MAX_NAME_BYTES) -> bool:
    sound = bool(text) and text not in (".", "..") and not set(text) & {"/", "\0"}
    return sound and len(text.encode("utf-8", "surrogateescape")) <= most


def _of_weights(sources: tuple[Source, ...]) -> Iterator[Problem]:
    weighted = [source.weight is not None for source in sources]
    if all(weighted):
        return
    for number, source in enumerate(sources):
        if any(weighted) and source.weight is None:
            text = "has none and others have; give all sources a --weight (mixed), or none (in order)"
            yield Problem("--weight", f"{source.path}: {text}", number)
        elif not any(weighted) and is_live(source) and number < len(sources) - 1:
            text = "may never end, and the next ones would wait for that; put it last, or give all a --weight (mixed)"
            yield Problem(_path_flag(source), f"{source.path}: {text}", number)


def _of_place(settings: Settings) -> Iterator[Problem]:
    out, spool = settings.out, settings.spool
    yield from _of_path("--out", out)
    if not _URL.match(out):
        if _ONE_SLASH.match(out):
            yield Problem("--out", f"a URL has two slashes, {out.replace(':/', '://', 1)}; or write ./{out}")
        if spool is not None:
            yield Problem("--spool", f"it is for object stores, and --out is a directory, got {spool!r}")
        return
    scheme, _, place = out.partition("://")
    if scheme.lower() in ("file", "local"):
        yield Problem("--out", f"a directory is given by its path, without {scheme}://, got {out!r}")
    elif not place.strip("/"):
        yield Problem("--out", f"a place behind {scheme}:// is needed, such as BUCKET/PREFIX, got {out!r}")
    if spool is not None:
        yield from _of_path("--spool", spool)
    if settings.limits.min_free_disk is not None:
        yield Problem("--min-free-disk", "nobody can say what is free in an object store; give --max-disk")


def _of_needs(settings: Settings, given: Set[str]) -> Iterator[Problem]:
    for option in OPTIONS:
        needs = option.needs
        # Who gives "none" asks for nothing.
        asked = option.name in given and getattr(settings, option.field, None) is not None
        if needs is not None and asked and not getattr(settings, needs):
            yield Problem(option.flag, f"it is for {flag(needs)}, and there is none; leave it out")
    if "\0" in settings.metrics_host:
        yield Problem("--metrics-host", f"an address is needed, such as 127.0.0.1, got {settings.metrics_host!r}")


def _of_functions(settings: Settings) -> Iterator[Problem]:
    for option, function in (("--transform", settings.transform), ("--where", settings.where)):
        if function is not None and not FUNCTION.fullmatch(function):
            yield Problem(option, f"MODULE:FUNCTION is needed, such as my_rows:clean, got {function!r}")
    if settings.workers > 0 and settings.transform is settings.encode is settings.measure is None:
        yield Problem("--workers", "they run --transform, --encode and --measure, and there is none; leave it out")
    if settings.max_bad_rows is not None and settings.on_bad_row == "fail":
        yield Problem("--max-bad-rows", "the first one ends the run; give --on-bad-row skip or quarantine with it")


def _of_columns(settings: Settings) -> Iterator[Problem]:
    for new, old in settings.columns:
        if not new or not old or "=" in old:
            yield Problem("--columns", f"names of columns as NEW=OLD are needed, got {new!r} = {old!r}")
    yield from _of_repeated("--columns", [new for new, _ in settings.columns])


def _of_repeated(option: str, names: list[str]) -> Iterator[Problem]:
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(option, f"every name once, got {name!r} {names.count(name)} times")


def _of_balance(settings: Settings) -> Iterator[Problem]:
    ranks, batch = settings.balance, settings.micro_batch_size
    if ranks is None:
        return
    most = max(1, MAX_SHUFFLE // max(1, settings.samples_per_chunk))
    if ranks > most:
        yield Problem("--balance", f"a number of ranks from 1 to {most} is needed, got {ranks}; none deals nothing")
    if settings.shuffle:
        yield Problem("--balance", f"it shuffles rows already; leave out --shuffle {settings.shuffle}, or this")
    if settings.samples_per_chunk % batch:
        size = settings.samples_per_chunk
        yield Problem("--micro-batch-size", f"a divisor of --samples-per-chunk {size} is needed, got {batch}")
    if not settings.cost_per_token and not settings.cost_per_token_squared:
        yield Problem("--cost-per-token", "a number above 0 is needed, or as --cost-per-token-squared; got 0 for both")


def _of_forms(settings: Settings) -> Iterator[Problem]:
    """Yields what is wrong about --pack, --split and --pad: one of them at most."""
    forms = [name for name in ("pack", "split", "pad") if getattr(settings, name)]
    if not forms:
        return
    form = flag(forms[0])
    if len(forms) > 1:
        yield Problem(flag(forms[-1]), f"a row is packed, cut or padded; leave out all but one of {', '.join(forms)}")
        return
    if settings.encode == SWIFT and ("mode", "rlhf") in settings.encode_option:
        yield Problem("--encode-option", f"samples of mode=rlhf have several sequences; leave it or {form} out")
    names = [new for new, _ in settings.columns]
    # A transform may add it.
    made = settings.transform or settings.encode
    if settings.pack:
        if settings.shuffle:
            yield Problem("--shuffle", "--pack goes by lengths, whatever the order of the rows; leave it out")
        if names and settings.length_field not in names and made is settings.measure is None:
            key = settings.length_field
            yield Problem("--columns", f"--pack needs the tokens of a row under {key!r}; take in that column")
        return
    if settings.balance is not None:
        yield Problem("--balance", f"{form} gives rows of one length: there is nothing to even out; leave it out")
    if names and "input_ids" not in names and made is None:
        yield Problem("--columns", f"{form} needs the tokens of a row under 'input_ids'; take that column in")
    every = [name for name in ("split_every_bos", "split_every_eos") if getattr(settings, name) is not None]
    if settings.split and every:
        if settings.split <= len(every):
            yield Problem("--split", f"{1 + len(every)} or more is needed with {flag(every[0])}, got {settings.split}")
        elif settings.split_overlap:
            yield Problem("--split-overlap", f"it does not go with {flag(every[0])}; leave out one of the two")


def _of_lengths(settings: Settings, given: Set[str]) -> Iterator[Problem]:
    measure = settings.measure
    if "length_field" in given:
        teller = "--encode" if settings.encode is not None else "--measure"
        if not settings.pack and settings.balance is None:
            yield Problem("--length-field", "it is for --pack and --balance, and there is neither; leave it out")
        elif settings.encode is not None or measure is not None:
            yield Problem("--length-field", f"{teller} tells the tokens of a row; leave out one of the two")
    if measure is None:
        return
    for name in ("encode", "split", "pad"):
        if getattr(settings, name):
            yield Problem("--measure", f"{flag(name)} tells the length of what it makes; leave out one of the two")
    if settings.measure_field is not None and (measure == SWIFT or FUNCTION.fullmatch(measure)):
        yield Problem("--measure-field", f"it is for a tokenizer's folder, and --measure is {measure}; leave it out")


def _of_encoding(settings: Settings) -> Iterator[Problem]:
    if settings.encode is not None and settings.encode != SWIFT and not FUNCTION.fullmatch(settings.encode):
        yield Problem("--encode", f"{SWIFT} or MODULE:FUNCTION is needed, got {settings.encode!r}")
    if SWIFT not in (settings.encode, settings.measure):
        for name in ("model", "template", "max_length", "encode_option"):
            value = getattr(settings, name)
            if value not in (None, ()):
                yield Problem(flag(name), f"it is for {SWIFT}, got {value!r}; leave it out, or give --encode {SWIFT}")
        return
    if not settings.model:
        option = "--encode" if settings.encode == SWIFT else "--measure"
        yield Problem("--model", f"{option} {SWIFT} needs the model's folder, got none; give --model DIRECTORY")
    names = [name for name, _ in settings.encode_option]
    for name in sorted(set(names)):
        if not _OPTION_NAME.fullmatch(name):
            yield Problem("--encode-option", f"the name of an option of ms-swift is needed, got {name!r}")
        elif name in ("model", "template", "max_length"):
            yield Problem("--encode-option", f"{name} has an option of its own; give {flag(name)}")
    yield from _of_repeated("--encode-option", names)


def _of_limits(settings: Settings, given: Set[str]) -> Iterator[Problem]:
    named = False
    for name in settings.limits.consumers:
        try:
            check_consumer(name)
        except ValueError as cause:
            named = True
            yield Problem("--consumers", str(cause))
    # Who says that all are kept knows: a flag may put aside what the file says, or a reload is to change it later.
    if settings.limits.retain == "all" and "consumers" in given and "retain" not in given and not named:
        yield Problem("--consumers", "nothing is deleted without --retain: give --retain consumed, or leave this out")
