"""Mistakes that the model must find: the protocol with one thing done otherwise, or as the code once did it."""

from dataclasses import dataclass
from typing import Any, Final

from lazyshard.format.records import RETIRED
from tests.harness.model import producer as model
from tests.harness.model.disk import Content, Step
from tests.harness.model.world import World

Who = type[model.Producer] | type[model.Consumer]


def _without(name: str, who: Who, method: str, kind: str) -> Any:
    original = getattr(who, method)

    def less(*arguments: Any) -> list[Step]:
        return [step for step in original(*arguments) if step[0] != kind]

    return type(name, (who,), {method: less})


def _nothing(name: str, who: Who, *methods: str) -> Any:
    return type(name, (who,), dict.fromkeys(methods, lambda *arguments: []))


class NoSyncAtRestart(model.Producer):
    """Believes what it sees at a restart. Making its owner durable would have synced the directory as well."""

    def taking(self, token: str) -> list[Step]:
        return self.hint(("owner",), "stream.owner", token)

    def before_recovering(self) -> list[Step]:
        return []


class HeadBeforeSeal(model.Producer):
    def publishing(self, chunk: int, piece: int, token: str) -> list[Step]:
        rows, seal = self.publishing_rows(chunk, piece, token), self.sealing(chunk, piece, token)
        return [*rows, *super().telling(chunk + 1, token), *seal]

    def telling(self, chunks: int, token: str) -> list[Step]:
        return []


class SealBeforeRows(model.Producer):
    def publishing(self, chunk: int, piece: int, token: str) -> list[Step]:
        return [*self.sealing(chunk, piece, token), *self.publishing_rows(chunk, piece, token)]


def _in_place(path: str, value: Content, folder: str = model.STREAM) -> list[Step]:
    return [("truncate", path), ("write", path, value), ("sync", path), ("sync_directory", folder)]


class SealInPlace(model.Producer):
    def sealing(self, chunk: int, piece: int, token: str) -> list[Step]:
        return _in_place(model.seal_path(chunk), self.plan.seal(chunk, piece + 1))


class EndBeforeLastChunk(model.Producer):
    def going_on(self, chunk: int, position: int, token: str) -> list[Step]:
        steps, last = super().going_on(chunk, position, token), self.plan.chunks - 1
        end = self.durably(("end", self.plan.chunks), "stream.end", token)
        rest = [step for step in steps if step not in end or step == ("sync_directory", model.STREAM)]
        first = self.publishing(last, last, token)[0]
        if position > last or first not in rest:
            return steps
        before = rest.index(first)
        return [*rest[:before], *end, *rest[before:]]


class TrustsHead(model.Producer):
    def start(self, seen: model.Seen, listed: model.Listed, last: Content | None) -> tuple[int, int]:
        head = seen.get(model.HEAD_PATH)
        known = head[1] if head is not None and head[0] == "head" else 0
        return known, known


class StateFile(model.Producer):  # Keeps the position in the source in a file of its own, written before the seal
    def publishing(self, chunk: int, piece: int, token: str) -> list[Step]:
        rows, seal = self.publishing_rows(chunk, piece, token), self.sealing(chunk, piece, token)
        return [*rows, *self.durably(("position", piece + 1), "position.json", token), *seal]

    def start(self, seen: model.Seen, listed: model.Listed, last: Content | None) -> tuple[int, int]:
        return listed.sealed, seen.get(model.at("position.json"), ("position", 0))[1]


class StateFileAfterSeal(StateFile):
    def publishing(self, chunk: int, piece: int, token: str) -> list[Step]:
        published = model.Producer.publishing(self, chunk, piece, token)
        return [*published, *self.durably(("position", piece + 1), "position.json", token)]


class KeepsUnsealedTail(model.Producer):
    """Writes rows under their own name, and takes what is there at a restart for published."""

    def publishing_rows(self, chunk: int, piece: int, token: str) -> list[Step]:
        return _in_place(model.data_path(chunk), ("rows", piece))

    def clearing(self, seen: model.Seen, listed: model.Listed, token: str) -> list[Step]:
        return []

    def start(self, seen: model.Seen, listed: model.Listed, last: Content | None) -> tuple[int, int]:
        chunk, position = super().start(seen, listed, last)
        return (chunk + 1, position + 1) if chunk in listed.data else (chunk, position)


class ParentNotSynced(model.Producer):
    def creating(self, token: str) -> list[Step]:
        return [step for step in super().creating(token) if step != ("sync_directory", "")]


class EndIsAHint(model.Producer):
    """Leaves it to the system when the head that tells of the end reaches the device, as the code once did."""

    def finishing(self, chunks: int, token: str) -> list[Step]:
        return [*self.hint(("head", chunks, True), "head.json", token), *self.leaving(token)]


class DeletesBeforeMark(model.Producer):
    def retiring(self, mark: int, first: int, target: int, token: str) -> list[Step]:
        return [*self.deleting(first, target), ("sync_directory", model.STREAM), *self.marking(mark, target, token)]


class MarkIsAHint(model.Producer):
    def marking(self, mark: int, target: int, token: str) -> list[Step]:
        return self.hint(("retired", target), RETIRED, token) if target > mark else []


class BelievesMark(model.Producer):
    """Believes a mark that an earlier call, which has failed, may have left undurable, as the code once did."""

    def marking(self, mark: int, target: int, token: str) -> list[Step]:
        return super().marking(mark, target, token) if target > mark else []


class DeletesNewest(model.Producer):
    def deletable(self, done: int, published: int) -> int:
        return min(done, published)


class DeletesOneMore(model.Producer):
    def deletable(self, done: int, published: int) -> int:
        return min(done + 1, published - 1) if done else 0


