"""Settings that do not go together, and texts that cannot be what they are for; all at once, without a look at files.

Types and bounds are pydantic's to check. A problem names the option, what was expected and found, and what would do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Final, TypeAlias

from lazyshard.conversion.indexed import INDEX_SUFFIX
from lazyshard_producer.configuration.settings import MAX_SHUFFLE, OPTIONS, SOURCE_OPTIONS, SWIFT, Settings, flag
from lazyshard_producer.configuration.settings import SourceSettings as Source

FUNCTION: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""MODULE:FUNCTION."""

MAX_NAME_BYTES: Final = 255  # of a file's name, on Linux: one of a longer name never comes
_PYTHON: Final = "python:"
_STDIN: Final = "-"

Found: TypeAlias = Iterator[tuple[str, str]]
"""Names of options, and what is wrong about them."""


def find_problems(settings: Settings, given: Set[str]) -> Iterator[tuple[str, str, int | None]]:
    """Yields all that does not go together: option, text, and the number of the source that it is about, if it is one.

    `given` names the options that were given.
    """
    weighted = any(source.weight is not None for source in settings.sources)
    for number, source in enumerate(settings.sources):
        for option, text in _of_source(source, weighted, number == len(settings.sources) - 1):
            yield option, f"{source.path}: {text}" if source.path else text, number
    for rules in (_of_stream, _of_rows, _of_forms, _of_lengths, _of_encoding):
        for option, text in rules(settings, given):
            yield option, text, None


def _of_path(option: str, path: str) -> Found:
    if not path:
        yield option, "a path is needed, got an empty one"
    elif "\0" in path:
        yield option, f"a path cannot hold a NUL character, got {path!r}"


def _of_source(source: Source, weighted: bool, last: bool) -> Found:
    path = "follow" if source.follow else "source"
    if broken := list(_of_path(path, source.path)):
        yield from broken
        return
    python = source.path.startswith(_PYTHON)
    if source.follow and (source.path == _STDIN or python):
        yield path, "only a directory can be followed; give it as --source"
    elif python and not FUNCTION.fullmatch(source.path[len(_PYTHON) :]):
        yield path, "a Python source is written python:MODULE:FUNCTION"
    if source.resume != "skip" and (source.follow or python):
        yield "resume", "it is for standard input and pipes, and this goes on where it was; leave it out"
    if source.indexed_rows != "document" and (source.follow or not source.path.endswith(INDEX_SUFFIX)):
        yield "indexed_rows", f"it is for Megatron's {INDEX_SUFFIX} files, and this is none; leave it out"
    plain = Source(path=source.path)
    changed = [one for one in SOURCE_OPTIONS if getattr(source, one.field) != getattr(plain, one.field)]
    if source.follow:
        yield from _of_following(source, {one.name for one in changed})
    else:
        for option in changed:
            if option.needs == "follow":
                yield option.name, "only followed directories have it; give this one with --follow, or leave it out"
    if weighted and source.weight is None:
        yield "weight", "has none and others have; give all sources a --weight (mixed), or none (in order)"
    elif not weighted and not last and (source.follow or source.path == _STDIN or python):
        yield path, "may never end, and the next ones would wait for that; put it last, or give all a --weight (mixed)"


def _of_following(source: Source, changed: Set[str]) -> Found:
    if not _is_name(source.pattern):
        yield "pattern", f'a pattern for file names is needed, such as "*.jsonl", got {source.pattern!r}'
    if not _is_name(source.marker) or "{name}" not in source.marker or source.marker == "{name}":
        yield "marker", f'more than {{name}} is needed, such as "{{name}}.done", got {source.marker!r}'
        changed = changed - {"marker"}
    for option, kind in (("marker", "marker"), ("idle_seconds", "idle")):
        if option in changed and source.finished_by != kind:
            yield option, f"it needs --finished-by {kind}, got --finished-by {source.finished_by}"
    if not _is_name(source.end_marker):
        yield "end_marker", f'the name of a file is needed, such as "_END", got {source.end_marker!r}'


def _is_name(text: str) -> bool:
    short = len(text.encode("utf-8", "surrogateescape")) <= MAX_NAME_BYTES
    return short and text not in ("", ".", "..") and not set(text) & {"/", "\0"}


def _of_stream(settings: Settings, given: Set[str]) -> Found:
    paths = [source.path for source in settings.sources]
    if not paths:
        yield "source", "at least one source is needed, got none; give --source FILE or --follow DIRECTORY"
    if paths.count(_STDIN) > 1:
        yield "source", "standard input can be read once, got it more often; leave all but one - out"
    yield from _of_place(settings.out, settings)
    for option in OPTIONS:
        # Who gives "none" asks for nothing.
        asked = option.name in given and option.of(settings) is not None
        if asked and option.needs is not None and not getattr(settings, option.needs):
            yield option.name, f"it is for {flag(option.needs)}, and there is none; leave it out"
    # Who says that all are kept knows: a flag may put aside what the file says, or a reload is to change it later.
    if settings.limits.retain == "all" and "consumers" in given and "retain" not in given:
        yield "consumers", "nothing is deleted without --retain: give --retain consumed, or leave this out"


