"""Writers, and two sequencers that take over from each other, in the order of the code (`test_model_writers.py`).

A piece appears in its writer's folder, and its end, in one durable step: how is proven by `producer.py`. All else is
call by call. Locks do not meet: each sequencer may open the stream at any time, which costs a takeover of the plan
while the other one runs. Each process may stop between any two calls for as long as it likes.

Contents: ("rows", ((writer, first, count), ...)), ("seal", chunk, taken, rows), ("committed", chunks, taken, refused),
with `taken` by writer (rows in the stream, last chunk with some); a piece's is ("seal", piece, rows after it).
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lazyshard.format import records
from lazyshard.format.writers import WRITERS, Committed, EndRequest
from tests.harness.model.disk import FOLDER, Content, Disk, Step, do, folder_of
from tests.harness.model.producer import END_PATH, HEAD_PATH, STREAM, TMP, Broken, Seen, at, value_of

SEQUENCERS: Final = ("a", "b")
NAMES: Final = ("v", "w")  # of the writers
OWNER: Final = at(records.OWNER)
COMMITTED: Final = at(f"{WRITERS}/{Committed.NAME}")
REQUEST: Final = at(f"{WRITERS}/{EndRequest.NAME}")
_GONE: Final = ".gone"
Taken = tuple[tuple[int, int], ...]
Rows = tuple[tuple[str, int, int], ...]
NOTHING: Final[Taken] = ((0, 0),) * len(NAMES)


@dataclass(frozen=True)
class Plan:
    rows: tuple[int, int] = (5, 1)  # of each writer
    size: int = 2  # rows of a chunk
    takeovers: int = 1  # how often a sequencer opens the stream while the other one runs
    request: bool = False  # whether the end is requested at some time
    most: int = 2  # pieces without a number after which a writer waits
    at_once: int = 1  # pieces that are committed and not retired when a writer retires
    together: int = 8  # pieces that a sequencer publishes at once

    def first(self) -> Disk:
        """Returns the disk with a stream that was created and has no rows."""
        disk = Disk()
        folders = [at(f"{WRITERS}/{name}{below}") for name in NAMES for below in ("", f"/{records.TEMPORARY}")]
        for path in (STREAM, at(WRITERS), *folders):
            disk = do(do(disk, ("mkdir", path)), ("sync_directory", folder_of(path)))
        return disk


def own(name: str, file: str) -> str:
    """Returns the path of a file of a writer's own stream."""
    return at(f"{WRITERS}/{name}/{file}")


class Listed(NamedTuple):
    mark: int  # chunks below it are retired
    sealed: int  # chunks [mark, sealed) have a seal
    beyond: bool  # whether there is a seal after a gap
    open: tuple[int, ...]  # chunks with rows and no seal
    below: tuple[str, ...]  # what is there of retired chunks, seals first


def listed(seen: Seen, folder: str) -> Listed:
    mark = (value_of(seen, f"{folder}/{records.RETIRED}", "retired") or ("", 0))[1]
    names = [path.removeprefix(f"{folder}/") for path in seen if folder_of(path) == folder]
    found = [parsed for name in names if (parsed := records.parse_chunk_name(name)) is not None]
    seals, data = ({chunk for chunk, is_seal in found if is_seal == wanted} for wanted in (True, False))
    sealed = mark
    while sealed in seals:
        sealed += 1
    below = [records.seal_name(one) for one in sorted(seals) if one < mark]
    below += [records.chunk_name(one) for one in sorted(data) if one < mark]
    unsealed = tuple(sorted(one for one in data - seals if one >= mark))
    return Listed(mark, sealed, max(seals, default=-1) >= sealed, unsealed, tuple(f"{folder}/{one}" for one in below))


def seal_of(seen: Seen, folder: str, chunk: int) -> Content:
    seal = value_of(seen, f"{folder}/{records.seal_name(chunk)}", "seal")
    if seal is None:
        raise Broken(f"the seal of {folder}/{chunk} is not there")
    return seal


def position(seen: Seen) -> tuple[int, Taken]:
    """Returns how many chunks a process is told of, and the position in the newest of these."""
    head = seen.get(HEAD_PATH)
    chunks = head[1] if head is not None and head[0] == "head" else listed(seen, STREAM).sealed
    return chunks, seal_of(seen, STREAM, chunks - 1)[2] if chunks else NOTHING


