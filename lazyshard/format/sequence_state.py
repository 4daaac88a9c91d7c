"""Where a run over sequences stands, which are made while training reads: plain values for a checkpoint.

    {"format": 1, "kind": "sequences", "stream": ID, "rule": {...}, "epoch": 0, "consumed": 96,
     "place": {"window": 3, "before": 90, "position": 30000, "offset": 0, "lengths": "0123456789abcdef"}}

A number of sequences alone would not do: how many there are before a window only the lengths of all rows before it
tell. So the place has the window from which sequences are made again, how many were made before it, and the row (by its
place in the order of rows, and a token in it) with which they begin. `lengths` is a digest of the lengths of which the
sequences at hand were made: others would make others, and samples would be lost or come twice.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Final

from lazyshard.errors import StateInvalid, VersionUnsupported
from lazyshard.format.fields import MAX_SAMPLES
from lazyshard.format.state_fields import check_integer, check_version, inside, members, refused

__all__ = ["FORMAT", "KIND", "Place", "SequenceState"]

FORMAT: Final = 1

KIND: Final = "sequences"
_DIGEST: Final = re.compile("[0-9a-f]{16}")
_MOST_FACTS: Final = 32


@dataclass(frozen=True, slots=True)
class Place:
    """A window, and where the sequences made of it begin.

    Attributes:
        window: its number.
        before: sequences of the epoch that were made before.
        position: place of the row with which they begin, in the order of rows.
        offset: tokens of that row before them, its BOS included.
    """

    window: int = 0
    before: int = 0
    position: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("window", "before", "position", "offset"):
            check_integer(name, getattr(self, name), 0, MAX_SAMPLES)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """Where a run stands.

    Attributes:
        stream: identity of the stream.
        rule: what makes the sequences, by name.
        epoch: in which it stands.
        consumed: sequences of that epoch that were trained, over all ranks; what completed a micro batch not counted.
        place: at or before that.
        lengths: digest of the lengths of the rows, window by window, of which sequences were made from that place on
            up to there.

    Raises:
        StateInvalid: a value is impossible.
    """

    stream: str
    rule: dict[str, int | str | bool | None]
    epoch: int
    consumed: int
    place: Place
    lengths: str

    def __post_init__(self) -> None:
        """Checks the values."""
        if type(self.stream) is not str:
            raise refused("stream", "the identity of a stream", self.stream)
        if (
            type(self.rule) is not dict
            or len(self.rule) > _MOST_FACTS
            or any(type(name) is not str for name in self.rule)
            or any(type(fact) not in (int, str, bool, type(None)) for fact in self.rule.values())
        ):
            raise refused("rule", "settings by name", self.rule)
        check_integer("epoch", self.epoch, 0, 2**62)
        check_integer("consumed", self.consumed, self.place.before, MAX_SAMPLES)
        if type(self.lengths) is not str or not _DIGEST.fullmatch(self.lengths):
            raise refused("lengths", "16 hexadecimal digits", self.lengths)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "format": FORMAT,
            "kind": KIND,
            "stream": self.stream,
            "rule": dict(self.rule),
            "epoch": self.epoch,
            "consumed": self.consumed,
            "place": asdict(self.place) | {"lengths": self.lengths},
        }

    @classmethod
    def from_dict(cls, value: Any, where: str) -> SequenceState:
        """Reads what `to_dict` has returned; fields that are not known are ignored.

        Args:
            value: the values, as JSON or pickle gave them back.
            where: how to call whatever they are from, in messages.

        Raises:
            StateInvalid: a field is missing or out of its range, or it is the state of something else.
            VersionUnsupported: a later format.
        """
        try:
            return cls._read(value)
        except (StateInvalid, VersionUnsupported) as error:
            error.file = where
            error.args = (f"{where}: {error}",)
            raise

    @classmethod
    def _read(cls, value: Any) -> SequenceState:
        check_version(value, FORMAT, "the state of a run over sequences")
        names = ("kind", "stream", "rule", "epoch", "consumed", "place")
        found = members(value, names)
        if found.pop("kind") != KIND:
            raise refused("kind", repr(KIND), value["kind"])
        with inside("place"):
            numbers = members(found.pop("place"), ("window", "before", "position", "offset", "lengths"))
            lengths = numbers.pop("lengths")
            place = Place(**numbers)
        return cls(**found, place=place, lengths=lengths)
