"""The head, `head.json`: the newest published facts, which readers poll.

A hint that is rebuilt from the seals: replaced atomically on every publish and as a heartbeat. It never names a chunk
whose seal is not durable. Lifetime: as long as the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from lazyshard.errors import HeadInvalid
from lazyshard.format.fields import FORMAT, MAX_CHUNKS, MAX_SAMPLES, Fields, encode
from lazyshard.format.names import HEAD

ProducerState = Literal["running", "waiting", "idle", "finished", "failed"]
"""running: rows are coming; waiting: held back (by its source, rate or a limit); idle: stopped in good order,
resumable; finished: the stream has ended; failed: stopped by an error, resumable."""

STATES: Final[tuple[ProducerState, ...]] = get_args(ProducerState)

_OPTIONAL: Final = ("note", "process", "open", "row_at")
"""Left out where they say nothing."""


@dataclass(frozen=True, slots=True)
class Head:
    """The newest published facts.

    Attributes:
        chunks: published chunks: those of the half-open range [0, chunks).
        samples: rows in them.
        ended: nothing will follow.
        state: what the producer is doing.
        rate: samples per second lately accepted, 0 where unknown.
        host: the producer's machine.
        pid: the producer's process there.
        updated_at: seconds since 1970, UTC, by the producer's clock.
        note: what it waits for, or why it has failed, in words; empty where it does not say.
        process: what tells its process from all others of the machine, to be compared; empty where it does not say.
        open: rows that it has taken since the last published one.
        row_at: when it was first seen to have as many, like `updated_at`; 0 where none has come since it started.
    """

    chunks: int
    samples: int
    ended: bool
    state: ProducerState
    rate: float
    host: str
    pid: int
    updated_at: float
    note: str = ""
    process: str = ""
    open: int = 0
    row_at: float = 0.0

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in _OPTIONAL or getattr(self, name)}
        return encode({"format": FORMAT} | values)

    @classmethod
    def decode(cls, data: bytes, file: str = HEAD) -> Head:
        """Reads the file's bytes.

        Raises:
            HeadInvalid: a field is missing or wrong.
            VersionUnsupported: a later format.
        """
        fields = Fields(data, file, HeadInvalid)
        chunks = fields.integer("chunks", 0, MAX_CHUNKS)
        samples = fields.integer("samples", 0, MAX_SAMPLES)
        if chunks == 0 and samples > 0:
            raise fields.refuse("samples", "0, as there is no chunk", str(samples))
        if samples < chunks:
            raise fields.refuse("samples", f"at least one for each of {chunks} chunks", str(samples))
        state = fields.text("state", STATES)
        return cls(
            chunks=chunks,
            samples=samples,
            ended=fields.boolean("ended"),
            state=next(known for known in STATES if known == state),
            rate=max(0.0, fields.number("rate")),
            host=fields.text("host"),
            pid=fields.integer("pid", 0, 2**31),
            updated_at=fields.number("updated_at"),
            note=fields.text("note") if "note" in fields.values else "",
            process=fields.text("process") if "process" in fields.values else "",
            open=fields.integer("open", 0, MAX_SAMPLES) if "open" in fields.values else 0,
            row_at=fields.number("row_at") if "row_at" in fields.values else 0.0,
        )
