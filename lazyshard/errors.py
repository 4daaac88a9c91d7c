"""Every error that lazyshard raises on purpose.

All of them extend `LazyShardError` and the builtin that they refine, so ``except TimeoutError`` and
``except LazyShardError`` both work. They have the same fields, those of `LazyShardError`; one that does not apply is
None. Errors survive pickling whole, and they survive `torch.utils.data.DataLoader` too, which rebuilds a worker's
error from the text of its traceback alone: see `LazyShardError.carry_fields`. Neither message nor fields hold the
credentials of a URL: see `redact`.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import cache, partial
from typing import Any, Final
from urllib.parse import unquote

# Begins the line that carries an error's fields through a rebuild from text
_FIELDS_MARK: Final = "lazyshard-error-fields: "

_FIELDS_LINE: Final = re.compile(rf"\n?^{_FIELDS_MARK}(\{{.*\}})$", re.MULTILINE)

# What stands before the host of a URL: up to its first slash, or else a password that holds one itself
_USER: Final = re.compile(r"(https?)?://(?:([^\s/?#]{1,4096})|[^\s/?#@:]{0,512}:(?!\d*(?:[\s/?#]|$))[^\s@]{0,512})@")
_QUERY: Final = re.compile(r"(://[^\s?\"'<>]{1,4096}\?)[^\s\"'<>]+")
_LEAST: Final = 4  # What is shorter is not looked for in other texts: it would be found in any


def redact(text: str, url: str = "") -> str:
    """Returns a text with the credentials of all URLs in it replaced by ``***``: of a user and password, of a query.

    >>> redact("s3://name:secret@bucket/run: no answer to https://host/a?X-Amz-Signature=4f0c")
    's3://***@bucket/run: no answer to https://host/a?***'

    Args:
        text: shown, logged or kept. The container that Azure puts before a host is no credential, and stays.
        url: whose credentials are replaced where they stand without the URL around them, too.
    """
    if "://" in text and ("@" in text or "?" in text):
        text = _QUERY.sub(r"\1***", _USER.sub(_hide_user, text))
    if "@" in url or "?" in url:
        for secret in sorted(_secrets(url), key=len, reverse=True):
            text = text.replace(secret, "***")
    return text


def _hide_user(found: re.Match[str]) -> str:
    scheme, user = found[1] or "", found[2]
    return found[0] if user is not None and not scheme and ":" not in user else f"{scheme}://***@"


def _secrets(url: str) -> set[str]:
    """Returns what is secret of a URL, as it stands there and decoded."""
    found = []
    for value in (setting.partition("=")[2] for setting in url.partition("?")[2].split("&")):
        # Names of objects are joined to the URL of their folder, behind whatever its query holds.
        names = value.split("/")
        found += ["/".join(names[:stop]) for stop in range(1, len(names) + 1)]
    if (user := _USER.search(url)) is not None and _hide_user(user) != user[0]:
        whole = user[0].partition("://")[2][:-1]
        found += [whole, whole.partition(":")[2]]
    return {text for one in found for text in (one, unquote(one)) if len(text) >= _LEAST}


class LazyShardError(Exception):
    """Root of all errors of lazyshard: a message, what happened, where, what was expected and what to do next; fields.

    Raises:
        TypeError: a field that neither this class nor that of the error declares.
    """

    directory: str | None = None
    """Of the stream."""
    file: str | None = None
    url: str | None = None
    """Of an object store."""
    chunk: int | None = None
    """The chunk's number; of those of [0, `chunks_before`) that are deleted."""
    chunks_before: int | None = None
    sample: int | None = None
    row: int | None = None
    """Of a chunk, from 0."""
    line: int | None = None
    """Of a file, from 1."""
    byte: int | None = None
    """Of the file, from 0, or of the row where no file is known."""
    index: int | None = None
    """Of a row among those that were given together, from 0."""
    sequence: int | None = None
    """Of an indexed data set, from 0."""
    field: str | None = None
    """Of a file or a state: which one is meant."""
    expected: str | None = None
    actual: str | None = None
    reason: str | None = None
    kind: str | None = None
    """Of what lies where a file should be."""
    step: str | None = None
    """Of a pipeline."""
    count: int | None = None
    """Of bad samples, of rows dropped one after the other, of mistakes."""
    samples: int | None = None
    """Of a stream that has ended."""
    published_samples: int | None = None
    holder: str | None = None
    """Who has the stream, or writes the cursor."""
    consumer: str | None = None
    uid: int | None = None
    """Of this process."""
    waited: float | None = None
    """Seconds."""
    state: str | None = None
    """Of the producer, by its last sign, which is `heartbeat_age` seconds old."""
    heartbeat_age: float | None = None
    dp_rank: int | None = None
    dp_size: int | None = None

    def __init__(self, message: str = "", **fields: Any) -> None:
        message, carried = _split_fields(message)
        super().__init__(redact(message))
        declared = _declared(type(self))  # type: ignore[arg-type]
        for name in fields:
            if name not in declared:
                raise TypeError(f"{type(self).__name__} has no field {name!r}")
        # Of what another release has carried this class may know less.
        values = {name: value for name, value in carried.items() if name in declared} | fields
        vars(self).update((name, redact(one) if isinstance(one, str) else one) for name, one in values.items())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles message and fields; the default would lose the fields."""
        return partial(type(self), **self._fields()), (str(self.args[0]),)

    def carry_fields(self) -> None:
        """Writes the fields into the message, for a journey on which only text survives.

        A DataLoader worker sends only the class and the formatted traceback of an error, and the parent calls the class
        with that text. The line added here is found, read and taken out again by the constructor, so the parent's error
        has its fields too. An error without fields gets a line as well: its cause's, further up, must not count as its.
        """
        message = str(self.args[0])
        if _split_fields(message)[0] == message:
            self.args = (f"{message}\n{_FIELDS_MARK}{json.dumps(self._fields(), default=_plain)}",)

    def _fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name in _declared(type(self))}  # type: ignore[arg-type]


# Looked up once for each class: filters raise an error for each row that they drop.
@cache
def _declared(cls: type[LazyShardError]) -> frozenset[str]:
    bases = [base for base in cls.__mro__ if issubclass(base, LazyShardError)]
    return frozenset(name for base in bases for name in inspect.get_annotations(base))


def _split_fields(message: str) -> tuple[str, dict[str, Any]]:
    """Returns the message without the lines that carry fields, and the last one's: a traceback ends in its error."""
    fields: dict[str, Any] = {}

    def take(line: re.Match[str]) -> str:
        try:
            found = json.loads(line[1])
        except ValueError:
            return line[0]
        fields.clear()
        # Behind those of a cause there is more of the traceback.
        fields.update({} if "\n\n" in message[line.end() :] else found)
        return ""

    return (_FIELDS_LINE.sub(take, message) if _FIELDS_MARK in message else message), fields


