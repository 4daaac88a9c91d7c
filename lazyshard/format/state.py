"""The state of a run: the few integers that a checkpoint must keep so that a resumed run trains every sample once.

It is a JSON object with its own format number, since it is also stored outside of streams. It records what the trainer
has consumed, never what was read ahead. The course of a run is a list of parts, each with one number of ranks and one
micro batch size; the last part is current.

For a run over sequences, which are made while training reads, the number of sequences alone is not enough: how many
precede a window depends on the lengths of all rows before it. So the state also has the window from which sequences are
made again, how many were made before it, the row and token at which they begin, and a digest of the row lengths.

For a run over a blend it is the state of each stream, and how they were blended: a list of parts, each with one set
of streams. Here a run of 4 ranks over two streams got a third one, and other weights, after 100 samples per rank::

    part  dp  draws  members  pieces
    0      4    100    0 1    (0: 4 1)
    1      4     30    0 1 2  (0: 2 1 1)    so far

Streams that are no longer blended remain members, so that they continue where they were if they are added again.

`cursors/NAME.json`, the cursor, is the position of a consumer (a run) in its durable checkpoints; it is never derived
from what was read, since workers read ahead. It holds a token of the run that may write it: each new run takes a turn
one above the previous run's, and checks before each write that the token is still its own.

`cursors/NAME.reading.json`, a hint, is replaced about once per window by the reader of rank 0, and never synced. A
producer's limit counts from it, since a checkpoint may wait for data; only cursors decide which chunks may be deleted.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeVar

from lazyshard.errors import StateInvalid, redact
from lazyshard.format import records
from lazyshard.format.records import CURSORS, Chunks, Seconds, SmallFile, StreamId, inside, list_of, printable, read
from lazyshard.part import (
    MAX_SAMPLES,
    NUMBER,
    SPLIT,
    TEXT,
    Checked,
    Kind,
    Part,
    Samples,
    integer,
    or_null,
    refused,
    tuples,
)

_FORMAT: Final = 1  # The only format of states, of any kind. Independent of the format of streams
_MAX_PERIOD: Final = 1 << 20  # Longer than any that is made: the table of a period is computed in memory
KIND: Final = "sequences"
BLEND: Final = "blend"  # The `kind` of a blend's state; the state of one stream has none

_MAX_CONSUMER_BYTES: Final = 200  # A file name has at most 255; the rest is for prefixes and suffixes
CURSOR_SUFFIX: Final = ".json"
READING_SUFFIX: Final = ".reading.json"
_MAX_OWNER: Final = 400  # Characters of an owner: a token and the name of a machine
MAX_SHARES: Final = 64  # Larger blends are not recorded: the cursor of each stream would list all of them
_MAX_STREAM: Final = 400  # Characters of a stream's name
# Must not occur in messages: control characters, including C1; and lone surrogates, which JSON cannot represent
_NOT_IN_OWNERS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_OWNER_FORM: Final = "([1-9][0-9]{0,18})/([0-9a-f]{16}) process ([0-9]{1,10}) on (.{1,200})"

_StateT = TypeVar("_StateT", bound="_State")
_FileT = TypeVar("_FileT", bound="_OfConsumer")


class _State(Checked):
    __slots__ = ()
    WHAT: ClassVar[str]
    KIND: ClassVar[str | None] = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the state as plain JSON values; fields that states of earlier releases lack have defaults."""
        return ({} if self.KIND is None else {"kind": self.KIND}) | {"format": _FORMAT} | records.given(self)

    @classmethod
    def from_dict(cls: type[_StateT], value: Any, where: str, *, within: str = "") -> _StateT:
        """Reads the result of `to_dict` back from JSON or a pickle; errors name `where` and the field `within` it.

        Raises StateInvalid: a field is missing, out of range, or contradicts another one; VersionUnsupported.
        """
        with records.in_file(where, StateInvalid), inside(within):
            return cls.read(value)

    @classmethod
    def read(cls: type[_StateT], value: Any) -> _StateT:
        """As `from_dict`, for callers that add the location to errors."""
        if cls.KIND == BLEND and isinstance(value, dict) and "kind" not in value and "stream_id" in value:
            raise StateInvalid("expected the state of a blend, found that of one stream", field="kind", expected=BLEND)
        values = records.of_format(value, _FORMAT, f"the state of {cls.WHAT} in")
        if cls.KIND is not None:
            records.take(values, "kind", Kind(repr(cls.KIND), lambda kind: kind == cls.KIND))
        return read(cls, values, records.defaults_of(cls))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RunState(_State):
    """What is needed to continue a run, or to determine later what it trained when."""

    stream_id: StreamId  # the stream's identity
    samples_per_chunk: Annotated[int, records.PER_CHUNK]  # of the stream
    unit: Annotated[int, integer(1, MAX_SAMPLES)]  # consecutive samples that are dealt to a rank
    window: Samples  # positions of a rank that are shuffled together, a multiple of `unit`; 0 draws in order
    seed: Annotated[int, integer(0, 2**63 - 1)]  # of the shuffle
    # upper bound of the stream's length; None for no bound
    max_total_samples: Annotated[int | None, or_null(integer(1, MAX_SAMPLES))]
    parts: Annotated[tuple[Part, ...], list_of(Part)]  # the course of the run so far; the last one is current
    # samples trained since the run began, over all ranks, parts and epochs: the sum of `dp * draws` of the parts that
    # were trained
    consumed: Samples
    # the shares of the splits of the stream, and the number of the one that is drawn; None for all samples
    split: Annotated[tuple[tuple[int, ...], int] | None, or_null(SPLIT)] = None

    WHAT: ClassVar[str] = "a run"

    def __post_init__(self) -> None:
        # Otherwise a wrong value would only be found by a resume, after the run has ended.
        Checked.__post_init__(self)
        if self.window % self.unit:
            raise refused("window", f"a multiple of unit, {self.unit}", self.window)
        least = 0
        for number, part in enumerate(self.parts):
            if part.first_step < least:
                found = f"at least {least}, that of the previous part"
                raise refused(f"parts[{number}].first_step", found, part.first_step)
            least = part.first_step
        _check_sum(self.consumed, [part for part in self.parts if part.trained], " trained")


