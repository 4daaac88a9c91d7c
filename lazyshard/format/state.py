"""The state of a run: the few integers that a checkpoint must keep so that its resume trains every sample once.

A JSON object with a format number of its own, since it lives outside of streams too. It says what the trainer has
consumed, never what was read ahead. The course of a run is a row of parts, each under one number of ranks and one micro
batch; the last one is current.

Of a run over sequences, which are made while training reads, a number of them alone would not do: how many there are
before a window only the lengths of all rows before it tell. So the place has the window from which sequences are made
again, how many were made before it, and the row and token with which they begin. `lengths` is a digest of the lengths
of which the sequences at hand were made: others would make others, and samples would be lost or come twice.

Of a run over a blend it is the state of each stream, and how they were blended: a row of parts too, each with one set
of streams. Here a run of 4 ranks over two streams was given a third one, and other weights, after 100 samples a rank::

    part  dp  draws  members  pieces
    0      4    100    0 1    (0: 4 1)
    1      4     30    0 1 2  (0: 2 1 1)    so far

Streams that are blended no more stay members, so that they continue where they were once they come back.

`cursors/NAME.json`, the cursor, says how far the durable checkpoints of a consumer, a run, are; it never follows from
what was read, since workers read ahead. It keeps a token of the run that may write it: each run that begins takes a
turn one above that of the run before, and looks before each write whether the token is still its own.
`cursors/NAME.reading.json`, a hint, is replaced about once a window by the reader of rank 0, never synced. A producer
that holds back counts from it: by cursors it could wait for a checkpoint that waits for data. What may be deleted is
told by cursors alone.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, TypeVar

from lazyshard.errors import StateInvalid, redact
from lazyshard.format import records
from lazyshard.format.records import CURSORS, Chunks, Seconds, SmallFile, StreamId, inside, list_of, printable, read
from lazyshard.part import MAX_SAMPLES, NUMBER, TEXT, Checked, Kind, Part, Samples, integer, or_null, refused, tuples

_FORMAT: Final = 1  # The only format of a state, of any kind, that there is. It counts apart from that of streams
_MAX_PERIOD: Final = 1 << 20  # Longer than any that is made: a table of a piece's period is computed
KIND: Final = "sequences"
BLEND: Final = "blend"  # The `kind` of a blend's state; that of one stream has none

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

_StateT = TypeVar("_StateT", bound="_State")
_FileT = TypeVar("_FileT", bound="_OfConsumer")


class _State(Checked):
    __slots__ = ()
    WHAT: ClassVar[str]
    KIND: ClassVar[str | None] = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the state as plain JSON values; fields that states of earlier releases lack have a default."""
        return ({} if self.KIND is None else {"kind": self.KIND}) | {"format": _FORMAT} | records.given(self)

    @classmethod
    def from_dict(cls: type[_StateT], value: Any, where: str, *, within: str = "") -> _StateT:
        """Reads what `to_dict` returned, as JSON or pickle gave it back, found `where`, in the field `within` there.

        Raises StateInvalid: a field is missing, out of its range, or contradicts another one; VersionUnsupported.
        """
        with records.in_file(where, StateInvalid), inside(within):
            return cls.read(value)

    @classmethod
    def read(cls: type[_StateT], value: Any) -> _StateT:
        """As `from_dict`, of which the caller says where it was."""
        if cls.KIND == BLEND and isinstance(value, dict) and "kind" not in value and "stream_id" in value:
            raise StateInvalid("expected the state of a blend, found that of one stream", field="kind", expected=BLEND)
        values = records.of_format(value, _FORMAT, f"the state of {cls.WHAT} in")
        if cls.KIND is not None:
            records.take(values, "kind", Kind(repr(cls.KIND), lambda kind: kind == cls.KIND))
        return read(cls, values, records.defaults_of(cls))


@dataclass(frozen=True, slots=True)
class RunState(_State):
    """What must be known of a run to continue with it, or to tell later what it trained when."""

    stream_id: StreamId  # the stream's identity
    samples_per_chunk: Annotated[int, records.PER_CHUNK]  # of the stream
    unit: Annotated[int, integer(1, MAX_SAMPLES)]  # samples that are dealt to a rank in turn
    window: Samples  # positions of a rank that are shuffled together, a multiple of `unit`; 0 draws in order
    seed: Annotated[int, integer(0, 2**63 - 1)]  # of the shuffle
    # the stream was taken to end there at the latest; None for no bound
    max_total_samples: Annotated[int | None, or_null(integer(1, MAX_SAMPLES))]
    parts: Annotated[tuple[Part, ...], list_of(Part)]  # the course of the run so far; the last one is current
    # samples trained since the run began, over all ranks, parts and epochs: the sum of `dp * draws` of the parts that
    # were trained
    consumed: Samples

    WHAT: ClassVar[str] = "a run"

    def __post_init__(self) -> None:
        # What is written wrong here would be found by a resume, when the run is gone.
        Checked.__post_init__(self)
        if self.window % self.unit:
            raise refused("window", f"a multiple of unit, {self.unit}", self.window)
        least = 0
        for number, part in enumerate(self.parts):
            if part.first_step < least:
                found = f"at least {least}, that of the part before"
                raise refused(f"parts[{number}].first_step", found, part.first_step)
            least = part.first_step
        _check_sum(self.consumed, [part for part in self.parts if part.trained], " trained")


