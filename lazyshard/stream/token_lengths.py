"""The lengths of a stream's rows in tokens, wherever they stand: in files beside the seals, else in the seals.

```
chunk_00000.jsonl.tokens   what was measured after the chunk was sealed; made durably, replaced whole
.measure/                  what is being written, by random names, and `lock`, held while a process measures
```

A file beside a seal counts only if it names that seal's digest: one of another chunk, or of a chunk that a power cut
has taken back and that was made anew, counts as none. What is torn or says what cannot be is an error, never a guess.
Streams in object stores have what is in their seals alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import filelock
import numpy as np
import numpy.typing as npt

from lazyshard.errors import FileRefused, LengthsMissing, MeasureLocked, TokensInvalid
from lazyshard.format import Seal, Tokens, seal_digest
from lazyshard.format.fields import printable
from lazyshard.format.names import MEASURE, seal_name, tokens_name
from lazyshard.store.durable import publish_bytes, remove, sync_directory
from lazyshard.store.files import check_folder, read_file
from lazyshard.store.urls import UrlPath
from lazyshard.stream.retire import read_retired
from lazyshard.stream.stream import Stream

_LOCK: Final = "lock"

_MEND: Final = "remove the file, or have `lazyshard measure` make it anew"

_MAX_BYTES: Final = 1 << 30
"""Larger than the file of the largest chunk: 5.4 bytes a row."""

_WRITE_TRIES: Final = 3
"""Somebody on another machine who begins to measure clears the folder; once more is enough unless there are many."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTokens:
    """What is known of the lengths of a chunk's rows.

    Attributes:
        seal: the chunk's seal.
        digest: `seal_digest` of it.
        lengths: u32 of shape (samples,): tokens of each row; None where they are not known.
        measure: how they were measured; None where the producer has sealed them, or they are not known.
    """

    seal: Seal
    digest: str
    lengths: npt.NDArray[np.uint32] | None
    measure: str | None


def chunk_tokens(directory: Path, chunk: int) -> ChunkTokens:
    """Looks how long the rows of a chunk are.

    Args:
        directory: of a stream of ours.
        chunk: a published chunk.

    Raises:
        SealInvalid, FileNotFoundError: its seal cannot be used, or is not there.
        TokensInvalid: the file beside it cannot be used.
        FileRefused, FileUnreadable, OSError: a file cannot be read.
    """
    path = directory / seal_name(chunk)
    data = read_file(path)
    seal = Seal.decode(data, chunk, str(path))
    digest = seal_digest(data)
    measured = measured_tokens(directory, chunk, digest, seal.samples)
    if measured is None:
        return ChunkTokens(seal, digest, seal.tokens, None)
    return ChunkTokens(seal, digest, measured.lengths, measured.measure)


