"""Mistakes of the sequencer and of named writers, of which crash points, overtaking and random runs must find each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.format.records import chunk_name, seal_name
from lazyshard.format.writers import WRITERS
from lazyshard.stream import lock
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.sequencer import Sequencer
from lazyshard.stream.writer import ChunkWriter
from tests.harness.many.points import Mutant, Work, both, sequence
from tests.harness.planted.planting import around, everywhere


def committed_twice() -> None:
    """A seal tells of the chunks before it alone: a sequencer that takes over publishes its piece again."""

    def source(original: Any, self: Sequencer, rows: list[Any]) -> Any:
        told, chunk = original(self, rows)
        before = {one.name: [one.taken, one.chunk] for one in self.members.values()}
        return told | {"writers": {name: before[name] for name in told["writers"]}}, chunk

    around(Sequencer, "_source", source)


def remainder_forgotten() -> None:
    """A sequencer that takes over ends the stream without the remainders that fill no chunk."""
    taken_over: list[bool] = []

    def begin(original: Any, self: Sequencer, writer: ChunkWriter, *given: Any) -> None:
        taken_over.append(writer.source is not None)
        original(self, writer, *given)

    around(Sequencer, "__init__", begin)
    around(Sequencer, "_end", lambda end, self, rests: end(self, [] if taken_over[-1] else rests))


def piece_number_used_again() -> None:
    """A writer that starts again gives its next piece the number of its last one."""
    original = lock.recover

    def recover(directory: Path, *given: Any) -> Any:
        found, last = original(directory, *given)
        if last is None or directory.parent.name != WRITERS or found.ended:
            return found, last
        for name in (seal_name(last.chunk), chunk_name(last.chunk)):
            (directory / name).unlink()
        return found._replace(chunks=last.chunk, samples=found.samples - last.samples), last

    everywhere(original, recover)


def taken_over_without_fencing() -> None:
    lock.destroy = lambda directory: None
    WriterLock.check = lambda self, *, closely=False: None  # type: ignore[method-assign]


class Planted(NamedTuple):
    install: Mutant
    work: Work  # what is killed

    @property
    def name(self) -> str:
        return self.install.__name__


_ALL: Final = (
    Planted(committed_twice, sequence),
    Planted(remainder_forgotten, sequence),
    Planted(piece_number_used_again, both),
)
MUTANTS: Final = {one.name: one for one in _ALL}  # To be found by kills

OVERTAKING: Final[dict[str, Callable[[], None]]] = {"taken_over_without_fencing": taken_over_without_fencing}
"""To be found by two sequencers of which each is stopped anywhere."""
