"""Cursors and hints: how far one consumer of the stream is, and how much it needs to read on.

`cursors/NAME.json`, the cursor, says how far the durable checkpoints of a training run are; it never follows from what
was read, since DataLoader workers read ahead. It keeps a token of the run that may write it: each run that begins takes
a turn one above that of the run before, and looks before each write whether the token is still its own.

`cursors/NAME.reading.json` is a hint, replaced about once a window by the reader of rank 0, never synced. A producer
that holds back counts from it: by cursors it could wait for a checkpoint that waits for data. What may be deleted is
told by cursors alone.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, TypeVar

from lazyshard.errors import redact
from lazyshard.format import records
from lazyshard.format.names import CURSORS
from lazyshard.format.records import Chunks, Seconds, SmallFile, StreamId, printable
from lazyshard.format.state import BlendState, RunState
from lazyshard.part import MAX_SAMPLES, NUMBER, TEXT, Checked, Kind, Samples, integer, or_null, refused

_MAX_CONSUMER_BYTES: Final = 200  # A file name has at most 255: what stands around a consumer's name needs room
CURSOR_SUFFIX: Final = ".json"
READING_SUFFIX: Final = ".reading.json"
_MAX_OWNER: Final = 400  # Characters of an owner: a token and the name of a machine
MAX_SHARES: Final = 64  # Of a blend of more streams nothing is kept: each of their cursors would tell of all of them
_MAX_STREAM: Final = 400  # Characters of a stream's name
# What a message must not show as it is: control characters, those of 8 bits included; and lone surrogates, which JSON
# cannot hold
_NOT_IN_OWNERS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_TOKEN: Final = re.compile(r"([1-9][0-9]{0,18})/([0-9a-f]{16}) process ([0-9]{1,10}) on (.{1,200})")

_OWNER: Final = Kind(
    f"text of at most {_MAX_OWNER} characters without control characters and lone surrogates",
    lambda value: isinstance(value, str) and len(value) <= _MAX_OWNER and not _NOT_IN_OWNERS.search(value),
    lambda value: "" if value is None else value,
)
_STREAM: Final = TEXT._replace(
    expected=f"1 to {_MAX_STREAM} characters", fits=lambda value: TEXT.fits(value) and len(value) <= _MAX_STREAM
)
_WEIGHT: Final = NUMBER._replace(
    expected="a number from 0 to 1", fits=lambda value: NUMBER.fits(value) and 0 <= value <= 1
)
_RUN: Final = or_null(Kind("the state of a run", lambda value: isinstance(value, RunState), RunState.read))


@dataclass(frozen=True, slots=True)
class BlendShare(Checked):
    """One stream of a blend."""

    stream: Annotated[str, _STREAM]  # its directory or URL, as given but without credentials; the end of a long one
    weight: Annotated[float, _WEIGHT]  # share of the samples that come next, of the closed range [0, 1]
    consumed: Samples  # samples of it that were trained, over all ranks


_LIST: Final = records.list_of(BlendShare, least=0)


def _read_shares(values: Any) -> Any:
    if values is not None and not (isinstance(values, list) and 0 < len(values) <= MAX_SHARES):
        raise refused("", f"1 to {MAX_SHARES} streams with their shares", values)
    return _LIST.read(values or ())


_SHARES: Final = _LIST._replace(read=_read_shares)


def blend_shares(state: BlendState, directories: Mapping[str, object]) -> tuple[BlendShare, ...]:
    """Returns how streams, of these directories by name, are blended at the end of a state; none if too many."""
    last = state.parts[-1]
    if len(last.members) > MAX_SHARES:
        return ()
    _, parts, _ = [piece for piece in last.pieces if piece[0] <= last.draws][-1]
    streams = [redact(str(directories.get(state.names[member], state.names[member]))) for member in last.members]
    return tuple(
        BlendShare(printable(stream)[-_MAX_STREAM:], part / sum(parts), state.members[member].consumed)
        for stream, member, part in zip(streams, last.members, parts, strict=True)
    )


def given_shares(found: Sequence[BlendShare]) -> list[float | None]:
    """Returns what each stream has given of all samples that were trained; None where none was."""
    whole = sum(one.consumed for one in found)
    return [one.consumed / whole if whole else None for one in found]


_FileT = TypeVar("_FileT", bound="_OfConsumer")


@dataclass(frozen=True, slots=True)
class _OfConsumer(SmallFile):
    """A file of a consumer's, whose name it has as `consumer`, see `check_consumer`; of a stream of this identity."""

    consumer: Annotated[str, TEXT]
    stream_id: StreamId

    SUFFIX: ClassVar[str]

    def __post_init__(self) -> None:
        check_consumer(self.consumer)
        SmallFile.__post_init__(self)

    @classmethod
    def decode(cls: type[_FileT], data: bytes, consumer: str, file: str | None = None) -> _FileT:  # type: ignore[override]
        """Reads the bytes of a file that must be of this consumer; `file` is how messages call it."""
        with records.in_file(file or f"{CURSORS}/{check_consumer(consumer)}{cls.SUFFIX}"):
            values = {"stream_id": None} | records.parse_object(data)
            # A cursor that was copied to another name would let chunks be deleted that nobody has trained.
            records.take(values, "consumer", Kind(consumer, lambda value: value == consumer))
            return records.read(cls, values, records.defaults_of(cls))


