"""The state of a run: the few integers that a checkpoint must keep so that its resume trains every sample once.

A JSON object with a format number of its own, since it lives outside of streams too. It says what the trainer has
consumed, never what was read ahead. The course of a run is a row of parts, each under one number of ranks and one micro
batch; the last one is current.

Of a run over sequences, which are made while training reads, a number of them alone would not do: how many there are
before a window only the lengths of all rows before it tell. So the place has the window from which sequences are made
again, how many were made before it, and the row and token with which they begin. `lengths` is a digest of the lengths
of which the sequences at hand were made: others would make others, and samples would be lost or come twice.

Of a run over a blend it is the state of each stream, and how they were blended: a row of parts too, with one number of
ranks, one micro batch and one set of streams and weights. Here a run of 4 ranks over two streams was given a third
one, and other weights, after 100 samples a rank::

    part  dp  draws  members  pieces
    0      4    100    0 1    (0: 4 1)
    1      4     30    0 1 2  (0: 2 1 1)    so far

Streams that are blended no more stay members, so that they go on where they were once they come back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, TypeVar

from lazyshard.errors import StateInvalid
from lazyshard.format import records
from lazyshard.format.records import StreamId, inside, list_of, read
from lazyshard.part import MAX_SAMPLES, TEXT, Checked, Kind, Part, Samples, integer, or_null, refused, tuples

_FORMAT: Final = 1  # The only format of a state, of any kind, that there is. It counts apart from that of streams
_MAX_PERIOD: Final = 1 << 20  # Longer than any that is made: a table of a piece's period is computed
KIND: Final = "sequences"
BLEND: Final = "blend"  # The `kind` of a blend's state; that of one stream has none

_StateT = TypeVar("_StateT", bound="_State")


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
    """What must be known of a run to go on with it, or to tell later what it trained when."""

    stream_id: StreamId  # the stream's identity
    samples_per_chunk: Annotated[int, records.PER_CHUNK]  # of the stream
    unit: Annotated[int, integer(1, MAX_SAMPLES)]  # samples that are dealt to a rank in turn
    window: Samples  # positions of a rank that are shuffled together, a multiple of `unit`; 0 draws in order
    seed: Annotated[int, integer(0, 2**63 - 1)]  # of the shuffle
    # the stream was taken to end there at the latest; None for no bound
    max_total_samples: Annotated[int | None, or_null(integer(1, MAX_SAMPLES))]
    # the course of the run so far; the last one is current
    parts: Annotated[tuple[Part, ...], list_of(Part)]
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


Piece = tuple[int, tuple[int, ...], int]
"""Position at which it begins, draws of each stream in a period, how far into its period it begins."""

_LIST: Final = Kind("a list", lambda value: isinstance(value, tuple), tuples)


def _rows(what: str) -> Kind:
    return Kind(what, lambda value: isinstance(value, tuple) and bool(value), tuples)


@dataclass(frozen=True, slots=True)
class BlendPartState(Checked):
    """A stretch of a run under one number of ranks, one micro batch and one set of streams.

    What is not told here is as of `Part`, `draws` over all streams. Raises StateInvalid: a field is out of its range.

    Attributes:
        members: which of the state's members are blended, in order.
        pieces: with which weights, from which position on: (position, draws of each in a period, offset).
        begins: where each of `members` stood: the number of the part of its own state, and draws of a lane in that.
    """

    dp: Annotated[int, integer(1, 2**31)]
    batch_size: Annotated[int, integer(1, MAX_SAMPLES)]
    draws: Samples
    members: Annotated[tuple[int, ...], _rows("numbers of members, at least one")]
    pieces: Annotated[tuple[Piece, ...], _rows("at least one piece")]
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
    """What must be known of a run over a blend to go on with it, or to tell later what it trained when.

    Attributes:
        names: of the members: the identity of each stream, or its directory where it has none.
        members: where each stream stands, those included that are blended no more.
        parts: the course of the run so far, at least one part; the last one is current.
        consumed: samples trained since the run began, over all ranks, parts and epochs: the sum of `dp * draws`.

    Raises:
        StateInvalid: a field is out of its range, or contradicts another one.
    """

    names: Annotated[tuple[str, ...], _LIST]
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
