"""Checks for settings that conflict and for invalid texts; reports all problems together and reads no files.

pydantic checks types and bounds. A problem names the option, what was expected and found, and a remedy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Final, TypeAlias

from lazyshard_producer.configuration.settings import BY_NAME, MAX_SHUFFLE, OPTIONS, SOURCE_OPTIONS, SWIFT, Settings
from lazyshard_producer.configuration.settings import SourceSettings as Source

FUNCTION: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""MODULE:FUNCTION."""

MAX_NAME_BYTES: Final = 255  # longest file name on Linux: no file with a longer name can ever appear
_PYTHON: Final = "python:"
_STDIN: Final = "-"

_APART: Final = {
    "split": ("pack",),
    "pad": ("pack", "split"),
    "shuffle": ("pack",),
    "balance": ("shuffle", "split", "pad"),
    "measure": ("encode", "split", "pad"),
    "split_overlap": ("split_every_bos", "split_every_eos"),
}
"""Options that cannot be combined: each with those that already order the rows, make them, or give their lengths."""

Found: TypeAlias = Iterator[tuple[str, str]]
"""Names of options, each with its problem."""


def find_problems(settings: Settings, given: Set[str]) -> Iterator[tuple[str, str, int | None]]:
    """Yields each problem: option, text, and number of the source that it is about, None for other options.

    `given` contains the names of the options that were given.
    """
    weighted = any(source.weight is not None for source in settings.sources)
    for number, source in enumerate(settings.sources):
        for option, text in _of_source(source, weighted, number == len(settings.sources) - 1):
            yield option, f"{source.path}: {text}" if source.path else text, number
    for rules in (_of_stream, _of_rows, _of_forms, _of_encoding):
        for option, text in rules(settings, given):
            yield option, text, None
    for one, others in _APART.items():
        for other in others:
            if BY_NAME[one].is_set(settings) and BY_NAME[other].is_set(settings):
                yield one, f"cannot be combined with {BY_NAME[other].flag}; remove one of the two", None


def _of_path(option: str, path: str) -> Found:
    if not path:
        yield option, "expected a path, got an empty one"
    elif "\0" in path:
        yield option, f"a path cannot contain a NUL character, got {path!r}"


def _of_source(source: Source, weighted: bool, last: bool) -> Found:
    path = "follow" if source.follow else "path"
    if broken := list(_of_path(path, source.path)):
        yield from broken
        return
    python = source.path.startswith(_PYTHON)
    if source.follow and (source.path == _STDIN or python):
        yield path, "only a directory can be followed; give it as --source"
    elif python and not FUNCTION.fullmatch(source.path[len(_PYTHON) :]):
        yield path, "a Python source is written python:MODULE:FUNCTION"
    if source.resume != "skip" and (source.follow or python):
        yield "resume", "applies to standard input and pipes; this source always continues at its position; remove it"
    changed = [one.name for one in SOURCE_OPTIONS if one.needs and one.is_set(source)]
    if source.follow:
        yield from _of_following(source, changed)
    for option in () if source.follow else changed:
        yield option, "applies to followed directories; give this source with --follow, or remove the option"
    if weighted and source.weight is None:
        yield "weight", "missing here but given for others; give all sources a --weight (mixed), or none (in order)"
    elif not weighted and not last and (source.follow or source.path == _STDIN or python):
        yield path, "may never end, so the next source might never start; put it last, or give all a --weight (mixed)"


def _of_following(source: Source, changed: Sequence[str]) -> Found:
    if not _is_name(source.pattern):
        yield "pattern", f'expected a pattern for file names, such as "*.jsonl", got {source.pattern!r}'
    sound = _is_name(source.marker) and "{name}" in source.marker and source.marker != "{name}"
    if not sound:
        yield "marker", f'expected {{name}} and more, such as "{{name}}.done", got {source.marker!r}'
    for option, kind in (("marker", "marker"), ("idle_seconds", "idle")):
        if option in changed and source.finished_by != kind and (sound or kind == "idle"):
            yield option, f"requires --finished-by {kind}, got --finished-by {source.finished_by}"
    if not _is_name(source.end_marker):
        yield "end_marker", f'expected the name of a file, such as "_END", got {source.end_marker!r}'


def _is_name(text: str) -> bool:
    short = len(text.encode("utf-8", "surrogateescape")) <= MAX_NAME_BYTES
    return short and text not in ("", ".", "..") and not set(text) & {"/", "\0"}


def _of_stream(settings: Settings, given: Set[str]) -> Found:
    paths = [source.path for source in settings.sources]
    if not paths:
        yield "path", "expected at least one source, got none; give --source FILE or --follow DIRECTORY"
    if paths.count(_STDIN) > 1:
        yield "path", "standard input can be read only once, got it more often; remove all but one -"
    yield from _of_place(settings.out, settings)
    for option in OPTIONS:
        needs = [BY_NAME[name] for name in option.needs.split()]
        # The value "none" turns the option off.
        asked = bool(needs) and option.name in given and option.of(settings) is not None
        if asked and not any(one.of(settings) for one in needs):
            yield option.name, f"requires {' or '.join(one.flag for one in needs)}, which is not given; remove it"
    # An explicit `retain = all` is allowed: a flag may override the file, or a reload may change it later.
    if settings.limits.retain == "all" and "consumers" in given and "retain" not in given:
        yield "consumers", "nothing is deleted without --retain: give --retain consumed, or remove this"


