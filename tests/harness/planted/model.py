"""Mistakes that the model must find: each is the protocol with one thing done otherwise. Some are what looks harmless,
or what the code once did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lazyshard.format.names import RETIRED
from tests.harness.model.disk import Content, Step
from tests.harness.model.producer import Consumer, Kept, Producer
from tests.harness.model.stream import CURSOR, HEAD_PATH, STREAM, Listed, Plan, Seen, at, data_path, seal_path
from tests.harness.model.world import World


def _without(steps: list[Step], kind: str) -> list[Step]:
    return [step for step in steps if step[0] != kind]


class RowsNotSynced(Producer):
    def publishing_rows(self, chunk: int, piece: int, token: str) -> list[Step]:
        return _without(super().publishing_rows(chunk, piece, token), "sync")


class SealNotSynced(Producer):
    def sealing(self, chunk: int, piece: int, token: str) -> list[Step]:
        return _without(super().sealing(chunk, piece, token), "sync")


class RowsNameNotSynced(Producer):
    def publishing_rows(self, chunk: int, piece: int, token: str) -> list[Step]:
        return _without(super().publishing_rows(chunk, piece, token), "sync_directory")


class SealNameNotSynced(Producer):
    def sealing(self, chunk: int, piece: int, token: str) -> list[Step]:
        return _without(super().sealing(chunk, piece, token), "sync_directory")


class NoSyncAtRestart(Producer):
    """Believes what it sees at a restart. Making its owner durable would have synced the directory as well."""

    def taking(self, token: str) -> list[Step]:
        return self.hint(("owner",), "stream.owner", token)

    def before_recovering(self) -> list[Step]:
        return []


class HeadBeforeSeal(Producer):
    def publishing(self, chunk: int, piece: int, token: str) -> list[Step]:
        rows, seal = self.publishing_rows(chunk, piece, token), self.sealing(chunk, piece, token)
        return [*rows, *super().telling(chunk + 1, token), *seal]

    def telling(self, chunks: int, token: str) -> list[Step]:
        return []


class SealBeforeRows(Producer):
    def publishing(self, chunk: int, piece: int, token: str) -> list[Step]:
        return [*self.sealing(chunk, piece, token), *self.publishing_rows(chunk, piece, token)]


class SealInPlace(Producer):
    def sealing(self, chunk: int, piece: int, token: str) -> list[Step]:
        path = seal_path(chunk)
        value = self.plan.seal(chunk, piece + 1)
        return [("truncate", path), ("write", path, value), ("sync", path), ("sync_directory", STREAM)]


class EndBeforeLastChunk(Producer):
    def going_on(self, chunk: int, position: int, token: str) -> list[Step]:
        if position == self.plan.chunks:
            return super().going_on(chunk, position, token)
        steps = super().going_on(chunk, position, token)
        end = self.durably(("end", self.plan.chunks), "stream.end", token)
        rest = [step for step in steps if step not in end or step == ("sync_directory", STREAM)]
        last = self.publishing(self.plan.chunks - 1, self.plan.chunks - 1, token)
        if last[0] not in rest:
            return steps
        before = rest.index(last[0])
        return [*rest[:before], *end, *rest[before:]]


class TrustsHead(Producer):
    def start(self, seen: Seen, listed: Listed, last: Content | None) -> tuple[int, int]:
        head = seen.get(HEAD_PATH)
        known = head[1] if head is not None and head[0] == "head" else 0
        return known, known


class StateFile(Producer):
    """Keeps the position in the source in a file of its own, written before the seal."""

    _PATH: Final = at("position.json")

    def publishing(self, chunk: int, piece: int, token: str) -> list[Step]:
        rows, seal = self.publishing_rows(chunk, piece, token), self.sealing(chunk, piece, token)
        return [*rows, *self.durably(("position", piece + 1), "position.json", token), *seal]

    def start(self, seen: Seen, listed: Listed, last: Content | None) -> tuple[int, int]:
        position = seen.get(self._PATH, ("position", 0))
        return listed.sealed, position[1]


class StateFileAfterSeal(StateFile):
    def publishing(self, chunk: int, piece: int, token: str) -> list[Step]:
        rows, seal = self.publishing_rows(chunk, piece, token), self.sealing(chunk, piece, token)
        return [*rows, *seal, *self.durably(("position", piece + 1), "position.json", token)]


class KeepsUnsealedTail(Producer):
    """Writes rows under their own name, and takes what is there at a restart for published."""

    def publishing_rows(self, chunk: int, piece: int, token: str) -> list[Step]:
        path = data_path(chunk)
        return [("truncate", path), ("write", path, ("rows", piece)), ("sync", path), ("sync_directory", STREAM)]

    def clearing(self, seen: Seen, listed: Listed, token: str) -> list[Step]:
        return []

    def start(self, seen: Seen, listed: Listed, last: Content | None) -> tuple[int, int]:
        chunk, position = super().start(seen, listed, last)
        return (chunk + 1, position + 1) if chunk in listed.data else (chunk, position)


class NothingCleared(Producer):
    def clearing(self, seen: Seen, listed: Listed, token: str) -> list[Step]:
        return []

    def destroying(self, seen: Seen) -> list[Step]:
        return []


class ParentNotSynced(Producer):
    def creating(self, token: str) -> list[Step]:
        return [step for step in super().creating(token) if step != ("sync_directory", "")]


class EndIsAHint(Producer):
    """Leaves it to the system when the head that tells of the end reaches the device, as the code once did."""

    def finishing(self, chunks: int, token: str) -> list[Step]:
        return [*self.hint(("head", chunks, True), "head.json", token), *self.leaving(token)]


class DeletesBeforeMark(Producer):
    def retiring(self, mark: int, first: int, target: int, token: str) -> list[Step]:
        return [*self.deleting(first, target), ("sync_directory", STREAM), *self.marking(mark, target, token)]


class MarkIsAHint(Producer):
    def marking(self, mark: int, target: int, token: str) -> list[Step]:
        return self.hint(("retired", target), RETIRED, token) if target > mark else []


class BelievesMark(Producer):
    """Believes a mark that an earlier call, which has failed, may have left undurable, as the code once did."""

    def marking(self, mark: int, target: int, token: str) -> list[Step]:
        return super().marking(mark, target, token) if target > mark else []


class DeletesNewest(Producer):
    def deletable(self, done: int, published: int) -> int:
        return min(done, published)


class DeletesOneMore(Producer):
    def deletable(self, done: int, published: int) -> int:
        return min(done + 1, published - 1) if done else 0


class UnlinkOnce(Producer):
    """Removes what is retired and fails where it is not there, instead of what is there."""

    def completing_retirement(self, listed: Listed) -> list[Step]:
        if not listed.below:
            return []
        chunks = range(listed.mark)
        steps: list[Step] = [("unlink", path(chunk)) for chunk in chunks for path in (seal_path, data_path)]
        return [*steps, ("sync_directory", STREAM)]


class RetirementNotCompleted(Producer):
    def completing_retirement(self, listed: Listed) -> list[Step]:
        return []


class AcknowledgesOnRead(Consumer):
    def trained(self, position: int, kept: Kept) -> list[Step]:
        return [("commit", position), *super().trained(position, kept)]


class CommitsBeforeCheckpoint(Consumer):
    def trained(self, position: int, kept: Kept) -> list[Step]:
        return [*self.committing(self.keep(kept, position)), ("checkpoint", position), ("read", position)]


class CommitsNewest(Consumer):
    def committing(self, kept: Kept) -> list[Step]:
        return [("commit", kept[-1])]


class CursorInPlace(Consumer):
    def replacing(self, value: Content, temporary: str) -> list[Step]:
        return [
            ("truncate", CURSOR),
            ("write", CURSOR, value),
            ("sync", CURSOR),
            ("sync_directory", STREAM + "/cursors"),
        ]


class CursorNotSynced(Consumer):
    def replacing(self, value: Content, temporary: str) -> list[Step]:
        return _without(super().replacing(value, temporary), "sync")


class CursorNameNotSynced(Consumer):
    def replacing(self, value: Content, temporary: str) -> list[Step]:
        return _without(super().replacing(value, temporary), "sync_directory")


class CursorFolderNotSynced(Consumer):
    def making_folder(self, seen: Seen) -> list[Step]:
        return _without(super().making_folder(seen), "sync_directory")


class CursorFolderSyncedByMaker(Consumer):
    """Leaves it to who has made the folder, and may have been killed, to make its name durable."""

    def making_folder(self, seen: Seen) -> list[Step]:
        steps = super().making_folder(seen)
        return steps if len(steps) > 1 else []


_ONE: Final = Plan(1)


@dataclass(frozen=True)
class Mutant:
    who: type[Producer] | type[Consumer]  # the process that makes it
    finds: str  # part of what the model says of it
    kinds: tuple[str, ...] = ("power cut",)  # the faults that it takes to see it, one of each; () if it is seen without
    plan: Plan = _ONE  # the smallest plan with which it is seen

    @property
    def name(self) -> str:
        """How it is called."""
        return self.who.__name__

    def world(self) -> World:
        """Returns the world with this mistake."""
        if issubclass(self.who, Producer):
            return World(self.plan, producer=self.who(self.plan), kinds=self.kinds)
        return World(self.plan, consumer=self.who(self.plan), kinds=self.kinds)


_KILL: Final = ("kill",)
_BOTH: Final = ("kill", "power cut")
_TWO: Final = Plan(2)

MUTANTS: Final = (
    Mutant(RowsNotSynced, "chunk 0 is sealed with ('seal', 0, 1, True) and holds ('short',)"),
    Mutant(SealNotSynced, "chunk 0 is sealed with ('short',)"),
    Mutant(RowsNameNotSynced, "chunk 0 is sealed with ('seal', 0, 1, True) and holds None"),
    Mutant(SealNameNotSynced, "readers are told of 1 chunks, sealed are 0"),
    Mutant(NoSyncAtRestart, "there are chunks but no manifest", _BOTH),
    Mutant(HeadBeforeSeal, "readers are told of 1 chunks, sealed are 0", ()),
    Mutant(SealBeforeRows, "chunk 0 is sealed with ('seal', 0, 1, True) and holds None", ()),
    Mutant(SealInPlace, "chunk 0 is sealed with ('short',)", ()),
    Mutant(EndBeforeLastChunk, "stream.end says 1 chunks, sealed are 0", ()),
    Mutant(TrustsHead, "somebody else has published this chunk", _KILL),
    Mutant(StateFile, "the producer has ended the stream, sealed are 0 chunks of 1", _KILL),
    Mutant(StateFileAfterSeal, "chunk 1 is sealed with ('seal', 1, 1, True) and holds ('rows', 0)", _KILL),
    Mutant(KeepsUnsealedTail, "told of 1 chunks, sealed are 0", _KILL),
    Mutant(NothingCleared, "the stream has ended, stream/.tmp is there", _KILL),
    Mutant(ParentNotSynced, "the cursor may say"),
    Mutant(EndIsAHint, "the consumer waits for ever"),
    Mutant(DeletesBeforeMark, "a gap: chunk 1 is sealed, chunk 0 is not", (), _TWO),
    Mutant(MarkIsAHint, "a reader dies: stream/retired.json is torn", plan=_TWO),
    Mutant(BelievesMark, "a gap: chunk 1 is sealed, chunk 0 is not", ("refuse", "power cut"), _TWO),
    Mutant(DeletesNewest, "the newest chunk, 0, is retired", ()),
    Mutant(DeletesOneMore, "chunks before 2 are retired, a run may go on from chunk 1", (), Plan(3)),
    Mutant(UnlinkOnce, "is not there", _KILL, _TWO),
    Mutant(RetirementNotCompleted, "left over are stream/chunk_00000.jsonl.completed", _KILL, _TWO),
    Mutant(AcknowledgesOnRead, "chunks before 1 are retired, a run may go on from chunk 0", (), _TWO),
    Mutant(CommitsBeforeCheckpoint, "chunks before 1 are retired, a run may go on from chunk 0", (), _TWO),
    Mutant(CommitsNewest, "chunks before 1 are retired, a run may go on from chunk 0", (), Plan(2, keeps=2)),
    Mutant(CursorInPlace, "stream/cursors/run.json is torn", ()),
    Mutant(CursorNotSynced, "stream/cursors/run.json is torn"),
    Mutant(CursorNameNotSynced, "the cursor may say"),
    Mutant(CursorFolderNotSynced, "the cursor may say"),
    Mutant(CursorFolderSyncedByMaker, "the cursor may say", _BOTH),
)
