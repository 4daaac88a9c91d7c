"""Cursors and hints: how far one consumer of the stream is, and how much it needs to read on.

`cursors/NAME.json`, the cursor, says how far the durable checkpoints of a training run are; it never follows from what
was read, since DataLoader workers read ahead. It keeps a token of the run that may write it: each run that begins takes
a turn one above that of the run before, and looks before each write whether the token is still its own.

`cursors/NAME.reading.json` is a hint, replaced about once a window by the reader of rank 0, never synced. A producer
that holds back counts from it: by cursors it could wait for a checkpoint that waits for data. What may be deleted is
told by cursors alone.
"""

from __future__ import annotations

import math
import re
import reprlib
from dataclasses import asdict, dataclass
from typing import Any, Final

from lazyshard.format.blend_state import BlendShare, read_shares
from lazyshard.format.fields import FORMAT, MAX_CHUNKS, Fields, check_stream_id, encode
from lazyshard.format.names import CURSORS
from lazyshard.format.state import RunState
from lazyshard.part import MAX_SAMPLES, check_integer, refused

_MAX_CONSUMER_BYTES: Final = 200  # A file name has at most 255: what stands around a consumer's name needs room
_MAX_PLAN: Final = 2**63 - 1  # The largest seed of a plan
CURSOR_SUFFIX: Final = ".json"
READING_SUFFIX: Final = ".reading.json"
_MAX_OWNER: Final = 400  # Characters of an owner: a token and the name of a machine

# Control characters, those of 8 bits included: what a message must not show as it is; and lone surrogates, which JSON
# cannot hold
_UNSEEN: Final = r"\x00-\x1f\x7f-\x9f\ud800-\udfff"

_NOT_IN_OWNERS: Final = re.compile(f"[{_UNSEEN}]")
_NOT_IN_NAMES: Final = re.compile(f"[/{_UNSEEN}]")

_OWNER_EXPECTED: Final = f"text of at most {_MAX_OWNER} characters without control characters and lone surrogates"


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a consumer is."""

    consumer: str  # its name, see `check_consumer`
    stream_id: str | None  # the stream's identity, None for a foreign directory
    consumed: int  # samples in durable checkpoints, over all ranks and epochs
    chunks_before: int  # the consumer is done with the chunks of the half-open range [0, chunks_before)
    # the numbers that decide which sample is drawn when, by name: dp_size, batch_size, unit, window, seed
    plan: dict[str, int]
    updated_at: float  # seconds since 1970, UTC, for people: no decision depends on it
    # the state of the run in the newest of these checkpoints; None where it was not told. It is of the same stream, and
    # has consumed as much
    state: RunState | None = None
    owner: str = ""  # the run that writes the cursor, see `CursorToken`; "" where nobody owns it
    blend: tuple[BlendShare, ...] = ()  # how the run blends the stream with others, for people; empty where it does not

    def __post_init__(self) -> None:
        check_consumer(self.consumer)
        check_stream_id(self.stream_id)
        check_integer("consumed", self.consumed, 0, MAX_SAMPLES)
        check_integer("chunks_before", self.chunks_before, 0, MAX_CHUNKS)
        if not isinstance(self.plan, dict):
            raise refused("plan", "an object", self.plan)
        for name, value in self.plan.items():
            check_integer(f"plan.{name}", value, 0, _MAX_PLAN)
        _check_time(self.updated_at)
        owner: object = self.owner
        if not isinstance(owner, str) or len(owner) > _MAX_OWNER or _NOT_IN_OWNERS.search(owner):
            raise refused("owner", _OWNER_EXPECTED, owner)
        if self.state is not None:
            if not isinstance(self.state, RunState):
                raise refused("state", "the state of a run or null", self.state)
            for name in ("stream_id", "consumed"):
                found, expected = getattr(self.state, name), getattr(self, name)
                if found != expected:
                    raise refused(f"state.{name}", f"{expected!r} as in the cursor", found)

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        values = {name: getattr(self, name) for name in self.__slots__[:6]}
        # The others may be missing, as they are in the files of whoever knows none of them.
        if self.state is not None:
            values["state"] = self.state.to_dict()
        if self.owner:
            values["owner"] = self.owner
        if self.blend:
            values["blend"] = [asdict(share) for share in self.blend]
        return encode({"format": FORMAT} | values)

    @classmethod
    def decode(cls, data: bytes, consumer: str, file: str | None = None) -> Cursor:
        """Reads the file's bytes, which must be the cursor of this consumer; `file` is how messages call it."""
        fields = _fields_of(data, consumer, file or f"{CURSORS}/{cursor_name(consumer)}")
        values: dict[str, Any] = {name: fields.values.get(name) for name in cls.__slots__}
        with fields.checking():
            values["updated_at"] = fields.number("updated_at")
            if values["state"] is not None:
                values["state"] = RunState.from_dict(values["state"], fields.file, within="state")
            if values["owner"] is None:
                values["owner"] = ""
            values["blend"] = read_shares(values["blend"])
            return cls(**values)


