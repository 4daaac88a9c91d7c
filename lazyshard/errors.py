"""All errors that lazyshard raises on purpose.

Each error extends `LazyShardError` and a builtin exception, so ``except TimeoutError`` and ``except LazyShardError``
both work. All errors have the fields of `LazyShardError`; a field that does not apply is None. Errors keep their fields
when pickled, and also when `torch.utils.data.DataLoader` rebuilds a worker's error from the text of its traceback: see
`LazyShardError.carry_fields`. Messages and fields never contain the credentials of a URL: see `redact`.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import cache, partial
from typing import Any, Final
from urllib.parse import unquote

# Starts the line that carries an error's fields in its text
_FIELDS_MARK: Final = "lazyshard-error-fields: "

_FIELDS_LINE: Final = re.compile(rf"\n?^{_FIELDS_MARK}(\{{.*\}})$", re.MULTILINE)

# The user info before the host of a URL: up to the first slash, or a password that itself contains a slash
_USER: Final = re.compile(r"(https?)?://(?:([^\s/?#]{1,4096})|[^\s/?#@:]{0,512}:(?!\d*(?:[\s/?#]|$))[^\s@]{0,512})@")
_QUERY: Final = re.compile(r"(://[^\s?\"'<>]{1,4096}\?)[^\s\"'<>]+")
_LEAST: Final = 4  # Characters; shorter secrets are not replaced in other text: they would match almost anything


def redact(text: str, url: str = "") -> str:
    """Returns a text in which the credentials of all URLs (user and password, query values) are replaced by ``***``.

    >>> redact("s3://name:secret@bucket/run: no answer to https://host/a?X-Amz-Signature=4f0c")
    's3://***@bucket/run: no answer to https://host/a?***'

    Args:
        text: to be shown, logged or stored. A container name before the host (Azure) is kept: it is not secret.
        url: its credentials are also replaced where they occur in the text without the URL.
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
    """Returns the secret parts of a URL, as written and URL-decoded."""
    found = []
    for value in (setting.partition("=")[2] for setting in url.partition("?")[2].split("&")):
        # Object names are appended to the URL of their folder, after its query.
        names = value.split("/")
        found += ["/".join(names[:stop]) for stop in range(1, len(names) + 1)]
    if (user := _USER.search(url)) is not None and _hide_user(user) != user[0]:
        whole = user[0].partition("://")[2][:-1]
        found += [whole, whole.partition(":")[2]]
    return {text for one in found for text in (one, unquote(one)) if len(text) >= _LEAST}


