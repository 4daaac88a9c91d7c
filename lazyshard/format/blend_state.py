"""The state of a run over a blend of streams: the state of each, and how they were blended.

A JSON object with a format number of its own, for checkpoints as `lazyshard.format.state`. A blend's course is a row of
parts too, each with one number of ranks, one micro batch and one set of streams and weights. Here a run of 4 ranks over
two streams was given a third one, and other weights, after 100 samples a rank::

    part  dp  draws  members  pieces
    0      4    100    0 1    (0: 4 1)
    1      4     30    0 1 2  (0: 2 1 1)    so far

Streams that are blended no more stay members, so that they go on where they were once they come back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from lazyshard.errors import StateInvalid, redact
from lazyshard.format.fields import check_version, inside, members, printable, read_from, tuples
from lazyshard.format.state import RunState
from lazyshard.part import MAX_SAMPLES, Part, check_integer, refused

_T = TypeVar("_T")

BLEND_FORMAT: Final = 1
"""The only format of a blend's state that there is."""

BLEND: Final = "blend"
"""The `kind` of a blend's state; that of one stream has none."""

_MAX_STREAMS: Final = 100_000

_MAX_PERIOD: Final = 1 << 20
"""Longer than any that is made: a table of a piece's period is computed."""

Piece = tuple[int, tuple[int, ...], int]
"""Position at which it begins, draws of each stream in a period, how far into its period it begins."""