_LIST: Final = Kind("a list", lambda value: isinstance(value, tuple), tuples)


def _rows(what: str) -> Kind:
    return Kind(what, lambda value: isinstance(value, tuple) and bool(value), tuples)


@dataclass(frozen=True, slots=True)
class BlendPartState(Checked):
    """A stretch of a run as `Part`, and with one set of streams; `draws` are over all of them."""

    dp: Annotated[int, integer(1, 2**31)]
    batch_size: Annotated[int, integer(1, MAX_SAMPLES)]
    draws: Samples
    # which of the state's members are blended, in order
    members: Annotated[tuple[int, ...], _rows("numbers of members, at least one")]
    # with which weights, from which position on: (position, draws of each in a period, offset)
    pieces: Annotated[tuple[tuple[int, tuple[int, ...], int], ...], _rows("at least one piece")]
    # where each of `members` stood: the number of the part of its own state, and draws of a lane in that
    begins: Annotated[tuple[tuple[int, int], ...], _LIST]
    epoch: Annotated[int | None, or_null(integer(0, MAX_SAMPLES))] = None
    first_step: Samples = 0
    draws_per_step: Samples = 0

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        count = len(self.members)
        _check_each("members", self.members, 100_000)
        if len(set(self.members)) != count:
            raise refused("members", "numbers of members, none of them twice", self.members)
        least = 0
        for number, piece in enumerate(self.pieces):
            with inside(f"pieces[{number}]"):
                what = "a position, the draws of each stream in a period, and an offset"
                first, parts, offset = _of_length("", piece, 3, what)
                integer(least, MAX_SAMPLES if number else 0).check("0", first)
                _check_each("1", _of_length("1", parts, count, f"draws of each of {count} members"))
                if not 1 <= sum(parts) <= _MAX_PERIOD:
                    raise refused("1", f"from 1 to {_MAX_PERIOD} draws in a period", parts)
                integer(0, MAX_SAMPLES).check("2", offset)
            least = first + 1
        for number, one in enumerate(_of_length("begins", self.begins, count, f"one for each of {count} members")):
            _check_each(f"begins[{number}]", _of_length(f"begins[{number}]", one, 2, "a part and its draws"))


def _of_length(field: str, value: Any, count: int, what: str) -> tuple[Any, ...]:
    return tuple(Kind(what, lambda value: isinstance(value, tuple) and len(value) == count).check(field, value))


def _check_each(field: str, values: tuple[Any, ...], most: int = MAX_SAMPLES) -> None:
    for number, value in enumerate(values):
        integer(0, most).check(f"{field}[{number}]", value)


def _check_sum(consumed: int, parts: list[Any], which: str = "") -> None:
    if consumed != (trained := sum(part.dp * part.draws for part in parts)):
        raise refused("consumed", f"{trained}, the sum of dp * draws of the{which} parts", consumed)


@dataclass(frozen=True, slots=True)
class BlendState(_State):
    """As `RunState`, of a run over a blend. Raises StateInvalid: a field is out of range, or contradicts another."""

    names: Annotated[tuple[str, ...], _LIST]  # the identity of each member, or its directory where it has none
    # where each stream stands, those included that are blended no more
    members: Annotated[tuple[RunState, ...], list_of(RunState, RunState.read)]
    parts: Annotated[tuple[BlendPartState, ...], list_of(BlendPartState)]
    consumed: Samples

    WHAT: ClassVar[str] = "a blend"
    KIND: ClassVar[str | None] = BLEND

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        for number, name in enumerate(self.names):
            TEXT.check(f"names[{number}]", name)
        if len(set(self.names)) != len(self.names):
            raise refused("names", "names, none of them twice", self.names)
        if len(self.members) != len(self.names):
            raise refused("members", f"the state of each of {len(self.names)} streams", self.members)
        for number, part in enumerate(self.parts):
            for place, (member, begin) in enumerate(zip(part.members, part.begins, strict=True)):
                integer(0, len(self.members) - 1).check(f"parts[{number}].members[{place}]", member)
                most = len(self.members[member].parts) - 1
                integer(0, most).check(f"parts[{number}].begins[{place}][0]", begin[0])
        _check_sum(self.consumed, [*self.parts])