class LazyShardError(Exception):
    """Root of all errors of lazyshard. The message states what happened, where, what was expected, and what to do.

    Raises:
        TypeError: a field is declared neither by this class nor by the subclass.
    """

    directory: str | None = None
    """Of the stream."""
    file: str | None = None
    url: str | None = None
    """Of an object store."""
    chunk: int | None = None
    """Number of the chunk; for deleted chunks, one of [0, `chunks_before`)."""
    chunks_before: int | None = None
    sample: int | None = None
    row: int | None = None
    """Number within a chunk, from 0."""
    line: int | None = None
    """Line number in a file, from 1."""
    byte: int | None = None
    """Offset in the file, from 0; in the row if no file is known."""
    index: int | None = None
    """Of a row among those passed in one call, from 0."""
    sequence: int | None = None
    """Of an indexed data set, from 0."""
    field: str | None = None
    """Name of the invalid or differing field of a file or a state."""
    expected: str | None = None
    actual: str | None = None
    reason: str | None = None
    kind: str | None = None
    """Kind of object found where a file was expected."""
    step: str | None = None
    """Of a pipeline."""
    count: int | None = None
    """Number of bad samples, of consecutive dropped rows, or of mistakes."""
    samples: int | None = None
    """Length of a stream that has ended."""
    published_samples: int | None = None
    holder: str | None = None
    """The process that holds the stream or writes the cursor."""
    consumer: str | None = None
    uid: int | None = None
    """Of this process."""
    waited: float | None = None
    """Seconds."""
    state: str | None = None
    """State of the producer at its last heartbeat, `heartbeat_age` seconds ago."""
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
        # Another release may have carried fields that this class does not declare.
        values = {name: value for name, value in carried.items() if name in declared} | fields
        vars(self).update((name, redact(one) if isinstance(one, str) else one) for name, one in values.items())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the message and the fields; the default implementation would lose the fields."""
        return partial(type(self), **self._fields()), (str(self.args[0]),)

    def carry_fields(self) -> None:
        """Writes the fields into the message, for transports that keep only text.

        A DataLoader worker sends only the class and the formatted traceback of an error, and the parent calls the class
        with that text. The constructor parses the line added here and removes it, so the parent's error has the same
        fields. An error without fields gets a line too; otherwise the fields of its cause would be taken for its own.
        """
        message = str(self.args[0])
        if _split_fields(message)[0] == message:
            self.args = (f"{message}\n{_FIELDS_MARK}{json.dumps(self._fields(), default=_plain)}",)

    def _fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name in _declared(type(self))}  # type: ignore[arg-type]


# Cached per class: filters raise an error for each row that they drop.
@cache
def _declared(cls: type[LazyShardError]) -> frozenset[str]:
    bases = [base for base in cls.__mro__ if issubclass(base, LazyShardError)]
    return frozenset(name for base in bases for name in inspect.get_annotations(base))


def _split_fields(message: str) -> tuple[str, dict[str, Any]]:
    """Returns the message without its field lines, and the fields of the last line: those of the raised error."""
    fields: dict[str, Any] = {}

    def take(line: re.Match[str]) -> str:
        try:
            found = json.loads(line[1])
        except ValueError:
            return line[0]
        fields.clear()
        # The fields of a cause are followed by more of the traceback.
        fields.update({} if "\n\n" in message[line.end() :] else found)
        return ""

    return (_FIELDS_LINE.sub(take, message) if _FIELDS_MARK in message else message), fields


def _plain(value: Any) -> Any:
    """Returns a value that JSON can represent: the Python number of a numpy scalar, otherwise the text."""
    return value.item() if hasattr(value, "item") else str(value)


class FormatInvalid(LazyShardError, ValueError):
    """A file of a stream does not conform to the format."""


class FileInvalid(FormatInvalid):
    """A small file of a stream is invalid: manifest, head, end, owner, retired mark, cursor or hint.

    Also raised if no chunk of a foreign directory has its marker, or if an `.idx` or `.bin` file of Megatron is
    damaged: `sequence` cannot be read, or the file ends at `byte`.
    """


class StateInvalid(FormatInvalid):
    """The state of a run, from a checkpoint or a cursor, is invalid: torn, incomplete or contradictory."""


class VersionUnsupported(FormatInvalid):
    """The file has a later format version than this release can read."""


class RowInvalid(LazyShardError, ValueError):
    """A row is not one JSON object in UTF-8.

    `file`, `line` (from 1) and `byte` (offset in the file, from 0) are set if the row was read from a file; `index` is
    its number (from 0) if several lines were passed together.
    """


class ChunkCorrupt(FormatInvalid):
    """A file of a sealed chunk is damaged: its rows or arrays have changed since it was sealed, or the seal is bad."""


class ChunkMissing(LazyShardError, FileNotFoundError):
    """A file of a published chunk is missing."""


class ChunkRetired(LazyShardError, FileNotFoundError):
    """The producer has deleted the chunk by its retention rules: the chunks [0, chunks_before) are gone."""


class FileRefused(LazyShardError, OSError):
    """The path is not a plain file of the stream but a directory, FIFO, device, or link that leads out of it."""


class AccessRefused(LazyShardError, PermissionError):
    """This process may not read a file, or an object store refuses a request (`url` is set).

    Credentials, permissions, the bucket or the driver for the URL are missing: retrying does not help.
    """


class StoreUnavailable(LazyShardError, ConnectionError):
    """An object store did not respond, or its requests failed, until the retry time limit was reached."""


class StreamMissing(LazyShardError, FileNotFoundError):
    """The directory holds no stream, or the stream was removed."""


class StreamInvalid(LazyShardError, ValueError):
    """The files of a stream contradict each other: a gap, two files for one chunk, a short chunk before the last."""


class StreamMismatch(LazyShardError, ValueError):
    """The stream is not the one requested, for instance it has another number of samples per chunk."""


class StreamEnded(LazyShardError, ValueError):
    """The stream has ended; no rows can be appended."""


class ProducerFenced(LazyShardError, RuntimeError):
    """Another producer holds the stream or has taken it over; this one must stop."""


class StateMismatch(LazyShardError, ValueError):
    """The state of a run does not match: it is of another stream or other settings, or needs data that was deleted.

    `field` is the setting that differs, if any.
    """


class CursorTaken(LazyShardError, RuntimeError):
    """Another run with the same consumer name writes the cursor; this run must not write it."""


class WriterFailed(LazyShardError, OSError):
    """A write failed; everything published so far, and the committed cursor, remain valid.

    A `ChunkWriter` discards its open chunk; reopening the stream resumes it. A failed `commit` may be called again.
    """


class WaitTimeout(LazyShardError, TimeoutError):
    """The data that a reader needs were not published in time."""


class LengthUnknown(LazyShardError, TypeError, ValueError):
    """A live stream has no length yet and none was given, or token lengths of some of its samples are unknown."""


class BadSample(LazyShardError, ValueError):
    """A sample cannot be read or encoded, or the number of bad samples, `count`, exceeds the limit."""


class SkipSample(LazyShardError, ValueError):
    """Raised by an `encode_fn` or a step to skip a valid row that should not be trained, for instance a too long one.

    Another row is trained instead, as for a row dropped by a `Filter`; it does not count as a bad sample.
    """


class ConfigInvalid(LazyShardError, ValueError):
    """The request is invalid: a configuration (one line for each mistake), a step, a rank, or a name already in use."""
