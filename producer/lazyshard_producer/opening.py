"""Detects the kind of a source from its path, and opens it."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lazyshard.conversion.indexed import INDEX_SUFFIX, MAGIC, data_path
from lazyshard.errors import StreamInvalid
from lazyshard.format.records import Encoding, parse_chunk_name
from lazyshard.store.files import is_url, stream_path
from lazyshard_producer.configuration.problems import MAX_NAME_BYTES
from lazyshard_producer.configuration.settings import Settings, SourceSettings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.following.directory import FollowedDirectory
from lazyshard_producer.following.listing import NameRules
from lazyshard_producer.position import plain_name
from lazyshard_producer.sources import source as files
from lazyshard_producer.sources.generator import GeneratorSource
from lazyshard_producer.sources.indexed import IndexedSource
from lazyshard_producer.sources.lines import BOM, JsonLinesFile
from lazyshard_producer.sources.sequential import CompressedJsonLines, StandardInput
from lazyshard_producer.sources.source import PYTHON, STANDARD_INPUT, Context, Source, open_regular, refuse_source
from lazyshard_producer.sources.stream import StreamSource, is_stream, open_reader
from lazyshard_producer.sources.tables import TableSource, is_hugging_face

# Magic numbers of files whose names do not show their kind; the last one is an Arrow stream.
_MAGIC: Final = {b"\x1f\x8b": "jsonl.gz", b"(\xb5": "jsonl.zst", b"PA": "parquet", b"AR": "arrow", b"\xff\xff": "arrow"}
_TABLES: Final = (".parquet", ".arrow")
_PACKED: Final = {".gz": "jsonl.gz", ".zst": "jsonl.zst"}  # kinds by name, for files that are no plain text


def source_kind(settings: SourceSettings) -> str:
    """Returns the kind of a source, as positions name it. Opens nothing that could block."""
    path = settings.path
    if path == STANDARD_INPUT:
        return "stdin"
    if path.startswith(PYTHON):
        return "python"
    if is_url(path) and not settings.follow:
        return "stream"
    try:
        status = os.stat(path)
    except OSError as cause:
        if glob.has_magic(path):
            hint = "; correct the pattern, or follow their directory"
            raise refuse_source(path, "files that match", "none", hint) from cause
        wanted = "an existing, readable directory" if settings.follow else "a readable file"
        raise files.refuse_os_error(path, cause, wanted) from cause
    if settings.follow:
        if not stat.S_ISDIR(status.st_mode):
            raise refuse_source(path, "a directory", "something else", "; give a file with --source")
        return "follow"
    if stat.S_ISFIFO(status.st_mode):
        return "stdin"
    if stat.S_ISDIR(status.st_mode):
        return _directory_kind(path)
    if path.endswith(_TABLES):
        return os.path.splitext(path)[1].removeprefix(".")
    with open_regular(path, 0) as file:
        start = files.read_at(file.fileno(), path, 8, 0)
    is_text = bool(start) and start.removeprefix(BOM).lstrip(b" \t\r\n")[:1] in (b"{", b"")
    if start == MAGIC[: len(start)] != b"" or (path.endswith(INDEX_SUFFIX) and not is_text):
        return "megatron"
    if not is_text and path.endswith((".csv", ".tsv")):
        raise refuse_source(path, "JSON Lines", "a table in text", "; read it in a python: source, by csv.DictReader")
    kind = _MAGIC.get(start[:2], "jsonl")
    # An empty file with a compressed file's name is truncated or unfinished, so it must not end a stream as empty text.
    return _PACKED.get(os.path.splitext(path)[1], kind) if kind == "jsonl" and not is_text else kind


def _directory_kind(path: str) -> str:
    with files.refusing(path):
        if is_stream(path):
            return "stream"
        names = os.listdir(path)
    if is_hugging_face(path):
        return "huggingface"
    for suffix in _TABLES:
        if any(Path(name).suffix == suffix for name in names):
            return suffix.removeprefix(".")
    hint = f"give its files, such as '{os.path.join(path, 'chunk_*.jsonl')}', or --follow it if others write there"
    raise refuse_source(path, "a file", "a directory", f" that is neither a stream nor a saved data set; {hint}")


_OPENERS: Final[dict[str, Callable[[SourceSettings, dict[str, Any] | None, Context], Source]]] = {
    "jsonl": JsonLinesFile,
    "jsonl.gz": CompressedJsonLines,
    "jsonl.zst": CompressedJsonLines,
    "stdin": StandardInput,
    "follow": FollowedDirectory,
    "megatron": IndexedSource,
    "stream": StreamSource,
    "python": GeneratorSource,
}


def open_source(settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> Source:
    """Opens a source at a position, None for its start."""
    kind = source_kind(settings)
    if kind in _OPENERS:
        return _OPENERS[kind](settings, position, context)
    return TableSource(kind, settings.path, position, context)


def check_sources(settings: Settings) -> None:
    """Checks, without creating files, that every source can be read and is given only once."""
    context, stream = Context(Path(settings.out), settings.max_row_bytes), _real(settings.out)
    seen: dict[tuple[int, int], str] = {}
    for source in settings.sources:
        kind = source_kind(source)
        if kind == "jsonl":
            open_regular(source.path, text=True).close()
        elif kind not in ("stdin", "follow"):  # opening these has side effects
            open_source(source, None, context).close()
    for source in settings.sources:
        path = source.path
        try:
            status = os.fstat(0) if path == STANDARD_INPUT else os.stat(path)
        except (OSError, ValueError):
            continue  # no file, or an inaccessible one: opening it reports that
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            raise refuse_source(path, "every source once", f"the same file as {seen[identity]}")
        seen[identity] = path
        if path != STANDARD_INPUT and stream in ((real := _real(path)), *real.parents):
            raise refuse_source(path, f"a file outside the stream's directory {settings.out}", "one inside it")
    directories = [source for source in settings.sources if os.path.isdir(source.path)]
    files = [(source.path, _real(source.path)) for source in settings.sources] if directories else []
    for directory in directories:
        place, rules = _real(directory.path), NameRules(directory.pattern, directory.marker, directory.end_marker)
        for path, file in files:
            part = file.suffix in _TABLES or parse_chunk_name(file.name) is not None
            if file.parent == place and (rules.is_data(file.name) if directory.follow else part):
                given = f"a file of {directory.path}"
                raise refuse_source(path, "every source once", given, ", which is given too")


def check_out(out: str) -> None:
    """Checks that `out` is a directory or can become one."""
    problem = long = ""
    try:
        if not stat.S_ISDIR(os.stat(out).st_mode):
            problem = "expected a directory or a new name, found a file"
    except FileNotFoundError:
        problem = "expected a directory, found a dangling link" if os.path.islink(out) else ""
        # The filesystem reports this only once the parent directories exist, that is after some were made.
        long = next((part for part in Path(out).parts if len(os.fsencode(part)) > MAX_NAME_BYTES), "")
    except OSError as cause:
        if cause.errno not in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP):
            raise
        problem = f"cannot be a directory: {cause.strerror}"
        long = out if cause.errno == errno.ENAMETOOLONG else ""
    if long:
        raise SettingInvalid(f"--out: a name of {len(long)} characters is too long: {long[:40]}...", option="--out")
    if problem:
        raise StreamInvalid(f"{out}: {problem}", directory=out)


def check_not_own(settings: Settings) -> None:
    """Checks that the stream is not one of its own sources, and is not inside the directory of one."""
    out = stream_path(settings.out) if is_url(settings.out) else _real(settings.out)
    for source in settings.sources:
        remote, path = is_url(source.path), source.path
        stream = remote or (not source.follow and os.path.isdir(path) and source_kind(source) == "stream")
        if stream and (stream_path(path) if remote else _real(path)) in (out, *out.parents):
            raise refuse_source(plain_name(path), "a stream other than --out", "the same, or one that contains it")


def _real(path: str) -> Path:
    return Path(os.path.realpath(path))


def stream_form(settings: SourceSettings) -> tuple[bool, Encoding | None] | None:
    """Returns whether rows of a stream source may contain arrays, and their encoding; None for other sources."""
    there = is_url(settings.path) or os.path.isdir(settings.path)
    if settings.follow or not there or source_kind(settings) != "stream":
        return None
    reader = open_reader(settings.path)
    return reader.arrays, reader.encoding


def source_size(settings: SourceSettings) -> int | None:
    """Returns a source's size in bytes for display, None if unknown."""
    path = settings.path
    with contextlib.suppress(OSError, ValueError):
        if path.endswith(INDEX_SUFFIX) and source_kind(settings) == "megatron":
            path = data_path(path)
        return os.path.getsize(path) if os.path.isfile(path) else None
    return None
