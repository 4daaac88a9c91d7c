"""The state of a run: the few integers that a checkpoint must keep so that its resume trains every sample once.

A JSON object with a format number of its own, since it lives outside of streams too. It says what the trainer has
consumed, never what was read ahead. The course of a run is a row of parts, each under one number of ranks and one micro
batch; the last one is current.

Of a run over sequences, which are made while training reads, a number of them alone would not do: how many there are
before a window only the lengths of all rows before it tell. So the place has the window from which sequences are made
again, how many were made before it, and the row and token with which they begin. `lengths` is a digest of the lengths
of which the sequences at hand were made: others would make others, and samples would be lost or come twice.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

import orjson

from lazyshard.errors import StateInvalid
from lazyshard.format.fields import check_stream_id, check_version, encode, inside, members, read_from, tuples
from lazyshard.format.records import MAX_SAMPLES_PER_CHUNK
from lazyshard.memory import loads
from lazyshard.part import MAX_SAMPLES, Part, check_integer, refused

# The only format of a run's state, of either kind, that there is. It counts apart from that of streams.
_FORMAT: Final = 1

_MAX_SEED: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RunState:
    """What must be known of a run to go on with it, or to tell later what it trained when."""

    stream_id: str | None  # the stream's identity, None for a foreign directory
    samples_per_chunk: int  # of the stream
    unit: int  # samples that are dealt to a rank in turn
    window: int  # positions of a rank that are shuffled together, a multiple of `unit`; 0 draws in order
    seed: int  # of the shuffle
    max_total_samples: int | None  # the stream was taken to end there at the latest; None for no bound
    parts: tuple[Part, ...]  # the course of the run so far, at least one part; the last one is current
    # samples trained since the run began, over all ranks, parts and epochs: the sum of `dp * draws` of the parts that
    # were trained
    consumed: int

    def __post_init__(self) -> None:
        # What is written wrong here would be found by a resume, when the run is gone.
        check_stream_id(self.stream_id)
        check_integer("samples_per_chunk", self.samples_per_chunk, 1, MAX_SAMPLES_PER_CHUNK)
        check_integer("unit", self.unit, 1, MAX_SAMPLES)
        check_integer("window", self.window, 0, MAX_SAMPLES)
        if self.window % self.unit:
            raise refused("window", f"a multiple of unit, {self.unit}", self.window)
        check_integer("seed", self.seed, 0, _MAX_SEED)
        if self.max_total_samples is not None:
            check_integer("max_total_samples", self.max_total_samples, 1, MAX_SAMPLES, " or null")
        self._check_parts()
        check_integer("consumed", self.consumed, 0, MAX_SAMPLES)
        trained = sum(part.dp * part.draws for part in self.parts if part.trained)
        if self.consumed != trained:
            raise refused("consumed", f"{trained}, the sum of dp * draws of the trained parts", self.consumed)

    def to_dict(self) -> dict[str, Any]:
        """Returns the state as plain JSON values: dicts, lists, strings, integers, true, false and None."""
        values = {name: getattr(self, name) for name in self.__slots__}
        parts = [
            {name: getattr(part, name) for name in part.__slots__} | {"skip": [list(one) for one in part.skip]}
            for part in self.parts
        ]
        return {"format": _FORMAT} | values | {"parts": parts}

    @classmethod
    def from_dict(cls, value: Any, where: str, *, within: str = "") -> RunState:
        """Reads what `to_dict` returned, as JSON or pickle gave it back; fields that are not known are ignored.

        `where` is how messages call the file, `within` the field that held the values there. Raises StateInvalid: a
        field is missing, out of its range, or contradicts another one; VersionUnsupported: a later format.
        """
        with read_from(where), inside(within):
            return cls._read(value)

    def encode(self) -> bytes:
        """Returns the state as one line of JSON."""
        return encode(self.to_dict())

    @classmethod
    def decode(cls, data: bytes, file: str) -> RunState:
        """Reads what `encode` returned. Raises as `from_dict`."""
        try:
            value = loads(data)
        except orjson.JSONDecodeError as cause:
            actual = f"{len(data)} bytes that are torn or no JSON ({cause})"
            raise StateInvalid(
                f"{file}: expected a JSON object, found {actual}; go on from an older checkpoint",
                file=file,
                expected="a JSON object",
                actual=actual,
            ) from cause
        return cls.from_dict(value, file)

    @classmethod
    def _read(cls, value: Any) -> RunState:
        check_version(value, _FORMAT, "the state of a run")
        found = members(value, cls.__slots__)
        if not isinstance(found["parts"], (list, tuple)):
            raise refused("parts", "a list", found["parts"])
        parts = []
        for number, part in enumerate(found["parts"]):
            with inside(f"parts[{number}]"):
                values = members(part, Part.__slots__)
                parts.append(Part(**(values | {"skip": tuples(values["skip"])})))
        return cls(**(found | {"parts": tuple(parts)}))

    def _check_parts(self) -> None:
        parts = cast("Any", self.parts)  # what the caller has really given
        if not isinstance(parts, tuple) or not parts or not all(isinstance(part, Part) for part in parts):
            raise refused("parts", "at least one part", parts)
        for number in range(1, len(parts)):
            least, steps = parts[number - 1].first_step, parts[number].first_step
            if steps < least:
                raise refused(f"parts[{number}].first_step", f"at least {least}, that of the part before", steps)


KIND: Final = "sequences"
_DIGEST: Final = re.compile("[0-9a-f]{16}")
_MOST_FACTS: Final = 32


@dataclass(frozen=True, slots=True)
class WindowPlace:
    """A window, and where the sequences made of it begin."""

    window: int = 0  # its number
    before: int = 0  # sequences of the epoch that were made before
    position: int = 0  # place of the row with which they begin, in the order of rows
    offset: int = 0  # tokens of that row before them, its BOS included

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_integer(name, getattr(self, name), 0, MAX_SAMPLES)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """Where a run stands. Raises StateInvalid where a value is impossible."""

    stream: str  # identity of the stream
    rule: dict[str, int | str | bool | None]  # what makes the sequences, by name
    epoch: int  # in which it stands
    consumed: int  # sequences of that epoch that were trained, over all ranks; what completed a micro batch not counted
    place: WindowPlace  # at or before that
    # digest of the lengths of the rows, window by window, of which sequences were made from that place on up to there
    lengths: str

    def __post_init__(self) -> None:
        if type(self.stream) is not str:
            raise refused("stream", "the identity of a stream", self.stream)
        if (
            type(self.rule) is not dict
            or len(self.rule) > _MOST_FACTS
            or any(type(name) is not str for name in self.rule)
            or any(type(fact) not in (int, str, bool, type(None)) for fact in self.rule.values())
        ):
            raise refused("rule", "settings by name", self.rule)
        check_integer("epoch", self.epoch, 0, MAX_SAMPLES)
        check_integer("consumed", self.consumed, self.place.before, MAX_SAMPLES)
        if type(self.lengths) is not str or not _DIGEST.fullmatch(self.lengths):
            raise refused("lengths", "16 hexadecimal digits", self.lengths)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        values = asdict(self)
        values["place"]["lengths"] = values.pop("lengths")
        return {"format": _FORMAT, "kind": KIND} | values

    @classmethod
    def from_dict(cls, value: Any, where: str) -> SequenceState:
        """Reads what `to_dict` has returned, as `RunState.from_dict`; also refuses the state of something else."""
        with read_from(where):
            check_version(value, _FORMAT, "the state of a run over sequences")
            found = members(value, ("kind", "stream", "rule", "epoch", "consumed", "place"))
            if found.pop("kind") != KIND:
                raise refused("kind", repr(KIND), value["kind"])
            with inside("place"):
                numbers = members(found.pop("place"), (*WindowPlace.__slots__, "lengths"))
                lengths = numbers.pop("lengths")
                place = WindowPlace(**numbers)
            return cls(**found, place=place, lengths=lengths)