def published(seen: Seen, name: str) -> tuple[int, bool]:
    """Returns how many rows a writer has published, and whether it has ended."""
    folder, ended = folder_of(own(name, "")), own(name, records.END) in seen
    found = listed(seen, folder)
    if found.sealed > found.mark:
        return seal_of(seen, folder, found.sealed - 1)[2], ended
    return (value_of(seen, own(name, records.RETIRED), "retired") or ("", 0, 0))[2], ended


class Writer:
    """A writer, with its thread's part of the work left to the sequencers."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.name, self.folder = plan, name, folder_of(own(name, ""))
        self.total = plan.rows[NAMES.index(name)]

    def look(self, step: Step, seen: Seen) -> list[list[Step]] | None:
        """Returns what comes after a look; None: it waits."""
        kind = step[0]
        if kind == "open":
            if END_PATH in seen:
                return [[]]
            leftovers: list[Step] = [("remove", path) for path in listed(seen, self.folder).below]
            if leftovers:
                return [[*leftovers, ("sync_directory", self.folder), ("begin",)]]
        rows, ended = self.known(seen)
        if kind in ("open", "begin"):
            taken = self.begun(seen)
            if rows < taken:
                raise Broken(f"{taken} rows of writer {self.name} are in the stream, its folder has {rows}")
            return [[("finish", taken)] if ended else self.writing(rows, taken, 0)]
        taken = max(step[1], self.told(seen))
        if kind == "finish":
            return [[]] if taken >= rows - rows % self.plan.size or END_PATH in seen else None
        assert kind == "next", step
        if rows - taken >= self.plan.most * self.plan.size:
            return [[]] if END_PATH in seen else None
        done, retired, steps = taken // self.plan.size, step[2], list[Step]()
        if done - retired >= self.plan.at_once:
            steps, retired = self.retiring(seen, done), done
        count = min(self.plan.size, self.total - rows)
        publish = ("publish", rows // self.plan.size, ((self.name, rows, count),))
        return [[*steps, publish, *self.writing(rows + count, taken, retired)]]

    def known(self, seen: Seen) -> tuple[int, bool]:
        """Returns how many rows it has published, and whether it has ended."""
        found = listed(seen, self.folder)
        if found.sealed == found.mark > 0:
            raise Broken(f"the newest piece of {self.name} is retired, and with it its position")
        return published(seen, self.name)

    def begun(self, seen: Seen) -> int:
        """Returns how many of its rows are in the stream, at a start."""
        taken: int = position(seen)[1][NAMES.index(self.name)][0]
        return taken

    def told(self, seen: Seen) -> int:
        """Returns how many of its rows are in the stream, as the sequencer says."""
        found = seen.get(COMMITTED, ("",))
        taken: int = found[2][NAMES.index(self.name)][0] if found[0] == "committed" else 0
        return taken

    def writing(self, rows: int, taken: int, retired: int) -> list[Step]:
        return [("next", taken, retired)] if rows < self.total else [("end", rows), ("finish", taken)]

    def retiring(self, seen: Seen, done: int) -> list[Step]:
        found = listed(seen, self.folder)
        target = max(found.mark, self.deletable(done, found.sealed))
        if target == found.mark:
            return []
        retired, temporary = own(self.name, records.RETIRED), own(self.name, records.TEMPORARY)
        steps = durably(("retired", target, target * self.plan.size), retired, temporary)
        for piece in range(found.mark, target):
            steps += [("remove", own(self.name, name(piece))) for name in (records.seal_name, records.chunk_name)]
        return [*steps, ("sync_directory", self.folder)]

    def deletable(self, done: int, sealed: int) -> int:
        """Returns before which piece all may go; the newest one stays."""
        return min(done, sealed - 1)

    def at_once(self, step: Step) -> list[Step]:
        """Returns the calls of a step that is proven by the model of a producer: it is durable when it is seen."""
        if step[0] == "end":
            made: list[tuple[str, Content]] = [(own(self.name, records.END), ("end", step[1]))]
        else:
            _, piece, rows = step
            end = rows[0][1] + rows[0][2]
            made = [(own(self.name, records.chunk_name(piece)), ("rows", rows))]
            made.append((own(self.name, records.seal_name(piece)), ("seal", piece, end)))
        steps = [one for path, value in made for one in (("create", path), ("write", path, value), ("sync", path))]
        return [*steps, ("sync_directory", self.folder)]


def durably(value: Content, path: str, place: str) -> list[Step]:
    """Makes a file appear, content and name on the device."""
    temporary = f"{place}/{path.rpartition('/')[2]}"
    written: list[Step] = [("create", temporary), ("write", temporary, value), ("sync", temporary)]
    return [*written, ("rename", temporary, path), ("sync_directory", folder_of(path))]


def hint(value: Content, path: str, place: str) -> list[Step]:
    return [step for step in durably(value, path, place) if step[0] not in ("sync", "sync_directory")]


class Turn(NamedTuple):
    """What a sequencer remembers while it publishes."""

    place: str  # its workplace
    chunk: int = -1  # published chunks; below 0 there is nothing to tell when it leaves
    taken: Taken = NOTHING
    seen: tuple[tuple[int, bool], ...] = ()  # by writer: rows published and whether it has ended, at the turn's start
    todo: tuple[str, ...] = ()  # whose pieces this turn has still to read
    pieces: tuple[Rows, ...] = ()  # of the pieces that it has read: they are published together
    took: bool = False  # whether this turn has published a chunk
    trouble: frozenset[str] = frozenset()  # writers that are set aside

    def left(self, name: str) -> int:
        number = NAMES.index(name)
        return self.seen[number][0] - self.taken[number][0]

    def kept(self) -> "Turn":
        """Returns what it remembers between two turns."""
        return Turn(self.place, self.chunk, self.taken)

    def after(self, rows: Rows) -> "Turn":
        """Returns it after a chunk of these rows."""
        taken = list(self.taken)
        for name, first, count in rows:
            taken[NAMES.index(name)] = first + count, self.chunk
        return self._replace(chunk=self.chunk + 1, taken=tuple(taken), took=True)

    def after_all(self, chunks: Sequence[Rows]) -> "Turn":
        """Returns it after these chunks."""
        return functools.reduce(Turn.after, chunks, self)


class Sequencer:
    """What a sequencer does. Steps besides calls: looks, "check" of the lock, "try" of a call that may fail, and
    ("done", turn), which is what it leaves with if a step before it fails."""

    def __init__(self, plan: Plan, who: str) -> None:
        self.plan, self.who = plan, who

    def look(self, step: Step, seen: Seen, *, refused: bool = False) -> list[list[Step]] | None:
        """Returns what comes after a look; None: it waits. `refused`: what it reads of a piece cannot be read."""
        if step[0] == "open":
            epoch = (value_of(seen, OWNER, "owner") or ("", 0))[1]
            return [[]] if self.has_ended(seen) else [[("try", ("mkdir", TMP)), ("number", epoch + 1)]]
        if step[0] == "number":
            epoch = max([step[1], *(_epoch(path) + 1 for path in _places(seen))])
            place = f"{TMP}/{epoch}.{self.who}"
            return [[("mkdir", place), ("done", Turn(place)), ("rivals", place)]]
        if step[0] == "rivals":
            return [[("fence", step[1], tuple(one for one in _places(seen) if one != step[1]))]]
        if step[0] == "fence":
            return [self.fencing(step[1], step[2], seen)]
        if step[0] == "destroy":
            files: list[Step] = [("try", ("remove", path)) for path in sorted(seen) if folder_of(path) == step[1]]
            return [[*files, ("try", ("rmdir", step[1]))]]
        if step[0] == "recover":
            return [self.recovering(seen, step[1])]
        turn: Turn = step[1]
        if step[0] == "leave":
            told = turn.chunk >= 0 and seen.get(OWNER) == self.owner(turn.place) and turn.place in seen
            steps = [*self.head(turn), *self.committed(turn)[1:]] if told else []
            return [[*(("try", one) for one in steps), *self.tidying(turn.place), ("open",)]]
        if step[0] == "turn":
            found = tuple(published(seen, name) for name in NAMES)
            turn = turn._replace(seen=found, took=False, trouble=frozenset())
            if any(turn.left(name) < 0 for name in NAMES):
                raise Broken(f"{turn.taken} rows are in the stream, the writers' folders have {found}")
            full = [name for name in NAMES if turn.left(name) >= self.plan.size]
            if not full and not self.fills(turn) and not self.is_complete(turn, seen):
                # The next beat finds out who has taken over.
                lost = seen.get(OWNER) != self.owner(turn.place) or turn.place not in seen
                return [[("leave", turn.kept())]] if lost else None
            orders = [turn._replace(todo=order) for order in dict.fromkeys(self.in_turn(turn, n) for n in (1, -1))]
            return [one for turn in orders for one in self.look(("take", turn), seen, refused=refused) or ()]
        if step[0] == "take" and turn.todo:
            return [[("take", self.reading(seen, turn, refused=refused))]]
        if step[0] == "take" and turn.pieces:
            return [self.taking(turn)]
        return self.after_pieces(seen, turn, refused=refused)

    def has_ended(self, seen: Seen) -> bool:
        """Whether the end is durable and told: who has ended the stream has left."""
        end = value_of(seen, END_PATH, "end")
        return end is not None and seen.get(HEAD_PATH) == ("head", end[1], True) and TMP not in seen

    def owner(self, place: str) -> Content:
        return ("owner", _epoch(place), self.who)

    def fencing(self, place: str, others: Sequence[str], seen: Seen) -> list[Step]:
        if (owner := value_of(seen, OWNER, "owner")) is not None:
            others = sorted({*others, f"{TMP}/{owner[1]}.{owner[2]}"} - {place})
        if any((_epoch(one), one.split(".")[2]) > (_epoch(place), self.who) for one in others):
            return [*self.tidying(place), ("open",)]
        steps = self.destroying(others) + durably(self.owner(place), OWNER, place)
        return [*steps, ("sync_directory", STREAM), ("done", Turn(place)), ("recover", place)]

    def destroying(self, others: Sequence[str]) -> list[Step]:
        steps: list[Step] = []
        for path in others:
            gone = path if path.endswith(_GONE) else path + _GONE
            steps += [("try", ("rename", path, gone))] if path != gone else []
            steps.append(("destroy", gone))
        return steps

    def recovering(self, seen: Seen, place: str) -> list[Step]:
        found = listed(seen, STREAM)
        if found.beyond:
            raise Broken(f"a gap: chunk {found.sealed} is not sealed")
        turn, end = Turn(place, found.sealed, self.start(seen, found.sealed)), value_of(seen, END_PATH, "end")
        if end is not None and end[1] != found.sealed:
            raise Broken(f"{END_PATH} says {end[1]} chunks, the seals say {found.sealed}")
        steps: list[Step] = [("check", place)]
        for chunk in found.open:
            name = records.chunk_name(chunk)
            steps += [("rename", at(name), f"{place}/{name}"), ("try", ("remove", f"{place}/{name}"))]
        newest: Rows = seal_of(seen, STREAM, found.sealed - 1)[3] if found.sealed else ()
        if end is not None or sum(count for _, _, count in newest) % self.plan.size:
            steps += [] if end is not None else self.ending(turn)
            return [*steps, *self.finishing(turn)]
        steps += [("check", place), *self.head(turn), ("done", Turn(place))]
        return [*steps, *self.committed(turn), ("done", turn), ("turn", turn)]

    def start(self, seen: Seen, sealed: int) -> Taken:
        taken: Taken = seal_of(seen, STREAM, sealed - 1)[2] if sealed else NOTHING
        return taken

    def in_turn(self, turn: Turn, order: int) -> tuple[str, ...]:
        """Returns whose pieces come next: one of each writer, then the next ones."""
        pieces = [(number, name) for name in NAMES[::order] for number in range(turn.left(name) // self.plan.size)]
        return tuple(name for _, name in sorted(pieces, key=lambda one: one[0]))[: self.plan.together]

    def reading(self, seen: Seen, turn: Turn, *, refused: bool) -> Turn:
        """Returns what is known when the seal of the next piece was read, and the length of its file."""
        name, size = turn.todo[0], self.plan.size
        first = turn.after_all(turn.pieces).taken[NAMES.index(name)][0]
        if refused or any(own(name, one(first // size)) not in seen for one in (records.chunk_name, records.seal_name)):
            rest = tuple(one for one in turn.todo if one != name)
            return turn._replace(todo=rest, trouble=turn.trouble | {name})
        return turn._replace(todo=turn.todo[1:], pieces=(*turn.pieces, ((name, first, size),)))

    def taking(self, turn: Turn) -> list[Step]:
        pieces, turn = turn.pieces, turn._replace(pieces=())
        links = list[Step]()
        for chunk, ((name, first, size),) in enumerate(pieces, turn.chunk):
            links.append(("link", own(name, records.chunk_name(first // size)), self.temporary(turn, chunk)))
        return [*self.publishing(links, turn, pieces), ("take", turn.after_all(pieces))]

    def after_pieces(self, seen: Seen, turn: Turn, *, refused: bool) -> list[list[Step]] | None:
        rests = self.rests(turn)
        if refused and rests and (self.fills(turn) or self.is_complete(turn, seen)):
            return [[("take", turn._replace(trouble=turn.trouble | {name}))] for name in rests]
        if self.fills(turn):
            rows = self.filling(turn, rests)
            written = self.writing(turn, rows)
            return [[*self.publishing(written, turn, (rows,)), ("take", turn.after(rows))]]
        if turn.took:
            return [[*self.committed(turn), ("done", turn), ("turn", turn.kept())]]
        if self.is_complete(turn, seen):
            return [self.ending_stream(turn, self.filling(turn, rests))]
        return [[*self.committed(turn), ("done", turn), ("turn", turn.kept())], [("turn", turn.kept())]]

    def rests(self, turn: Turn) -> list[str]:
        """Returns the writers with remainders."""
        ended = [name for name, (_, ended) in zip(NAMES, turn.seen, strict=True) if ended and name not in turn.trouble]
        return [name for name in ended if 0 < turn.left(name) < self.plan.size]

    def fills(self, turn: Turn) -> bool:
        """Whether remainders fill a chunk."""
        return sum(map(turn.left, self.rests(turn))) >= self.plan.size

    def is_complete(self, turn: Turn, seen: Seen) -> bool:
        if any(turn.left(name) >= self.plan.size and name not in turn.trouble for name in NAMES):
            return False
        return REQUEST in seen or (all(ended for _, ended in turn.seen) and not turn.trouble)

    def filling(self, turn: Turn, rests: Sequence[str]) -> Rows:
        """Returns the rows of a chunk of remainders."""
        room, rows = self.plan.size, []
        for name in rests:
            if count := min(room, turn.left(name)):
                rows.append((name, turn.taken[NAMES.index(name)][0], count))
                room -= count
        return tuple(rows)

    def writing(self, turn: Turn, rows: Rows) -> list[Step]:
        path = self.temporary(turn, turn.chunk)
        return [("create", path), ("write", path, ("rows", rows)), ("sync", path)]

    def temporary(self, turn: Turn, chunk: int) -> str:
        return f"{turn.place}/{records.chunk_name(chunk)}"

    def publishing(self, rows_made: list[Step], turn: Turn, chunks: Sequence[Rows]) -> list[Step]:
        """Publishes full chunks together and tells the readers."""
        told = turn._replace(chunk=turn.chunk + len(chunks))
        steps = [*rows_made, *self.naming(turn, len(chunks))]
        for number, rows in enumerate(chunks):
            steps += self.sealing(turn.after_all(chunks[:number]), rows)
        return [*steps, ("done", turn), *self.head(told), ("done", told)]

    def naming(self, turn: Turn, count: int) -> list[Step]:
        chunks = range(turn.chunk, turn.chunk + count)
        free: list[Step] = [("check", turn.place), *(("free", at(records.seal_name(chunk))) for chunk in chunks)]
        names = [("rename", self.temporary(turn, chunk), at(records.chunk_name(chunk))) for chunk in chunks]
        return [*free, *names, ("sync_directory", STREAM)]

    def sealing(self, turn: Turn, rows: Rows) -> list[Step]:
        seal = ("seal", turn.chunk, turn.after(rows).taken, rows)
        return [("check", turn.place), *durably(seal, at(records.seal_name(turn.chunk)), turn.place)]

    def ending_stream(self, turn: Turn, rows: Rows) -> list[Step]:
        steps = [*self.committed(turn), ("done", turn)]
        if rows:
            steps += [*self.writing(turn, rows), *self.naming(turn, 1), *self.sealing(turn, rows), ("done", turn)]
            turn = turn.after(rows)
        return [*steps, ("check", turn.place), *self.ending(turn), *self.finishing(turn)]

    def ending(self, turn: Turn) -> list[Step]:
        return durably(("end", turn.chunk, sum(taken for taken, _ in turn.taken)), END_PATH, turn.place)

    def finishing(self, turn: Turn) -> list[Step]:
        told = durably(("head", turn.chunk, True), HEAD_PATH, turn.place)
        return [*told, ("done", Turn(turn.place)), *self.tidying(turn.place)]

    def head(self, turn: Turn) -> list[Step]:
        return hint(("head", turn.chunk, False), HEAD_PATH, turn.place)

    def committed(self, turn: Turn) -> list[Step]:
        value = ("committed", turn.chunk, turn.taken, tuple(sorted(turn.trouble)))
        return [("check", turn.place), *hint(value, COMMITTED, turn.place)]

    def tidying(self, place: str) -> list[Step]:
        return [("destroy", place), ("try", ("rmdir", TMP))]


def _places(seen: Seen) -> Iterator[str]:
    return (path for path in sorted(seen) if folder_of(path) == TMP and seen[path] == FOLDER)


def _epoch(place: str) -> int:
    return int(place.rpartition("/")[2].split(".")[0])