def _of_place(out: str, settings: Settings) -> Found:
    yield from _of_path("out", out)
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", out):
        if re.match(r"(s3a?|gc?s|az|abfss?|adl|hdfs|https?|oss):/[^/]", out, re.IGNORECASE):
            yield "out", f"a URL has two slashes, {out.replace(':/', '://', 1)}; or write ./{out}"
        if settings.spool is not None:
            yield "spool", f"applies to object stores, but --out is a directory, got {settings.spool!r}"
        return
    scheme, _, place = out.partition("://")
    if scheme.lower() in ("file", "local"):
        yield "out", f"a local directory must be given as a path, without {scheme}://, got {out!r}"
    elif not place.strip("/"):
        yield "out", f"expected a place after {scheme}://, such as BUCKET/PREFIX, got {out!r}"
    if settings.writer is not None and scheme.lower() not in ("s3", "s3a"):
        share = "give a URL s3://, a directory that all writers share, or let one run without --writer publish there"
        yield "writer", f"several writers need a store with conditional puts, got --out {out!r}; {share}"
    if settings.spool is not None:
        yield from _of_path("spool", settings.spool)
    if settings.limits.min_free_disk is not None:
        yield "min_free_disk", "the free space of an object store is unknown; give --max-disk"


def _of_rows(settings: Settings, given: Set[str]) -> Found:
    for option, function in (("transform", settings.transform), ("where", settings.where)):
        if function is not None and not FUNCTION.fullmatch(function):
            yield option, f"expected MODULE:FUNCTION, such as my_rows:clean, got {function!r}"
    if settings.workers > 0 and not any((settings.transform, settings.embed, settings.encode, settings.measure)):
        yield "workers", "requires --transform, --embed, --encode or --measure, and none is given; remove it"
    if settings.max_bad_rows is not None and settings.on_bad_row == "fail":
        yield "max_bad_rows", "the first bad row ends the run; give --on-bad-row skip or quarantine with it"
    yield from _of_repeated("columns", settings.columns)
    columns, needed = dict(settings.columns), settings.pack_patches or settings.cost_per_patch
    made = settings.transform or settings.encode or settings.measure == SWIFT
    if needed and columns and "patches" not in columns and not made:
        yield "columns", "the patches of a row are under 'patches'; add that column"
    size, ranks, rows = settings.samples_per_chunk, settings.balance, settings.micro_batch_size
    if ranks is None:
        return
    if ranks > (most := max(1, MAX_SHUFFLE // max(1, size))):
        yield "balance", f"expected a number of ranks from 1 to {most}, got {ranks}; none turns balancing off"
    if size % rows:
        yield "micro_batch_size", f"expected a divisor of --samples-per-chunk {size}, got {rows}"
    if not any((settings.cost_per_token, settings.cost_per_token_squared, settings.cost_per_patch)):
        yield "cost_per_token", "expected a number above 0 for it, --cost-per-token-squared or --cost-per-patch; got 0"


def _of_repeated(option: str, pairs: Sequence[tuple[str, str]]) -> Found:
    for name, times in sorted(Counter(name for name, _ in pairs).items()):
        if times > 1:
            yield option, f"expected each name once, got {name!r} {times} times"


def _of_forms(settings: Settings, given: Set[str]) -> Found:
    form = next((BY_NAME[name].flag for name in ("pack", "split", "pad") if getattr(settings, name)), None)
    if form is None:
        return
    if settings.encode == SWIFT and ("mode", "rlhf") in settings.encode_option:
        yield "encode_option", f"samples of mode=rlhf have several sequences; remove it or {form}"
    # A transform may add the key.
    made = settings.transform or settings.encode or (settings.measure if settings.pack else None)
    key = settings.length_field if settings.pack else "input_ids"
    if settings.columns and key not in dict(settings.columns) and made is None:
        yield "columns", f"{form} needs the tokens of a row under {key!r}; add that column"
    every = [name for name in ("split_every_bos", "split_every_eos") if getattr(settings, name) is not None]
    if every and 0 < settings.split <= len(every):
        yield "split", f"expected {1 + len(every)} or more with {BY_NAME[every[0]].flag}, got {settings.split}"


def _of_encoding(settings: Settings, given: Set[str]) -> Found:
    encode, measure = settings.encode, settings.measure
    if "length_field" in given and (settings.pack or settings.balance) and (encode or measure):
        teller = "--encode" if encode else "--measure"
        yield "length_field", f"{teller} already counts the tokens of a row; remove one of the two"
    if measure is not None and settings.measure_field is not None and (measure == SWIFT or FUNCTION.fullmatch(measure)):
        yield "measure_field", f"applies to a tokenizer's directory, but --measure is {measure}; remove it"
    if encode is not None and encode != SWIFT and not FUNCTION.fullmatch(encode):
        yield "encode", f"expected {SWIFT} or MODULE:FUNCTION, got {encode!r}"
    if SWIFT not in (encode, measure):
        for name in ("model", "template", "max_length", "encode_option"):
            if (value := getattr(settings, name)) not in (None, ()):
                yield name, f"applies to {SWIFT}, got {value!r}; remove it, or give --encode {SWIFT}"
        return
    if not settings.model:
        option = "--encode" if encode == SWIFT else "--measure"
        yield "model", f"{option} {SWIFT} requires the model's directory, got none; give --model DIRECTORY"
    for name in ("max_length", "model", "template"):
        if name in dict(settings.encode_option):
            yield "encode_option", f"{name} has a separate option; give {BY_NAME[name].flag}"
    yield from _of_repeated("encode_option", settings.encode_option)