def measured_tokens(directory: Path, chunk: int, digest: str, samples: int) -> Tokens | None:
    """Reads the file beside a seal; None if there is none, or it is that of another seal.

    Args:
        directory: of a stream of ours.
        chunk: the chunk.
        digest: `seal_digest` of its seal.
        samples: rows in it.

    Raises:
        TokensInvalid: it cannot be used.
        FileUnreadable, OSError: it cannot be read.
    """
    if isinstance(directory, UrlPath):
        return None
    path = directory / tokens_name(chunk)
    try:
        data = read_file(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
    except FileRefused as cause:
        raise TokensInvalid(
            f"{cause}; {_MEND}", file=str(path), expected="a plain file", actual=cause.kind, chunk=chunk
        ) from cause
    try:
        found = Tokens.decode(data, chunk, str(path))
    except TokensInvalid as error:
        error.args = (f"{error}; {_MEND}",)
        error.chunk = chunk
        raise
    if found.seal != digest:
        return None
    if len(found.lengths) != samples:
        raise TokensInvalid(
            f"{path}: expected lengths of {samples} rows, found {len(found.lengths)}; {_MEND}",
            file=str(path),
            field="samples",
            expected=str(samples),
            actual=str(len(found.lengths)),
            chunk=chunk,
        )
    return found


def read_lengths(stream: Stream, samples: int) -> npt.NDArray[np.uint32]:
    """Returns the lengths of a stream's samples in tokens.

    Args:
        stream: the stream, of ours.
        samples: how many samples, all of them published.

    Returns:
        u32 of shape (samples,).

    Raises:
        LengthsMissing: those of a chunk are not known, deleted, or measured otherwise than those of another.
        Others: as `chunk_tokens`.
    """
    directory, size = stream.directory, stream.samples_per_chunk
    lengths = np.zeros(samples, np.uint32)
    measures: dict[str, int] = {}
    for number in range(-(-samples // size)):
        try:
            found = chunk_tokens(directory, number)
        except FileNotFoundError:
            if number >= stream.retired():
                raise
            raise LengthsMissing(
                f"{directory}: chunk {number} was deleted by the stream's producer, and the lengths of its samples "
                f"with it",
                directory=str(directory),
                chunk=number,
            ) from None
        if found.lengths is None:
            raise lengths_missing(directory, number)
        if found.measure is not None and measures.setdefault(found.measure, number) == number and len(measures) > 1:
            (one, chunk), (other, _) = list(measures.items())[:2]
            raise LengthsMissing(
                f"{directory}: chunk {chunk} was measured by {printable(one)}, chunk {number} by {printable(other)}; "
                f"measure all of them alike, with `lazyshard measure --replace`",
                directory=str(directory),
                chunk=number,
            )
        start = number * size
        stop = min(start + len(found.lengths), samples)
        lengths[start:stop] = found.lengths[: stop - start]
    return lengths


def lengths_missing(directory: Path, chunk: int) -> LengthsMissing:
    """Returns the error for a chunk of which nobody has said how long its rows are."""
    sealed = (
        "have them sealed while it is produced, by `lazyshard-producer run --encode ...`, or in your own code by "
        "`ChunkWriter.write(row, tokens=N)`"
    )
    if isinstance(directory, UrlPath):
        way = f"{sealed[0].upper()}{sealed[1:]}; in an object store nothing is measured"
    else:
        way = (
            f"Measure them with `lazyshard measure {directory} --tokenizer DIR`, or with --model DIR, as ms-swift "
            f"trains them, or --function MODULE:NAME, which takes a row and returns a number; or {sealed}"
        )
    return LengthsMissing(
        f"{directory}: how long the samples of chunk {chunk} are in tokens is not known: its producer did not say so, "
        f"and nobody has measured them since. {way}",
        directory=str(directory),
        chunk=chunk,
    )


def write_tokens(directory: Path, tokens: Tokens, stream_id: str) -> bool:
    """Makes a file of lengths appear durably, in place of one that is there, unless its chunk has been deleted.

    Args:
        directory: of a stream of ours.
        tokens: what is to stand there.
        stream_id: of the stream.

    Returns:
        Whether it is there.

    Raises:
        OSError: the filesystem refused.
    """
    folder, target = directory / MEASURE, directory / tokens_name(tokens.chunk)
    for left in reversed(range(_WRITE_TRIES)):
        temporary = check_folder(folder) / secrets.token_hex(8)
        try:
            publish_bytes(tokens.encode(), target, temporary)
            break
        except FileNotFoundError:
            if not left:
                raise
        except BaseException:
            with contextlib.suppress(OSError):
                remove(temporary)
            raise
    # The mark comes before the deletion: whoever deletes from here on finds this file, and deletes it too.
    if tokens.chunk < read_retired(directory, stream_id):
        remove(target)
        sync_directory(directory)
        return False
    return True


@contextlib.contextmanager
def measuring(directory: Path) -> Iterator[None]:
    """Holds the right to measure a stream, on this machine, and clears what one who was killed has left.

    Two on different machines do no harm: each file appears whole, and both write the same.

    Raises:
        MeasureLocked: another process on this machine holds it.
        FileRefused: `.measure` is a link.
        OSError: the filesystem refused.
    """
    folder = directory / MEASURE
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    check_folder(folder)
    lock = filelock.FileLock(folder / _LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout as cause:
        raise MeasureLocked(
            f"{directory}: another process is measuring it already; let it finish, or stop it first",
            directory=str(directory),
        ) from cause
    try:
        for name in os.listdir(folder):
            if name != _LOCK:
                remove(folder / name)
        yield
    finally:
        lock.release()