@dataclass(frozen=True, slots=True)
class WindowPlace(Checked):
    """A window, and where the sequences made of it begin."""

    window: Samples = 0  # its number
    before: Samples = 0  # sequences of the epoch that were made before
    position: Samples = 0  # place of the row with which they begin, in the order of rows
    offset: Samples = 0  # tokens of that row before them, its BOS included


def _is_rule(value: Any) -> bool:
    facts = value if type(value) is dict and len(value) <= 32 else {0: 0}
    return all(type(name) is str and type(fact) in (int, str, bool, type(None)) for name, fact in facts.items())


_PLACE: Final = Kind("an object", lambda value: isinstance(value, WindowPlace), partial(read, WindowPlace))
_LENGTHS: Final = Kind(
    "16 hexadecimal digits", lambda value: type(value) is str and bool(re.fullmatch("[0-9a-f]{16}", value))
)
_TEXTS: Final = _LIST._replace(fits=lambda value: isinstance(value, tuple) and all(type(one) is str for one in value))
_ROWS: Final = Kind(
    "the state of a run or of a blend",
    lambda value: value is None or isinstance(value, (RunState, BlendState)),
    lambda value: read(BlendState, value) if isinstance(value, dict) and "names" in value else RunState.read(value),
)


@dataclass(frozen=True, slots=True)
class SequenceState(_State):
    """Where a run stands. Raises StateInvalid where a value is impossible."""

    stream: Annotated[str, Kind("the identity of a stream", lambda value: type(value) is str)]
    rule: Annotated[dict[str, int | str | bool | None], Kind("settings by name", _is_rule)]  # what makes the sequences
    epoch: Samples  # in which it stands
    consumed: Samples  # sequences of that epoch that were trained, over all ranks; what completed a micro batch not
    place: Annotated[WindowPlace, _PLACE]  # at or before that
    # digest of the lengths of the rows, window by window, of which sequences were made from that place on up to there
    lengths: Annotated[str, _LENGTHS]
    # the course of the run in that epoch, `draws` being sequences of a rank; none in states of earlier releases
    parts: Annotated[tuple[Part, ...], list_of(Part, least=0)] = ()
    # what gives the rows of that epoch, and where its streams lie; not said of one stream in its own order
    rows: Annotated[RunState | BlendState | None, _ROWS] = None
    directories: Annotated[tuple[str, ...], _TEXTS] = ()

    WHAT: ClassVar[str] = "a run over sequences"
    KIND: ClassVar[str | None] = KIND

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        integer(self.place.before, MAX_SAMPLES).check("consumed", self.consumed)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        values = _State.to_dict(self)
        values["place"]["lengths"] = values.pop("lengths")
        return values

    @classmethod
    def read(cls, value: Any) -> SequenceState:
        """As `from_dict`, of which the caller says where it was."""
        place = value.get("place") if isinstance(value, dict) else None
        lengths = {"lengths": place["lengths"]} if isinstance(place, dict) and "lengths" in place else {}
        return super(SequenceState, cls).read(value | lengths if lengths else value)


_OWNER: Final = Kind(
    f"text of at most {_MAX_OWNER} characters without control characters and lone surrogates",
    lambda value: isinstance(value, str) and len(value) <= _MAX_OWNER and not _NOT_IN_OWNERS.search(value),
    lambda value: "" if value is None else value,
)
_STREAM: Final = Kind(f"1 to {_MAX_STREAM} characters", lambda value: TEXT.fits(value) and len(value) <= _MAX_STREAM)
_WEIGHT: Final = Kind("a number from 0 to 1", lambda value: NUMBER.fits(value) and 0 <= value <= 1, NUMBER.read)
_RUN: Final = or_null(Kind("the state of a run", lambda value: isinstance(value, RunState), RunState.read))


@dataclass(frozen=True, slots=True)
class BlendShare(Checked):
    """One stream of a blend."""

    stream: Annotated[str, _STREAM]  # its directory or URL, as given but without credentials; the end of a long one
    weight: Annotated[float, _WEIGHT]  # share of the samples that come next, of the closed range [0, 1]
    consumed: Samples  # samples of it that were trained, over all ranks


_SHARES: Final = list_of(BlendShare, least=0)


def _read_shares(values: Any) -> Any:
    if values is not None and not (isinstance(values, list) and 0 < len(values) <= MAX_SHARES):
        raise refused("", f"1 to {MAX_SHARES} streams with their shares", values)
    return _SHARES.read(values or ())


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
    blend: Annotated[tuple[BlendShare, ...], _SHARES._replace(read=_read_shares)] = ()

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