class UnlinkOnce(model.Producer):  # Removes what is retired and fails where it is not there, instead of what is there
    def completing_retirement(self, listed: model.Listed) -> list[Step]:
        paths = [path(chunk) for chunk in range(listed.mark) for path in (model.seal_path, model.data_path)]
        return [*(("unlink", path) for path in paths), ("sync_directory", model.STREAM)] if listed.below else []


class AcknowledgesOnRead(model.Consumer):
    def trained(self, position: int, kept: model.Kept) -> list[Step]:
        return [("commit", position), *super().trained(position, kept)]


class CommitsBeforeCheckpoint(model.Consumer):
    def trained(self, position: int, kept: model.Kept) -> list[Step]:
        return [*self.committing(self.keep(kept, position)), ("checkpoint", position), ("read", position)]


class CommitsNewest(model.Consumer):
    def committing(self, kept: model.Kept) -> list[Step]:
        return [("commit", kept[-1])]


class CursorInPlace(model.Consumer):
    def replacing(self, value: Content, temporary: str) -> list[Step]:
        return _in_place(model.CURSOR, value, model.STREAM + "/cursors")


class CursorFolderSyncedByMaker(model.Consumer):
    """Leaves it to who has made the folder, and may have been killed, to make its name durable."""

    def making_folder(self, seen: model.Seen) -> list[Step]:
        steps = super().making_folder(seen)
        return steps if len(steps) > 1 else []


_ONE: Final = model.Plan(1)


@dataclass(frozen=True)
class Mutant:
    who: Who  # the process that makes the mistake
    finds: str  # part of what the model says of it
    kinds: tuple[str, ...] = ("power cut",)  # the faults that it takes to see it, in this order
    plan: model.Plan = _ONE  # the smallest plan with which it is seen

    @property
    def name(self) -> str:
        return self.who.__name__

    def world(self, *, any_faults: bool = False) -> World:
        kinds = None if any_faults else self.kinds
        if issubclass(self.who, model.Producer):
            return World(self.plan, producer=self.who(self.plan), kinds=kinds)
        return World(self.plan, consumer=self.who(self.plan), kinds=kinds)


_KILL: Final = ("kill",)
_BOTH: Final = ("kill", "power cut")
_TWO: Final = model.Plan(2)
_SEALED: Final = "chunk 0 is sealed with ('seal', 0, 1, True) and holds "
_EARLY: Final = "chunks before 1 are retired, a run may continue from chunk 0"

MUTANTS: Final = (
    Mutant(_without("RowsNotSynced", model.Producer, "publishing_rows", "sync"), f"{_SEALED}('short',)"),
    Mutant(_without("SealNotSynced", model.Producer, "sealing", "sync"), "chunk 0 is sealed with ('short',)"),
    Mutant(_without("RowsNameNotSynced", model.Producer, "publishing_rows", "sync_directory"), f"{_SEALED}None"),
    Mutant(_without("SealNameNotSynced", model.Producer, "sealing", "sync_directory"), "of 1 chunks, sealed are 0"),
    Mutant(NoSyncAtRestart, "there are chunks but no manifest", _BOTH),
    Mutant(HeadBeforeSeal, "of 1 chunks, sealed are 0", ()),
    Mutant(SealBeforeRows, f"{_SEALED}None", ()),
    Mutant(SealInPlace, "chunk 0 is sealed with ('short',)", ()),
    Mutant(EndBeforeLastChunk, "stream.end says 1 chunks, sealed are 0", ()),
    Mutant(TrustsHead, "somebody else has published this chunk", _KILL),
    Mutant(StateFile, "the producer has ended the stream, sealed are 0 chunks of 1", _KILL),
    Mutant(StateFileAfterSeal, "chunk 1 is sealed with ('seal', 1, 1, True) and holds ('rows', 0)", _KILL),
    Mutant(KeepsUnsealedTail, "of 1 chunks, sealed are 0", _KILL),
    Mutant(_nothing("NothingCleared", model.Producer, "clearing", "destroying"), "stream/.tmp is there", _KILL),
    Mutant(ParentNotSynced, "the cursor may say"),
    Mutant(EndIsAHint, "the consumer waits for ever"),
    Mutant(DeletesBeforeMark, "a gap: chunk 1 is sealed, chunk 0 is not", (), _TWO),
    Mutant(MarkIsAHint, "a reader dies: stream/retired.json is torn", plan=_TWO),
    Mutant(BelievesMark, "a gap: chunk 1 is sealed, chunk 0 is not", ("refuse", "power cut"), _TWO),
    Mutant(DeletesNewest, "the newest chunk, 0, is retired", ()),
    Mutant(DeletesOneMore, "chunks before 2 are retired, a run may continue from chunk 1", (), model.Plan(3)),
    Mutant(UnlinkOnce, "is not there", _KILL, _TWO),
    Mutant(_nothing("RetirementNotCompleted", model.Producer, "completing_retirement"), "left over are", _KILL, _TWO),
    Mutant(AcknowledgesOnRead, _EARLY, (), _TWO),
    Mutant(CommitsBeforeCheckpoint, _EARLY, (), _TWO),
    Mutant(CommitsNewest, _EARLY, (), model.Plan(2, keeps=2)),
    Mutant(CursorInPlace, "stream/cursors/run.json is torn", ()),
    Mutant(_without("CursorNotSynced", model.Consumer, "replacing", "sync"), "stream/cursors/run.json is torn"),
    Mutant(_without("CursorNameNotSynced", model.Consumer, "replacing", "sync_directory"), "the cursor may say"),
    Mutant(_without("CursorFolderNotSynced", model.Consumer, "making_folder", "sync_directory"), "the cursor may say"),
    Mutant(CursorFolderSyncedByMaker, "the cursor may say", _BOTH),
)