def _plain(value: Any) -> Any:
    """Returns what JSON can hold: the Python number in a numpy scalar, else the text."""
    return value.item() if hasattr(value, "item") else str(value)


class FormatInvalid(LazyShardError, ValueError):
    """Bytes of a stream's own files that do not say what the format asks for."""


class FileInvalid(FormatInvalid):
    """A small file of a stream cannot be used: manifest, head, end, owner, retired mark, cursor or hint.

    Or no chunk of a foreign directory has its marker; or an `.idx` or `.bin` file of Megatron's is damaged, of which
    `sequence` cannot be had, or which ends at `byte`.
    """


class SealInvalid(FormatInvalid):
    """A `.completed` file cannot be used; the rows of its chunk cannot be had."""


class StateInvalid(FormatInvalid):
    """The state of a run, from a checkpoint or a cursor, cannot be used: torn, incomplete, or impossible."""


class VersionUnsupported(FormatInvalid):
    """A file of a later format than this release reads."""


class RowInvalid(LazyShardError, ValueError):
    """A row that is not one JSON object in UTF-8.

    `file`, `line` (from 1) and `byte` (offset in the file, from 0) are known where the row came from a file; `index` is
    its number (from 0) among the lines that were given together, where there were several.
    """


class ChunkCorrupt(LazyShardError, ValueError):
    """A sealed chunk whose bytes are not those that were sealed."""


class ChunkMissing(LazyShardError, FileNotFoundError):
    """A published chunk of which a file is not there."""


class ChunkRetired(LazyShardError, FileNotFoundError):
    """A chunk that its producer has deleted, by its rules of retention: those of [0, chunks_before) are gone."""


class FileRefused(LazyShardError, OSError):
    """Not a plain file of the stream where one should be: a directory, FIFO, device or link out of it."""


class AccessRefused(LazyShardError, PermissionError):
    """This process may not read a file; or an object store, of which there is the `url`, does not let this be done.

    No credentials or rights, no such bucket, no driver for the URL: trying again does not help.
    """


class StoreUnavailable(LazyShardError, ConnectionError):
    """An object store gave no answer, or failing ones, for as long as patience lasted."""


class StreamMissing(LazyShardError, FileNotFoundError):
    """There is no stream in the directory, or it has gone."""


class StreamInvalid(LazyShardError, ValueError):
    """The files of a stream contradict each other: a gap, two files for one chunk, a short chunk in the middle."""


class StreamMismatch(LazyShardError, ValueError):
    """The stream is another one than the caller asked for, for instance with another number of samples per chunk."""


class StreamEnded(LazyShardError, ValueError):
    """The stream has ended: nothing can be added to it."""


class ProducerFenced(LazyShardError, RuntimeError):
    """Another producer holds the stream, or has taken it over; this one must stop."""


class StateMismatch(LazyShardError, ValueError):
    """The state of a run does not fit: it is of another stream or of other settings, or needs data that is gone.

    `field` is the setting that differs, where it is one.
    """


class CursorTaken(LazyShardError, RuntimeError):
    """Another run of the same name writes the cursor; this one must not."""


class WriterFailed(LazyShardError, OSError):
    """A write failed; what was published, and the checkpoint of a cursor, stand.

    Of a writer the open chunk is dropped, and opening the stream again resumes; `commit` may come again.
    """


class WaitTimeout(LazyShardError, TimeoutError):
    """What a reader needs was not published in time."""


class LengthUnknown(LazyShardError, TypeError, ValueError):
    """A live stream has no length yet, and none was given; or not all lengths of its samples in tokens are known."""


class BadSample(LazyShardError, ValueError):
    """A sample that cannot be read, or of which nothing can be made; or too many, `count`, of them."""


class SkipSample(LazyShardError, ValueError):
    """For an `encode_fn` or a step to raise: the row is in order but not to be trained, for instance as it is too long.

    Another row is trained instead, as for one that a `Filter` drops, and it does not count as a bad sample.
    """


class ConfigInvalid(LazyShardError, ValueError):
    """What is asked for cannot be: a configuration, a line for each mistake; a step; a rank; a taken name."""
