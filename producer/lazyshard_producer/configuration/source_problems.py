"""What cannot be about sources: how they are named, followed and weighted, and in which order they come."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from lazyshard.conversion.indexed import INDEX_SUFFIX
from lazyshard_producer.configuration.setting_checks import FUNCTION, path_problems
from lazyshard_producer.errors import Problem

if TYPE_CHECKING:
    from lazyshard_producer.configuration.settings import SourceSettings

MAX_NAME_BYTES: Final = 255
"""Of a file's name, on Linux. A file of a longer name never comes, however long it is waited for."""

_PYTHON: Final = "python:"
_STDIN: Final = "-"


def source_problems(sources: tuple[SourceSettings, ...]) -> Iterator[Problem]:
    """Yields all that cannot be about the sources, in their order."""
    if not sources:
        yield Problem("--source", "at least one source is needed, got none; give --source FILE or --follow DIRECTORY")
    for number, source in enumerate(sources):
        yield from _of_source(number, source)
    yield from _of_weights(sources)
    if sum(source.path == _STDIN for source in sources) > 1:
        yield Problem("--source", "standard input can be read once, got it more often; leave all but one - out")


def is_live(source: SourceSettings) -> bool:
    """Whether a source may have no row at the moment and some later, as far as its settings say.

    A named pipe is not told from a file here: that takes a look at it.
    """
    return source.follow or source.path == _STDIN or is_python(source.path)


def is_python(path: str) -> bool:
    """Whether a path stands for a Python function."""
    return path.startswith(_PYTHON)


def _of_source(number: int, source: SourceSettings) -> Iterator[Problem]:
    path = _option(source)
    broken = list(path_problems(path, source.path))
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
    elif python and not FUNCTION.fullmatch(source.path[len(_PYTHON) :]):
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


def _option(source: SourceSettings) -> str:
    return "--follow" if source.follow else "--source"


def _is_file_name(text: str) -> bool:
    return _is_name_part(text) and len(text.encode("utf-8", "surrogateescape")) <= MAX_NAME_BYTES


def _is_name_part(text: str) -> bool:
    return bool(text) and text not in (".", "..") and not set(text) & {"/", "\0"}