def _fields_of(data: bytes, consumer: str, file: str) -> Fields:
    fields = Fields(data, file)
    # A cursor that was copied to another name would let chunks be deleted that nobody has trained.
    fields.text("consumer", (consumer,))
    return fields


def cursor_name(consumer: str) -> str:
    """Returns the name of a consumer's file in the folder of cursors. Raises as `check_consumer`."""
    return check_consumer(consumer) + CURSOR_SUFFIX


def reading_name(consumer: str) -> str:
    """Returns the name of a consumer's reading mark in the folder of cursors. Raises as `check_consumer`."""
    return check_consumer(consumer) + READING_SUFFIX


def check_consumer(name: str) -> str:
    """Returns the name if a consumer can have it.

    It becomes part of a file name: 1 to 200 bytes in UTF-8, without "/" and control characters, not beginning with a
    dot (so are names of files that are being written), and not ending in ".reading" (`NAME.reading.json` is reserved).
    Raises ValueError: it cannot.
    """
    wrong = None
    if not isinstance(name, str):
        wrong = "a string"
    elif _NOT_IN_NAMES.search(name):
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


def _check_time(updated_at: float) -> None:
    if not math.isfinite(updated_at):
        raise refused("updated_at", "a finite number of seconds", updated_at)


_TEXT: Final = re.compile(r"([1-9][0-9]{0,18})/([0-9a-f]{16}) process ([0-9]{1,10}) on (.{1,200})")


@dataclass(frozen=True, slots=True)
class CursorToken:
    """A run and its turn.

    `turn` counts the runs of this name, from 1; two that begin at the same time on different machines may have the
    same. `token` is 16 hexadecimal digits chosen at random at this start, so that no two runs are ever equal.
    """

    turn: int
    token: str
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
        found = _TEXT.fullmatch(text)
        if found is None or int(found[1]) > MAX_SAMPLES:
            return None
        return cls(int(found[1]), found[2], int(found[3]), found[4])


@dataclass(frozen=True, slots=True)
class ReadingMark:
    """What a consumer needs to read on."""

    consumer: str  # its name, see `check_consumer`
    stream_id: str | None  # the stream's identity, None for a foreign directory
    dp_size: int  # number of its data-parallel ranks
    # number of the window that is open or waited for, from 0, in the first epoch; without a shuffle it is that of the
    # stripe. One that needs no more than was told already is not told
    window: int
    # how many chunks must be published before that window can be drawn, on all ranks: those of the half-open range [0,
    # needs_chunks). May go back where a run starts again from an older checkpoint
    needs_chunks: int
    updated_at: float  # seconds since 1970, UTC

    def __post_init__(self) -> None:
        check_consumer(self.consumer)
        check_stream_id(self.stream_id)
        _check_time(self.updated_at)
        check_integer("dp_size", self.dp_size, 1, 2**31)
        check_integer("window", self.window, 0, MAX_SAMPLES)
        check_integer("needs_chunks", self.needs_chunks, 0, MAX_CHUNKS)

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        return encode({"format": FORMAT} | {name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def decode(cls, data: bytes, consumer: str, file: str | None = None) -> ReadingMark:
        """Reads the file's bytes, as `Cursor.decode`."""
        fields = _fields_of(data, consumer, file or f"{CURSORS}/{reading_name(consumer)}")
        values: dict[str, Any] = {name: fields.values.get(name) for name in cls.__slots__}
        with fields.checking():
            return cls(**values | {"updated_at": fields.number("updated_at")})
