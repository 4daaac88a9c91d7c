"""The producer of the model, in the order of the code (`test_model_code.py`). Contents: ("seal", chunk, end, full)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from lazyshard.format import records
from tests.harness.model.disk import Content, Disk, Step, folder_of

STREAM: Final = "stream"
TMP: Final = f"{STREAM}/{records.TEMPORARY}"
CURSORS: Final = f"{STREAM}/cursors"
CURSOR: Final = f"{CURSORS}/run.json"
Seen = Mapping[str, Content]


def at(name: str) -> str:
    return f"{STREAM}/{name}"


MANIFEST_PATH, HEAD_PATH, END_PATH, RETIRED_PATH = map(
    at, (records.MANIFEST, records.HEAD, records.END, records.RETIRED)
)


def data_path(chunk: int) -> str:
    return at(records.chunk_name(chunk))


def seal_path(chunk: int) -> str:
    return at(records.seal_name(chunk))


@dataclass(frozen=True)
class Plan:
    chunks: int = 2  # of the stream
    partial: bool = False  # whether the last one holds fewer rows than the others
    keeps: int = 1  # how many checkpoints the consumer keeps; the cursor stands at the oldest

    def seal(self, chunk: int, position: int) -> Content:
        return ("seal", chunk, position, not (self.partial and position == self.chunks))


class Listed(NamedTuple):
    mark: int  # those below it are retired
    seals: frozenset[int]  # chunks at or above it with a seal
    data: frozenset[int]  # chunks at or above it with rows
    below: tuple[str, ...]  # paths of what is there of retired chunks, seals first
    sealed: int  # chunks [mark, sealed) have a seal


class Broken(Exception):
    """Files that no reader, or no producer, can do anything with."""


def value_of(seen: Seen, path: str, kind: str) -> Content | None:
    value = seen.get(path)
    if value is not None and value[0] != kind:
        raise Broken(f"{path} is torn")
    return value


def list_stream(seen: Seen) -> Listed:
    retired = value_of(seen, RETIRED_PATH, "retired")
    mark = 0 if retired is None else retired[1]
    found = [chunk for path in seen if (chunk := records.parse_chunk_name(path.removeprefix(f"{STREAM}/"))) is not None]
    seals, data = (sorted(chunk for chunk, is_seal in found if is_seal == wanted) for wanted in (True, False))
    below = [seal_path(chunk) for chunk in seals if chunk < mark] + [data_path(chunk) for chunk in data if chunk < mark]
    sealed = mark
    while sealed in seals:
        sealed += 1
    kept = [frozenset(chunk for chunk in chunks if chunk >= mark) for chunks in (seals, data)]
    return Listed(mark, kept[0], kept[1], tuple(below), sealed)


def told(seen: Seen) -> tuple[int, bool] | None:
    """Returns what a reader is told now: how many chunks, and whether that is all. None where there is no stream."""
    if value_of(seen, MANIFEST_PATH, "manifest") is None:
        return None
    head = seen.get(HEAD_PATH)
    if head is not None and head[0] == "head":
        return head[1], head[2]
    listed = list_stream(seen)
    end = value_of(seen, END_PATH, "end")
    if end is not None:
        return end[1], True
    chunks = listed.mark
    while chunks in listed.seals and chunks in listed.data:
        chunks += 1
    if chunks > listed.mark:
        seal = value_of(seen, seal_path(chunks - 1), "seal")
        assert seal is not None
        chunks -= not seal[3]
    return chunks, False


RETIRED_DONE: Final = "retired"  # After ("look", published, token): refusals before it are survived
_TOKENS: Final = "abcdefgh"
_GONE: Final = ".gone"


class Producer:
    """What a producer does. A step is a call that changes files, or a look at them: open, recover, check, look."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def look(self, step: Step, disk: Disk, seen: Seen) -> list[list[Step]]:
        if step[0] in ("open", "recover"):
            return [self.opening(disk, seen) if step[0] == "open" else self.recovering(seen, step[1])]
        if step[0] == "check":
            if seal_path(step[1]) in seen:
                raise Broken(f"{seal_path(step[1])} is there: somebody else has published this chunk")
            return [[]]
        retiring = self.looking(seen, step[1], step[2])  # It looks at the consumers now and then only
        return [retiring, []] if retiring else [[]]

    # As `run.py`, `lock.py` and `publishing.py` have it.

    def opening(self, disk: Disk, seen: Seen) -> list[Step]:
        manifest = value_of(seen, MANIFEST_PATH, "manifest")
        end = None if manifest is None else value_of(seen, END_PATH, "end")
        if end is not None and seen.get(HEAD_PATH) == ("head", end[1], True) and TMP not in seen:
            return []
        listed = list_stream(seen)
        if manifest is None and (listed.seals or listed.data):
            raise Broken("there are chunks but no manifest, so somebody else made them")
        taken = list(disk.all_names())  # Of all names that there may be, since a power cut can bring any of them back
        token = next(one for one in _TOKENS if not any(name.startswith(self.workplace(one)) for name in taken))
        steps: list[Step] = [("mkdir", path) for path in (STREAM, TMP) if path not in seen]
        steps += [("mkdir", self.workplace(token)), *self.destroying(seen), *self.taking(token)]
        if manifest is None:
            steps += self.creating(token)
        return [*steps, *self.before_recovering(), ("recover", token)]

    def workplace(self, token: str) -> str:
        return f"{TMP}/0.{token}"

    def destroying(self, seen: Seen) -> list[Step]:
        steps: list[Step] = []
        for path in sorted(path for path in seen if folder_of(path) == TMP):
            gone = path if path.endswith(_GONE) else path + _GONE
            steps += [("rename", path, gone)] if path != gone else []
            steps += [("remove", gone + one.removeprefix(path)) for one in sorted(seen) if folder_of(one) == path]
            steps.append(("rmdir", gone))
        return steps

    def taking(self, token: str) -> list[Step]:
        return self.durably(("owner",), records.OWNER, token)

    def creating(self, token: str) -> list[Step]:
        temporary = self.temporary_path(records.MANIFEST, token)
        return [
            ("sync_directory", ""),
            *self.durably(("manifest",), records.MANIFEST, token)[:3],
            ("link", temporary, MANIFEST_PATH),
            ("sync_directory", STREAM),
            ("remove", temporary),
        ]

    def before_recovering(self) -> list[Step]:
        return [("sync_directory", STREAM)]

    def recovering(self, seen: Seen, token: str) -> list[Step]:
        listed = list_stream(seen)
        newest = listed.sealed - 1
        if any(chunk >= listed.sealed for chunk in listed.seals):
            raise Broken(f"a gap: {seal_path(listed.sealed)} is missing")
        if listed.sealed == listed.mark > 0:
            raise Broken(f"{seal_path(listed.mark)} is missing, the first that was not deleted")
        if lost := [chunk for chunk in range(listed.mark, listed.sealed) if chunk not in listed.data]:
            raise Broken(f"{data_path(lost[0])} is sealed, but missing")
        if newest >= listed.mark and seen[data_path(newest)][0] == "short":
            raise Broken(f"{data_path(newest)} has another length than sealed")
        last = value_of(seen, seal_path(newest), "seal") if newest >= listed.mark else None
        end = value_of(seen, END_PATH, "end")
        if end is not None and end[1] != listed.sealed:
            raise Broken(f"{END_PATH} says {end[1]} chunks, the seals say {listed.sealed}")
        steps = [*self.clearing(seen, listed, token), *self.completing_retirement(listed)]
        closing = last is not None and not last[3] and end is None
        if closing:
            steps += self.durably(("end", listed.sealed), records.END, token)
        if closing or end is not None:
            # The rename of a head that tells the end is durable: the folder was synced before this.
            told = seen.get(HEAD_PATH) == ("head", listed.sealed, True)
            return [*steps, *(self.leaving(token) if told else self.finishing(listed.sealed, token))]
        return steps + self.going_on(*self.start(seen, listed, last), token)

    def start(self, seen: Seen, listed: Listed, last: Content | None) -> tuple[int, int]:
        return listed.sealed, 0 if last is None else last[2]

    def clearing(self, seen: Seen, listed: Listed, token: str) -> list[Step]:
        steps: list[Step] = []
        for chunk in sorted(listed.data - listed.seals):
            taken_out = self.temporary_path(records.chunk_name(chunk), token)
            steps += [("rename", data_path(chunk), taken_out), ("remove", taken_out)]
        return steps

    def completing_retirement(self, listed: Listed) -> list[Step]:
        steps: list[Step] = [("remove", path) for path in listed.below]
        return [*steps, ("sync_directory", STREAM)] if steps else []

    def going_on(self, chunk: int, position: int, token: str) -> list[Step]:
        steps = self.hint(("head", chunk, False), records.HEAD, token)
        for piece in range(position, self.plan.chunks):
            steps.append(("look", chunk, token))
            steps += self.publishing(chunk, piece, token)
            chunk += 1
            full = self.plan.seal(chunk - 1, piece + 1)[3]
            if full:
                steps += self.telling(chunk, token)
            if full and piece + 1 == self.plan.chunks:
                steps.append(("look", chunk, token))
        return [*steps, *self.durably(("end", chunk), records.END, token), *self.finishing(chunk, token)]

    def publishing(self, chunk: int, piece: int, token: str) -> list[Step]:
        return [*self.publishing_rows(chunk, piece, token), *self.sealing(chunk, piece, token)]

    def publishing_rows(self, chunk: int, piece: int, token: str) -> list[Step]:
        steps = self.durably(("rows", piece), records.chunk_name(chunk), token)
        return [*steps[:3], ("check", chunk), *steps[3:]]

    def sealing(self, chunk: int, piece: int, token: str) -> list[Step]:
        return self.durably(self.plan.seal(chunk, piece + 1), records.seal_name(chunk), token)

    def telling(self, chunks: int, token: str) -> list[Step]:
        return self.hint(("head", chunks, False), records.HEAD, token)

    def finishing(self, chunks: int, token: str) -> list[Step]:
        """Tells the readers that it has ended: for good, since nobody starts a producer again that has succeeded."""
        return [*self.durably(("head", chunks, True), records.HEAD, token), *self.leaving(token)]

    def leaving(self, token: str) -> list[Step]:
        return [("rmdir", self.workplace(token)), ("rmdir", TMP)]

    # As `holdback.py`, `retire.py` and `durable.py` have it.

    def looking(self, seen: Seen, published: int, token: str) -> list[Step]:
        """Returns how to delete what the consumer is done with; nothing where there is nothing to delete."""
        cursor = seen.get(CURSOR)
        done = cursor[1] if cursor is not None and cursor[0] == "cursor" and cursor[1] <= published else 0
        listed = list_stream(seen)
        target = max(listed.mark, self.deletable(done, published))
        first = listed.mark
        while first > 0 and (seal_path(first - 1) in seen or data_path(first - 1) in seen):
            first -= 1
        if first == target:
            return []
        return [*self.retiring(listed.mark, first, target, token), (RETIRED_DONE, published, token)]

    def deletable(self, done: int, published: int) -> int:
        """Returns before which chunk all may go; the newest one stays."""
        return min(done, published - 1)

    def retiring(self, mark: int, first: int, target: int, token: str) -> list[Step]:
        return [*self.marking(mark, target, token), *self.deleting(first, target), ("sync_directory", STREAM)]

    def marking(self, mark: int, target: int, token: str) -> list[Step]:
        if target > mark:
            return self.durably(("retired", target), records.RETIRED, token)
        return [("sync_directory", STREAM)]  # A mark that is there already may be one whose `fsync` has failed

    def deleting(self, first: int, target: int) -> list[Step]:
        return [("remove", path(chunk)) for chunk in range(first, target) for path in (seal_path, data_path)]

    def temporary_path(self, name: str, token: str) -> str:
        return f"{self.workplace(token)}/{name}"

    def durably(self, value: Content, name: str, token: str) -> list[Step]:
        """Makes a file appear, content and name on the device."""
        return _replacing(value, self.temporary_path(name, token), at(name), STREAM)

    def hint(self, value: Content, name: str, token: str) -> list[Step]:
        return [step for step in self.durably(value, name, token) if step[0] not in ("sync", "sync_directory")]