def _of_place(out: str, settings: Settings) -> Found:
    yield from _of_path("out", out)
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", out):
        if re.match(r"(s3a?|gc?s|az|abfss?|adl|hdfs|https?|oss):/[^/]", out, re.IGNORECASE):
            yield "out", f"a URL has two slashes, {out.replace(':/', '://', 1)}; or write ./{out}"
        if settings.spool is not None:
            yield "spool", f"it is for object stores, and --out is a directory, got {settings.spool!r}"
        return
    scheme, _, place = out.partition("://")
    if scheme.lower() in ("file", "local"):
        yield "out", f"a directory is given by its path, without {scheme}://, got {out!r}"
    elif not place.strip("/"):
        yield "out", f"a place behind {scheme}:// is needed, such as BUCKET/PREFIX, got {out!r}"
    if settings.spool is not None:
        yield from _of_path("spool", settings.spool)
    if settings.limits.min_free_disk is not None:
        yield "min_free_disk", "nobody can say what is free in an object store; give --max-disk"


def _of_rows(settings: Settings, given: Set[str]) -> Found:
    for option, function in (("transform", settings.transform), ("where", settings.where)):
        if function is not None and not FUNCTION.fullmatch(function):
            yield option, f"MODULE:FUNCTION is needed, such as my_rows:clean, got {function!r}"
    if settings.workers > 0 and settings.transform is settings.encode is settings.measure is None:
        yield "workers", "they run --transform, --encode and --measure, and there is none; leave it out"
    if settings.max_bad_rows is not None and settings.on_bad_row == "fail":
        yield "max_bad_rows", "the first one ends the run; give --on-bad-row skip or quarantine with it"
    yield from _of_repeated("columns", [new for new, _ in settings.columns])
    size, ranks = settings.samples_per_chunk, settings.balance
    if ranks is None:
        return
    most = max(1, MAX_SHUFFLE // max(1, size))
    if ranks > most:
        yield "balance", f"a number of ranks from 1 to {most} is needed, got {ranks}; none deals nothing"
    if settings.shuffle:
        yield "balance", f"it shuffles rows already; leave out --shuffle {settings.shuffle}, or this"
    if size % settings.micro_batch_size:
        text = f"a divisor of --samples-per-chunk {size} is needed, got {settings.micro_batch_size}"
        yield "micro_batch_size", text
    if not settings.cost_per_token and not settings.cost_per_token_squared:
        yield "cost_per_token", "a number above 0 is needed, or as --cost-per-token-squared; got 0 for both"


def _of_repeated(option: str, names: list[str]) -> Found:
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield option, f"every name once, got {name!r} {names.count(name)} times"


def _of_forms(settings: Settings, given: Set[str]) -> Found:
    """Yields what is wrong about --pack, --split and --pad: one of them at most."""
    forms = [name for name in ("pack", "split", "pad") if getattr(settings, name)]
    if not forms:
        return
    form = flag(forms[0])
    if len(forms) > 1:
        yield forms[-1], f"a row is packed, cut or padded; leave out all but one of {', '.join(forms)}"
        return
    if settings.encode == SWIFT and ("mode", "rlhf") in settings.encode_option:
        yield "encode_option", f"samples of mode=rlhf have several sequences; leave it or {form} out"
    # A transform may add what is needed.
    made = settings.transform or settings.encode or (settings.measure if settings.pack else None)
    key = settings.length_field if settings.pack else "input_ids"
    if settings.columns and key not in [new for new, _ in settings.columns] and made is None:
        yield "columns", f"{form} needs the tokens of a row under {key!r}; take that column in"
    if settings.pack:
        if settings.shuffle:
            yield "shuffle", "--pack goes by lengths, whatever the order of the rows; leave it out"
        return
    if settings.balance is not None:
        yield "balance", f"{form} gives rows of one length: there is nothing to even out; leave it out"
    every = [name for name in ("split_every_bos", "split_every_eos") if getattr(settings, name) is not None]
    if settings.split and every:
        if settings.split <= len(every):
            yield "split", f"{1 + len(every)} or more is needed with {flag(every[0])}, got {settings.split}"
        elif settings.split_overlap:
            yield "split_overlap", f"it does not go with {flag(every[0])}; leave out one of the two"


def _of_lengths(settings: Settings, given: Set[str]) -> Found:
    measure = settings.measure
    if "length_field" in given:
        if not settings.pack and settings.balance is None:
            yield "length_field", "it is for --pack and --balance, and there is neither; leave it out"
        elif settings.encode is not None or measure is not None:
            teller = "--encode" if settings.encode is not None else "--measure"
            yield "length_field", f"{teller} tells the tokens of a row; leave out one of the two"
    if measure is None:
        return
    for name in ("encode", "split", "pad"):
        if getattr(settings, name):
            yield "measure", f"{flag(name)} tells the length of what it makes; leave out one of the two"
    if settings.measure_field is not None and (measure == SWIFT or FUNCTION.fullmatch(measure)):
        yield "measure_field", f"it is for a tokenizer's folder, and --measure is {measure}; leave it out"


def _of_encoding(settings: Settings, given: Set[str]) -> Found:
    if settings.encode is not None and settings.encode != SWIFT and not FUNCTION.fullmatch(settings.encode):
        yield "encode", f"{SWIFT} or MODULE:FUNCTION is needed, got {settings.encode!r}"
    if SWIFT not in (settings.encode, settings.measure):
        for name in ("model", "template", "max_length", "encode_option"):
            if (value := getattr(settings, name)) not in (None, ()):
                yield name, f"it is for {SWIFT}, got {value!r}; leave it out, or give --encode {SWIFT}"
        return
    if not settings.model:
        option = "--encode" if settings.encode == SWIFT else "--measure"
        yield "model", f"{option} {SWIFT} needs the model's folder, got none; give --model DIRECTORY"
    names = [name for name, _ in settings.encode_option]
    for name in sorted({"model", "template", "max_length"} & set(names)):
        yield "encode_option", f"{name} has an option of its own; give {flag(name)}"
    yield from _of_repeated("encode_option", names)
