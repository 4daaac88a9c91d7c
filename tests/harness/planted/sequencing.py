"""Mistakes that the model of writers and sequencers must find; some are the code as it once was."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.harness.model.disk import Step
from tests.harness.model.producer import END_PATH, STREAM, Seen, at
from tests.harness.model.sequencing import (
    NAMES,
    NOTHING,
    Plan,
    Rows,
    Sequencer,
    Taken,
    Turn,
    Writer,
    durably,
    listed,
    own,
    published,
    seal_of,
)
from tests.harness.model.sequencing_world import World

_POSITION: Final = at("position.json")


class CommitsTwice(Sequencer):  # Keeps its position in a file beside the seals
    def sealing(self, turn: Turn, rows: Rows) -> list[Step]:
        kept = durably(("position", turn.after(rows).taken), _POSITION, turn.place)
        return [*super().sealing(turn, rows), *kept]

    def start(self, seen: Seen, sealed: int) -> Taken:
        taken: Taken = seen.get(_POSITION, ("", NOTHING))[1]
        return taken


class ForgetsRemainders(Sequencer):
    def rests(self, turn: Turn) -> list[str]:
        return []


class EndsWithoutUnreadable(Sequencer):  # As the code once did: a remainder that cannot be read is left out
    def after_pieces(self, seen: Seen, turn: Turn, *, refused: bool) -> list[list[Step]] | None:
        rests = self.rests(turn)
        if refused and rests and not turn.took and not self.fills(turn) and self.is_complete(turn, seen):
            return [self.ending_stream(turn, self.filling(turn, rests[1:]))]
        return super().after_pieces(seen, turn, refused=refused)


class TakesOverWithoutFencing(Sequencer):
    def destroying(self, others: object) -> list[Step]:
        return []


class SealsBeforeNamesAreDurable(Sequencer):
    def naming(self, turn: Turn, count: int) -> list[Step]:
        return [step for step in super().naming(turn, count) if step != ("sync_directory", STREAM)]


class TellsBeforeSealIsDurable(Sequencer):
    def sealing(self, turn: Turn, rows: Rows) -> list[Step]:
        *steps, sync = super().sealing(turn, rows)
        return [*steps, *self.committed(turn.after(rows)), sync]


class SyncsSealsTogether(Sequencer):  # One sync for all seals: after a power cut there may be a gap
    def publishing(self, rows_made: list[Step], turn: Turn, chunks: Sequence[Rows]) -> list[Step]:
        steps = super().publishing(rows_made, turn, chunks)
        last = max(number for number, step in enumerate(steps) if step == ("sync_directory", STREAM))
        first = steps.index(("sync_directory", STREAM))
        return [
            step for number, step in enumerate(steps) if step != ("sync_directory", STREAM) or number in (first, last)
        ]


class CountsRowsOfOpenChunk(Sequencer):  # As the code once did: a remainder counts before its chunk is published
    def publishing(self, rows_made: list[Step], turn: Turn, chunks: Sequence[Rows]) -> list[Step]:
        counted = turn._replace(taken=turn.after(chunks[-1][:-1]).taken)
        steps = super().publishing(rows_made, turn, chunks)
        return [("done", counted) if step == ("done", turn) else step for step in steps]


class TellsBeforeLastChunk(Sequencer):  # As the code once did
    def ending_stream(self, turn: Turn, rows: Rows) -> list[Step]:
        steps, told = super().ending_stream(turn, rows), self.committed(turn)
        return [*self.committed(turn._replace(taken=turn.after(rows).taken)), *steps[len(told) :]]


class BelievesEnd(Sequencer):  # As the code once did: nobody tells the readers if who ended the stream was killed
    def has_ended(self, seen: Seen) -> bool:
        return END_PATH in seen


class ReusesPieceNumbers(Writer):
    """Retires its newest piece as well; started again it finds none, and begins with the first number."""

    def deletable(self, done: int, sealed: int) -> int:
        return min(done, sealed)

    def known(self, seen: Seen) -> tuple[int, bool]:
        return published(seen, self.name)

    def look(self, step: Step, seen: Seen) -> list[list[Step]] | None:
        found = listed(seen, self.folder)
        if step[0] == "open" and found.sealed == found.mark > 0:
            return [[("remove", own(self.name, "retired.json")), ("begin",)]]
        return super().look(step, seen)

    def begun(self, seen: Seen) -> int:
        return 0


class RetiresWhenVisible(Writer):  # Looks at the seals, which may not be durable yet
    def told(self, seen: Seen) -> int:
        sealed = listed(seen, STREAM).sealed
        taken: int = seal_of(seen, STREAM, sealed - 1)[2][NAMES.index(self.name)][0] if sealed else 0
        return taken


@dataclass(frozen=True)
class Mutant:
    who: type[Sequencer] | type[Writer]  # the process that makes the mistake
    finds: str  # part of what the model says of it
    kinds: tuple[str, ...]  # the faults that it takes to see it, in this order
    plan: Plan

    @property
    def name(self) -> str:
        return self.who.__name__

    def world(self, *, any_faults: bool = False) -> World:
        kinds = None if any_faults else self.kinds
        if issubclass(self.who, Sequencer):
            return World(self.plan, sequencer=self.who, kinds=kinds)
        return World(self.plan, writer=self.who, kinds=kinds)


def _plan(*rows: int, size: int = 2, takeovers: int = 0) -> Plan:
    return Plan((rows[0], rows[1]), size, takeovers)


_TOLD: Final = "are told to be committed"
MUTANTS: Final = (
    Mutant(CommitsTwice, "chunk 1 holds row 0 of writer v after 2 rows of it", ("kill",), _plan(2, 0)),
    Mutant(RetiresWhenVisible, "pieces before 1 of writer v are retired", ("power cut",), _plan(3, 0, size=1)),
    Mutant(TakesOverWithoutFencing, "is sealed with", (), _plan(2, 0, takeovers=1)),
    Mutant(ForgetsRemainders, "ended without all rows", (), _plan(1, 0)),
    Mutant(EndsWithoutUnreadable, "ended without all rows", ("refuse",), _plan(1, 0)),
    Mutant(SealsBeforeNamesAreDurable, "is sealed with", ("power cut",), _plan(2, 0)),
    Mutant(SyncsSealsTogether, "a gap: chunk 0 is not sealed", ("power cut",), _plan(4, 0)),
    Mutant(TellsBeforeSealIsDurable, _TOLD, ("power cut",), _plan(2, 0)),
    Mutant(CountsRowsOfOpenChunk, _TOLD, ("refuse",), _plan(1, 1)),
    Mutant(TellsBeforeLastChunk, _TOLD, (), _plan(1, 0)),
    Mutant(BelievesEnd, "readers are not told", ("kill",), _plan(1, 0)),
    Mutant(ReusesPieceNumbers, "rows are in the stream, the writers' folders have", ("kill",), _plan(3, 0, size=1)),
)