@dataclass(frozen=True, slots=True)
class BlendPartState:
    """A stretch of a run under one number of ranks, one micro batch and one set of streams.

    What is not told here is as of `Part`, `draws` over all streams. Raises StateInvalid: a field is out of its range.

    Attributes:
        members: which of the state's members are blended, in order.
        pieces: with which weights, from which position on: (position, draws of each in a period, offset).
        begins: where each of `members` stood: the number of the part of its own state, and draws of a lane in that.
    """

    dp: int
    batch_size: int
    draws: int
    members: tuple[int, ...]
    pieces: tuple[Piece, ...]
    begins: tuple[tuple[int, int], ...]
    epoch: int | None = None
    first_step: int = 0
    draws_per_step: int = 0

    def __post_init__(self) -> None:
        Part(self.dp, self.batch_size, self.draws, self.epoch, True, (), self.first_step, self.draws_per_step)
        for number, member in enumerate(_rows("members", self.members, "numbers of members, at least one")):
            check_integer(f"members[{number}]", member, 0, _MAX_STREAMS)
        if len(set(self.members)) != len(self.members):
            raise refused("members", "numbers of members, none of them twice", self.members)
        least = 0
        for number, piece in enumerate(_rows("pieces", self.pieces, "at least one piece")):
            with inside(f"pieces[{number}]"):
                self._check_piece(piece, least, 0 if number == 0 else MAX_SAMPLES)
            least = piece[0] + 1
        count = len(self.members)
        for number, one in enumerate(_rows("begins", self.begins, f"one for each of {count} members", count)):
            for place, value in enumerate(_rows(f"begins[{number}]", one, "a part and its draws", 2)):
                check_integer(f"begins[{number}][{place}]", value, 0, MAX_SAMPLES)

    def _check_piece(self, piece: Any, low: int, high: int) -> None:
        what = "a position, the draws of each stream in a period, and an offset"
        first, parts, offset = _rows("", piece, what, 3)
        check_integer("0", first, low, high)
        count = len(self.members)
        for number, part in enumerate(_rows("1", parts, f"draws of each of {count} members", count)):
            check_integer(f"1[{number}]", part, 0, MAX_SAMPLES)
        if not 1 <= sum(parts) <= _MAX_PERIOD:
            raise refused("1", f"from 1 to {_MAX_PERIOD} draws in a period", parts)
        check_integer("2", offset, 0, MAX_SAMPLES)

    def to_dict(self) -> dict[str, Any]:
        """Returns the part as plain JSON values."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        values["members"] = list(self.members)
        values["pieces"] = [[first, list(parts), offset] for first, parts, offset in self.pieces]
        values["begins"] = [list(one) for one in self.begins]
        return values

    @classmethod
    def _read(cls, value: Any) -> BlendPartState:
        found = members(value, cls.__slots__)
        if isinstance(found["members"], list):
            found["members"] = tuple(found["members"])
        found["begins"] = tuples(found["begins"])
        pieces = tuples(found["pieces"])
        found["pieces"] = tuple(map(tuples, pieces)) if isinstance(pieces, tuple) else pieces
        return cls(**found)


def _rows(field: str, value: Any, what: str, count: int | None = None) -> tuple[Any, ...]:
    """Returns a tuple of so many values, None for at least one. Raises StateInvalid: it is none."""
    if not isinstance(value, tuple) or (len(value) != count if count is not None else not value):
        raise refused(field, what, value)
    return value


@dataclass(frozen=True, slots=True)
class BlendState:
    """What must be known of a run over a blend to go on with it, or to tell later what it trained when.

    Attributes:
        names: of the members: the identity of each stream, or its directory where it has none.
        members: where each stream stands, those included that are blended no more.
        parts: the course of the run so far, at least one part; the last one is current.
        consumed: samples trained since the run began, over all ranks, parts and epochs: the sum of `dp * draws`.

    Raises:
        StateInvalid: a field is out of its range, or contradicts another one.
    """

    names: tuple[str, ...]
    members: tuple[RunState, ...]
    parts: tuple[BlendPartState, ...]
    consumed: int

    def __post_init__(self) -> None:
        for number, name in enumerate(self.names):
            if not isinstance(name, str) or not name:
                raise refused(f"names[{number}]", "a name", name)
        if len(set(self.names)) != len(self.names):
            raise refused("names", "names, none of them twice", self.names)
        if len(self.members) != len(self.names):
            raise refused("members", f"the state of each of {len(self.names)} streams", self.members)
        if not self.parts:
            raise refused("parts", "at least one part", self.parts)
        for number, part in enumerate(self.parts):
            for place, (member, begin) in enumerate(zip(part.members, part.begins, strict=True)):
                check_integer(f"parts[{number}].members[{place}]", member, 0, len(self.members) - 1)
                most = len(self.members[member].parts) - 1
                check_integer(f"parts[{number}].begins[{place}][0]", begin[0], 0, most)
        check_integer("consumed", self.consumed, 0, MAX_SAMPLES)
        trained = sum(part.dp * part.draws for part in self.parts)
        if self.consumed != trained:
            raise refused("consumed", f"{trained}, the sum of dp * draws of the parts", self.consumed)

    def to_dict(self) -> dict[str, Any]:
        """Returns the state as plain JSON values: dicts, lists, strings, integers, true, false and None."""
        return {
            "kind": BLEND,
            "format": BLEND_FORMAT,
            "names": list(self.names),
            "members": [member.to_dict() for member in self.members],
            "parts": [part.to_dict() for part in self.parts],
            "consumed": self.consumed,
        }

    @classmethod
    def from_dict(cls, value: Any, where: str) -> BlendState:
        """Reads what `to_dict` returned, found `where`. Raises StateInvalid, VersionUnsupported."""
        with read_from(where):
            return cls._read(value)

    @classmethod
    def _read(cls, value: Any) -> BlendState:
        if isinstance(value, dict) and "kind" not in value and "stream_id" in value:
            raise StateInvalid("expected the state of a blend, found that of one stream", field="kind", expected=BLEND)
        kind = members(value, ("kind",))["kind"]
        if kind != BLEND:
            raise refused("kind", repr(BLEND), kind)
        check_version(value, BLEND_FORMAT, "the state of a blend")
        found = members(value, cls.__slots__)
        for name in ("names", "members", "parts"):
            if not isinstance(found[name], (list, tuple)):
                raise refused(name, "a list", found[name])
        runs = _each("members", found["members"], RunState._read)
        return cls(tuple(found["names"]), runs, _each("parts", found["parts"], BlendPartState._read), found["consumed"])


def _each(name: str, values: Sequence[Any], read: Callable[[Any], _T]) -> tuple[_T, ...]:
    found = []
    for number, value in enumerate(values):
        with inside(f"{name}[{number}]"):
            found.append(read(value))
    return tuple(found)


MAX_SHARES: Final = 64
"""Of a blend of more streams nothing is kept: each of their cursors would tell of all of them."""

_MAX_CHARACTERS: Final = 400


@dataclass(frozen=True, slots=True)
class BlendShare:
    """One stream of a blend.

    Attributes:
        stream: its directory or URL, as the run was given it but without credentials; the end of a long one.
        weight: share of the samples that come next, of the closed range [0, 1].
        consumed: samples of it that were trained, over all ranks.
    """

    stream: str
    weight: float
    consumed: int

    def __post_init__(self) -> None:
        if not isinstance(self.stream, str) or not 0 < len(self.stream) <= _MAX_CHARACTERS:
            raise refused("stream", f"1 to {_MAX_CHARACTERS} characters", self.stream)
        if isinstance(self.weight, bool) or not isinstance(self.weight, (int, float)) or not 0 <= self.weight <= 1:
            raise refused("weight", "a number from 0 to 1", self.weight)
        check_integer("consumed", self.consumed, 0, MAX_SAMPLES)


def blend_shares(state: BlendState, directories: Mapping[str, object]) -> tuple[BlendShare, ...]:
    """Returns how streams, of these directories by name, are blended at the end of a state; none if too many."""
    last = state.parts[-1]
    if len(last.members) > MAX_SHARES:
        return ()
    _, parts, _ = [piece for piece in last.pieces if piece[0] <= last.draws][-1]
    whole = sum(parts)
    return tuple(
        BlendShare(
            printable(redact(str(directories.get(state.names[member], state.names[member]))))[-_MAX_CHARACTERS:],
            part / whole,
            state.members[member].consumed,
        )
        for member, part in zip(last.members, parts, strict=True)
    )


def read_shares(values: Any) -> tuple[BlendShare, ...]:
    """Returns the shares in the field `blend` of a file, none without it. Raises StateInvalid: they are none."""
    if values is None:
        return ()
    if not isinstance(values, list) or not 0 < len(values) <= MAX_SHARES:
        raise refused("blend", f"1 to {MAX_SHARES} streams with their shares", values)
    shares = _each("blend", values, lambda value: BlendShare(**members(value, BlendShare.__slots__)))
    return tuple(replace(share, weight=float(share.weight)) for share in shares)


def given_shares(found: Sequence[BlendShare]) -> list[float | None]:
    """Returns what each stream has given of all samples that were trained; None where none was."""
    whole = sum(one.consumed for one in found)
    return [one.consumed / whole if whole else None for one in found]