_LIST: Final = Kind("a list", lambda value: isinstance(value, tuple), tuples)


def _rows(what: str) -> Kind:
    return Kind(what, lambda value: isinstance(value, tuple) and bool(value), tuples)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BlendPartState(Checked):
    """A part of a run as `Part`, with one set of streams; `draws` are counted over all of them."""

    dp: Annotated[int, integer(1, 2**31)]
    batch_size: Annotated[int, integer(1, MAX_SAMPLES)]
    draws: Samples
    # the members of the state that are blended, in order
    members: Annotated[tuple[int, ...], _rows("numbers of members, at least one")]
    # the weights, by the position from which they apply: (position, draws of each per period, offset)
    pieces: Annotated[tuple[tuple[int, tuple[int, ...], int], ...], _rows("at least one piece")]
    # where each of `members` was: the number of the part in its own state, and the draws of a lane in that part
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BlendState(_State):
    """As `RunState`, for a run over a blend. Raises StateInvalid: a field is out of range, or contradicts another."""

    names: Annotated[tuple[str, ...], _LIST]  # the identity of each member, or its directory if it has none
    # the state of each stream, including streams that are no longer blended
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class WindowPlace(Checked):
    """A window, and where its sequences begin."""

    window: Samples = 0  # its number
    before: Samples = 0  # sequences of the epoch made before
    position: Samples = 0  # position of the first row of its sequences, in the order of rows
    offset: Samples = 0  # tokens of that row before the first sequence, including its BOS


def _is_rule(value: Any) -> bool:
    facts = value if type(value) is dict and len(value) <= 32 else {0: 0}
    return all(type(name) is str and type(fact) in (int, str, bool, type(None)) for name, fact in facts.items())