@dataclass(frozen=True, slots=True)
class Cursor(_OfConsumer):
    """How far a consumer is."""

    consumed: Samples  # samples in durable checkpoints, over all ranks and epochs
    chunks_before: Chunks  # the consumer is done with the chunks of the half-open range [0, chunks_before)
    # the numbers that decide which sample is drawn when, by name: dp_size, batch_size, unit, window, seed
    plan: Annotated[dict[str, int], Kind("an object", lambda value: isinstance(value, dict))]
    updated_at: Seconds  # for people: no decision depends on it
    # the state of the run in the newest of these checkpoints; None where it was not told. It is of the same stream, and
    # has consumed as much
    state: Annotated[RunState | None, _RUN] = None
    owner: Annotated[str, _OWNER] = ""  # the run that writes the cursor, see `CursorToken`; "" where nobody owns it
    # how the run blends the stream with others, for people; empty where it does not
    blend: Annotated[tuple[BlendShare, ...], _SHARES] = ()

    SUFFIX: ClassVar[str] = CURSOR_SUFFIX

    def __post_init__(self) -> None:
        _OfConsumer.__post_init__(self)
        for name, value in self.plan.items():
            integer(0, 2**63 - 1).check(f"plan.{name}", value)
        for name in () if self.state is None else ("stream_id", "consumed"):
            found, expected = getattr(self.state, name), getattr(self, name)
            if found != expected:
                raise refused(f"state.{name}", f"{expected!r} as in the cursor", found)


@dataclass(frozen=True, slots=True)
class ReadingHint(_OfConsumer):
    """What a consumer needs to read on."""

    dp_size: Annotated[int, integer(1, 2**31)]  # number of its data-parallel ranks
    # number of the window that is open or waited for, from 0, in the first epoch; without a shuffle it is that of the
    # stripe. One that needs no more than was told already is not told
    window: Samples
    # how many chunks must be published before that window can be drawn, on all ranks: those of the half-open range [0,
    # needs_chunks). May go back where a run starts again from an older checkpoint
    needs_chunks: Chunks
    updated_at: Seconds

    SUFFIX: ClassVar[str] = READING_SUFFIX


def cursor_name(consumer: str) -> str:
    """Returns the name of a consumer's file in the folder of cursors. Raises as `check_consumer`."""
    return check_consumer(consumer) + CURSOR_SUFFIX


def reading_name(consumer: str) -> str:
    """Returns the name of a consumer's reading hint in the folder of cursors. Raises as `check_consumer`."""
    return check_consumer(consumer) + READING_SUFFIX


def check_consumer(name: str) -> str:
    """Returns the name if a consumer can have it, which becomes part of a file name; otherwise raises ValueError.

    It has 1 to 200 bytes in UTF-8, without "/" and control characters, does not begin with a dot (so do names of files
    that are being written), and does not end in ".reading" (`NAME.reading.json` is reserved).
    """
    wrong = None
    if not isinstance(name, str):
        wrong = "a string"
    elif "/" in name or _NOT_IN_OWNERS.search(name):
        wrong = 'text without "/", control characters and lone surrogates'
    elif not 1 <= len(name.encode()) <= _MAX_CONSUMER_BYTES:
        wrong = f"1 to {_MAX_CONSUMER_BYTES} bytes long"
    elif name.startswith("."):
        wrong = "a name that does not begin with a dot"
    elif name.endswith(".reading"):
        wrong = 'a name that does not end in ".reading"'
    if wrong:
        raise ValueError(f"the name of a consumer is {wrong}, got {reprlib.repr(name)}")
    return name


@dataclass(frozen=True, slots=True)
class CursorToken:
    """A run and its turn."""

    turn: int  # counts the runs of this name, from 1; two that begin at the same time may have the same
    token: str  # 16 hexadecimal digits chosen at random at this start, so that no two runs are ever equal
    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def text(self) -> str:
        """What stands in the cursor as its `owner`: `3/9c41d7e2b06f83a5 process 14106 on node1`."""
        host = _NOT_IN_OWNERS.sub("?", self.host)[:200] or "unknown"
        return f"{self.turn}/{self.token} process {self.pid} on {host}"

    @classmethod
    def parse(cls, text: str) -> CursorToken | None:
        """Returns the token that a text is, None for anything else, which is a stranger's."""
        found = _TOKEN.fullmatch(text)
        if found is None or int(found[1]) > MAX_SAMPLES:
            return None
        return cls(int(found[1]), found[2], int(found[3]), found[4])
