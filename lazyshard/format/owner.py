"""The owner, `stream.owner`: which producer may publish.

Every producer that opens a stream raises the epoch and writes its own name here; before each publish it looks whether
the file still holds what it wrote. File locks do not hold across the mounts of every network filesystem, this does: one
that was stopped and has woken up finds a higher epoch and gives up. Lifetime: as long as the stream; replaced at every
start of a producer.

That look and the publish are two steps: nothing comes in between, see `lazyshard.stream.lock`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazyshard.errors import OwnerInvalid
from lazyshard.format.fields import FORMAT, Fields, encode, printable
from lazyshard.format.names import OWNER


@dataclass(frozen=True, slots=True)
class Owner:
    """A producer and its turn.

    Attributes:
        epoch: grows with each producer that opens the stream, from 1.
        token: hexadecimal digits chosen at random at this start, so that no two are ever equal.
        host: its machine.
        pid: its process there.
        since: seconds since 1970, UTC, by its clock.
    """

    epoch: int
    token: str
    host: str
    pid: int
    since: float

    def __str__(self) -> str:
        """Names the holder for a message."""
        return f"process {self.pid} on {printable(self.host)}"

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        return encode({"format": FORMAT} | {name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def decode(cls, data: bytes, file: str = OWNER) -> Owner:
        """Reads the file's bytes.

        Raises:
            OwnerInvalid: a field is missing or wrong.
            VersionUnsupported: a later format.
        """
        fields = Fields(data, file, OwnerInvalid)
        return cls(
            epoch=fields.integer("epoch", 1, 2**62),
            token=fields.text("token"),
            host=fields.text("host"),
            pid=fields.integer("pid", 0, 2**31),
            since=fields.number("since"),
        )