_PLACE: Final = Kind("an object", lambda value: isinstance(value, WindowPlace), partial(read, WindowPlace))
_LENGTHS: Final = records.hexadecimal(16)
_TEXTS: Final = _LIST._replace(fits=lambda value: isinstance(value, tuple) and all(type(one) is str for one in value))
_ROWS: Final = Kind(
    "the state of a run or of a blend",
    lambda value: value is None or isinstance(value, (RunState, BlendState)),
    lambda value: read(BlendState, value) if isinstance(value, dict) and "names" in value else RunState.read(value),
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SequenceState(_State):
    """The state of a run over sequences. Raises StateInvalid: a value is impossible."""

    stream: Annotated[str, Kind("the identity of a stream", lambda value: type(value) is str)]
    rule: Annotated[dict[str, int | str | bool | None], Kind("settings by name", _is_rule)]  # how sequences are made
    epoch: Samples  # the current epoch
    consumed: Samples  # sequences of that epoch trained, over all ranks, without those that completed a micro batch
    place: Annotated[WindowPlace, _PLACE]  # at or before these
    # digest of the row lengths, window by window, from which sequences were made between that place and `consumed`
    lengths: Annotated[str, _LENGTHS]
    # the course of the run in that epoch, `draws` counting sequences of a rank; empty in states of earlier releases
    parts: Annotated[tuple[Part, ...], list_of(Part, least=0)] = ()
    # the order of the rows of that epoch, and the directories of its streams; empty for one stream in its own order
    rows: Annotated[RunState | BlendState | None, _ROWS] = None
    directories: Annotated[tuple[str, ...], _TEXTS] = ()

    WHAT: ClassVar[str] = "a run over sequences"
    KIND: ClassVar[str | None] = KIND

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        integer(self.place.before, MAX_SAMPLES).check("consumed", self.consumed)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        values = _State.to_dict(self)
        values["place"]["lengths"] = values.pop("lengths")
        return values

    @classmethod
    def read(cls, value: Any) -> SequenceState:
        """As `from_dict`, for callers that add the location to errors."""
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BlendShare(Checked):
    """One stream of a blend."""

    stream: Annotated[str, _STREAM]  # its directory or URL, as given but without credentials; the end of a long one
    weight: Annotated[float, _WEIGHT]  # share of the next samples, in the closed range [0, 1]
    consumed: Samples  # its samples that were trained, over all ranks


_SHARES: Final = list_of(BlendShare, least=0)


def _read_shares(values: Any) -> Any:
    if values is not None and not (isinstance(values, list) and 0 < len(values) <= MAX_SHARES):
        raise refused("", f"1 to {MAX_SHARES} streams with their shares", values)
    return _SHARES.read(values or ())


def blend_shares(state: BlendState, directories: Mapping[str, object]) -> tuple[BlendShare, ...]:
    """Returns how streams are blended at the end of a state, given their directories by name; empty if too many."""
    last = state.parts[-1]
    if len(last.members) > MAX_SHARES:
        return ()
    _, parts, _ = [piece for piece in last.pieces if piece[0] <= last.draws][-1]
    streams = [redact(str(directories.get(state.names[member], state.names[member]))) for member in last.members]
    return tuple(
        BlendShare(printable(stream)[-_MAX_STREAM:], part / sum(parts), state.members[member].consumed)
        for stream, member, part in zip(streams, last.members, parts, strict=True)
    )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _OfConsumer(SmallFile):
    """A file of a consumer, which is named after it (see `check_consumer`), of the stream with this identity."""

    consumer: Annotated[str, TEXT]
    stream_id: StreamId

    SUFFIX: ClassVar[str]

    def __post_init__(self) -> None:
        check_consumer(self.consumer)
        SmallFile.__post_init__(self)

    @classmethod
    def decode(cls: type[_FileT], data: bytes, consumer: str, file: str | None = None) -> _FileT:  # type: ignore[override]
        """Decodes a file that must belong to this consumer; messages use `file` as its name."""
        with records.in_file(file or f"{CURSORS}/{check_consumer(consumer)}{cls.SUFFIX}"):
            values = {"stream_id": None} | records.parse_object(data)
            # A cursor copied to another name would allow the deletion of chunks that were not trained.
            records.take(values, "consumer", Kind(consumer, lambda value: value == consumer))
            return records.read(cls, values, records.defaults_of(cls))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cursor(_OfConsumer):
    """The position of a consumer in its durable checkpoints."""

    consumed: Samples  # samples in durable checkpoints, over all ranks and epochs
    chunks_before: Chunks  # the consumer has finished the chunks of the half-open range [0, chunks_before)
    # the numbers that determine which sample is drawn when, by name: dp_size, batch_size, unit, window, seed
    plan: Annotated[dict[str, int], Kind("an object", lambda value: isinstance(value, dict))]
    updated_at: Seconds  # for display: no decision depends on it
    # the state of the run in the newest of these checkpoints, None if unknown; it has the same stream and `consumed`
    state: Annotated[RunState | None, _RUN] = None
    owner: Annotated[str, _OWNER] = ""  # the run that writes the cursor, see `CursorToken`; "" if none does
    # how the run blends the stream with others, for display; empty if it does not
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReadingHint(_OfConsumer):
    """How many chunks a consumer needs to continue reading."""

    dp_size: Annotated[int, integer(1, 2**31)]  # number of its data-parallel ranks
    # number of the open or awaited window, from 0, in the first epoch; without a shuffle, of the stripe. Windows that
    # need no more chunks than the last hint are not written
    window: Samples
    # chunks that must be published before that window can be drawn on all ranks: the half-open range [0, needs_chunks).
    # May decrease if a run restarts from an older checkpoint
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
    """Returns a valid name of a consumer, which becomes part of a file name; otherwise raises ValueError.

    It has 1 to 200 bytes in UTF-8, contains no "/" or control characters, does not begin with a dot (reserved for files
    being written), and does not end in ".reading" (`NAME.reading.json` is reserved).
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
        raise ValueError(f"the name of a consumer must be {wrong}, got {reprlib.repr(name)}")
    return name


class CursorToken(NamedTuple):
    """A run and its turn: the fencing token of a cursor."""

    turn: int  # counts the runs of this name, from 1; two that begin at the same time may have the same turn
    token: str  # 16 random hexadecimal digits chosen at start, so that no two runs are ever equal
    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def text(self) -> str:
        """The `owner` in the cursor: `3/9c41d7e2b06f83a5 process 14106 on node1`."""
        host = _NOT_IN_OWNERS.sub("?", self.host)[:200] or "unknown"
        return f"{self.turn}/{self.token} process {self.pid} on {host}"

    @classmethod
    def parse(cls, text: str) -> CursorToken | None:
        """Returns the token of a text, None for any other text, which is of a foreign writer."""
        found = re.fullmatch(_OWNER_FORM, text)
        if found is None or int(found[1]) > MAX_SAMPLES:
            return None
        return cls(int(found[1]), found[2], int(found[3]), found[4])