Kept = tuple[int, ...]  # Trained at each kept checkpoint, in order; from 0 a run can always start


class Consumer:
    """What a consumer does. Steps besides calls that change files: resume, commit, read, checkpoint, committed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def resuming(self, kept: Kept, seen: Seen) -> list[list[Step]]:
        """Returns what comes after a start: from any checkpoint that is kept. Nothing as long as there is no stream."""
        if told(seen) is None:
            return []
        return [[("commit", kept[0]), ("read", position)] for position in kept]

    def reading(self, position: int, kept: Kept, seen: Seen) -> list[Step] | None:
        """Returns what comes after a look for the next chunk; None: it is to be waited for."""
        found = told(seen)
        if found is None:
            return None
        chunks, ended = found
        if position < chunks:
            if not is_readable(seen, position):
                raise Broken(f"chunk {position}, of which it was told, cannot be read")
            return self.trained(position + 1, kept)
        return [] if ended else None

    def trained(self, position: int, kept: Kept) -> list[Step]:
        return [("checkpoint", position), *self.committing(self.keep(kept, position)), ("read", position)]

    def keep(self, kept: Kept, position: int) -> Kept:
        """Returns the checkpoints that are kept once another one is saved; later ones are those of another course."""
        return (*(one for one in kept if one < position), position)[-self.plan.keeps :]

    def committing(self, kept: Kept) -> list[Step]:
        return [("commit", kept[0])]

    def writing(self, done: int, disk: Disk, seen: Seen) -> list[Step]:
        taken = set(disk.all_names())
        temporary = next(path for path in (f"{CURSORS}/.run.{one}" for one in _TOKENS) if path not in taken)
        return [*self.making_folder(seen), *self.replacing(("cursor", done), temporary), ("committed", done)]

    def making_folder(self, seen: Seen) -> list[Step]:
        steps: list[Step] = [] if CURSORS in seen else [("mkdir", CURSORS)]
        return [*steps, ("sync_directory", STREAM)]

    def replacing(self, value: Content, temporary: str) -> list[Step]:
        return _replacing(value, temporary, CURSOR, CURSORS)


def _replacing(value: Content, temporary: str, path: str, folder: str) -> list[Step]:
    written: list[Step] = [("create", temporary), ("write", temporary, value), ("sync", temporary)]
    return [*written, ("rename", temporary, path), ("sync_directory", folder)]


def is_readable(seen: Seen, chunk: int) -> bool:
    sealed = seen.get(seal_path(chunk), ())[:3] == ("seal", chunk, chunk + 1)
    return sealed and seen.get(data_path(chunk)) == ("rows", chunk)
