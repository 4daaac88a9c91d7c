"""The states of the model, what leads from one to the next, and what must hold. All is interned: five small numbers."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Generic, NamedTuple, TypeVar

from tests.harness.model import producer as model
from tests.harness.model.disk import FOLDER, SHORT, Content, Disk, Step, do, power_cuts, without_junk


class Facts(NamedTuple):
    wrong: str | None  # what no state may show, in words; None if there is no such thing
    told: int = 0  # of how many chunks a reader is told
    ended: bool = False  # whether it is told that there are no more
    sealed: int = 0  # chunks [mark, sealed) have a seal
    mark: int = 0  # chunks below it are retired
    cursor: Content | None = None  # what the cursor says, None where there is none
    unsealed: tuple[str, ...] = ()  # rows that were never published
    below: tuple[str, ...] = ()  # what is there of retired chunks
    temporary: bool = False  # whether there is anything with a temporary name


@dataclass(frozen=True)
class Course:
    kept: model.Kept = (0,)  # the consumer's checkpoints
    cursors: tuple[Content | None, ...] = (None,)  # what the cursor may say now
    told: int = 0  # of how many chunks any reader was ever told
    sealed: int = 0  # as the directory shows, since the last power cut
    cut_since_end: bool = False  # the power was cut after the producer had ended the stream and was gone
    refused: bool = False  # the filesystem refused to delete, which the producer may not have tried again


def look(seen: model.Seen) -> Facts:
    try:
        found = model.told(seen)
        listed = model.list_stream(seen)
        wrong = _wrong(seen, listed, found or (0, False))
        cursor = model.value_of(seen, model.CURSOR, "cursor")
    except model.Broken as error:
        return Facts(f"a reader dies: {error}")
    unsealed = tuple(model.data_path(chunk) for chunk in sorted(listed.data - listed.seals))
    begun = seen.get(model.TMP) == FOLDER
    return Facts(wrong, *(found or (0, False)), listed.sealed, listed.mark, cursor, unsealed, listed.below, begun)


def _wrong(seen: model.Seen, listed: model.Listed, found: tuple[int, bool]) -> str | None:
    for chunk in sorted(listed.seals):
        if chunk >= listed.sealed:
            return f"a gap: chunk {chunk} is sealed, chunk {listed.sealed} is not"
        if not model.is_readable(seen, chunk):
            rows, seal = seen.get(model.data_path(chunk)), seen[model.seal_path(chunk)]
            return f"chunk {chunk} is sealed with {seal} and holds {rows}"
    if listed.sealed == listed.mark > 0:
        return f"the newest chunk, {listed.mark - 1}, is retired, and with it the position to continue from"
    if found[0] > listed.sealed:
        return f"readers are told of {found[0]} chunks, sealed are {listed.sealed}"
    if found[0] < listed.sealed and found[1]:
        return f"readers are told that all is {found[0]} chunks, sealed are {listed.sealed}"
    end = model.value_of(seen, model.END_PATH, "end")
    if end is not None and end[1] != listed.sealed:
        return f"{model.END_PATH} says {end[1]} chunks, sealed are {listed.sealed}"
    head = seen.get(model.HEAD_PATH)
    if end is None and head is not None and head[0] == "head" and head[2]:
        return f"{model.HEAD_PATH} says that the stream has ended, {model.END_PATH} is not there"
    return None


def broken(facts: Facts, course: Course, chunks: int, *, producer_done: bool) -> str | None:
    if facts.wrong is not None:
        return facts.wrong
    if facts.sealed < course.told:
        return f"readers were told of {course.told} chunks, of which only {facts.sealed} are there"
    if facts.sealed < course.sealed:
        return f"{course.sealed} chunks were sealed, only {facts.sealed} are"
    if facts.mark > course.kept[0]:
        return f"chunks before {facts.mark} are retired, a run may continue from chunk {course.kept[0]}"
    if facts.cursor not in course.cursors:
        return f"the cursor may say {' or '.join(map(str, course.cursors))}, it says {facts.cursor}"
    if producer_done:
        if facts.sealed != chunks:
            return f"the producer has ended the stream, sealed are {facts.sealed} chunks of {chunks}"
        left = facts.unsealed if course.refused else facts.unsealed + facts.below
        if left and not course.cut_since_end:
            return f"the stream has ended, left over are {', '.join(left)}"
        if facts.temporary and not course.cut_since_end:
            return f"the stream has ended, {model.TMP} is there"
    return None


LOOKS: Final = ("open", "recover", "check", "look")  # Steps of the producer that change no file
FAULTS: Final = ("kill", "refuse", "power cut")  # A process dies, deleting fails, the power is cut
_DONE: Final = 0  # What a process has to do that has succeeded: nothing
_T = TypeVar("_T", bound=Hashable)


class State(NamedTuple):
    disk: int  # what is on the disk
    producer: int  # what the producer has still to do
    consumer: int  # what the consumer has still to do
    course: int  # what has happened
    faults: int  # how many faults may still come


class Move(NamedTuple):
    who: str  # "producer", "consumer", "kill", "refuse" or "power cut"
    what: Step  # the step; of a kill who it is; of a power cut nothing
    state: State  # the state after it
    broken: str | None = None  # which promise it breaks, None if none; then `state` means nothing


class Interned(Generic[_T]):
    def __init__(self) -> None:
        self.values: list[_T] = []
        self._numbers: dict[_T, int] = {}

    def number(self, value: _T) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found


class World:
    def __init__(
        self,
        plan: model.Plan,  # what is produced and how it is consumed
        producer: model.Producer | None = None,  # the producer; None for that of the code
        consumer: model.Consumer | None = None,
        *,
        kinds: Sequence[str] | None = None,  # of the faults, one of each in this order; None for any
        every_junk: bool = False,  # tell all files with temporary names apart, see `without_junk`
    ) -> None:
        self.plan = plan
        self._producer, self._consumer = producer or model.Producer(plan), consumer or model.Consumer(plan)
        self._kinds = kinds
        self._every_junk = every_junk
        self._disks: Interned[Disk] = Interned()
        self._visible: Callable[[int], model.Seen] = lru_cache(1 << 14)(lambda disk: self._disks.values[disk].visible())
        self._facts: list[Facts] = []
        self._cells: Interned[tuple[Step, int]] = Interned()  # A list of cells: (step, number of the next)
        self._cells.number((("",), _DONE))
        self._courses: Interned[Course] = Interned()
        self._done: dict[tuple[int, Step], int] = {}
        self._looked: dict[tuple[int, Step], list[list[Step]] | str] = {}
        self._cuts: dict[int, list[int]] = {}
        self._told: dict[tuple[int, int], int] = {}
        self._broken: dict[tuple[int, int, bool], str | None] = {}
        self._restart = {"producer": self._push([("open",)], _DONE), "consumer": self._push([("resume",)], _DONE)}

    def first(self, faults: int) -> State:
        disk, begun = self._disk(Disk()), self._restart
        return State(disk, begun["producer"], begun["consumer"], self._course(Course()), faults)

    def disk(self, state: State) -> Disk:
        return self._disks.values[state.disk]

    def steps(self, state: State, who: str) -> Iterator[Step]:
        cell = state.producer if who == "producer" else state.consumer
        while cell:
            step, cell = self._cells.values[cell]
            yield step

    def doing(self, state: State, who: str, steps: list[Step]) -> State:
        return state._replace(**{who: self._push(steps, _DONE)})

    def has_finished(self, state: State) -> bool:
        return state.producer == state.consumer == _DONE

    def moves(self, state: State) -> list[Move]:
        moves = [*self.produce(state), *self.consume(state)]
        if not moves and not self.has_finished(state):
            return [Move("consumer", ("wait",), state, "the consumer waits for ever")]
        if state.faults:
            for kind in FAULTS if self._kinds is None else self._kinds[-state.faults :][:1]:
                if kind == "kill":
                    moves += [*self.kill(state, "producer"), *self.kill(state, "consumer")]
                else:
                    moves += (self._refusals if kind == "refuse" else self.cut)(state)
        return moves

    def produce(self, state: State) -> Iterator[Move]:
        if state.producer == _DONE:
            return
        step, rest = self._cells.values[state.producer]
        if step[0] not in LOOKS:
            try:
                disk = self._do(state.disk, step)
            except KeyError as error:
                yield Move("producer", step, state, f"the producer cannot continue: {error} is not there")
                return
            after = state._replace(disk=disk, producer=self._skip(rest))
            yield self._moved("producer", step, after)
            return
        found = self._looked.get((state.disk, step))
        if found is None:
            try:
                found = self._producer.look(step, self._disks.values[state.disk], self._visible(state.disk))
            except model.Broken as error:
                found = f"the producer cannot continue: {error}"
            self._looked[state.disk, step] = found
        if isinstance(found, str):
            yield Move("producer", step, state, found)
            return
        for steps in found:
            yield self._moved("producer", step, state._replace(producer=self._push(steps, rest)))

    def consume(self, state: State) -> Iterator[Move]:
        if state.consumer == _DONE:
            return
        step, rest = self._cells.values[state.consumer]
        course = self._courses.values[state.course]
        disk, seen = self._disks.values[state.disk], self._visible(state.disk)
        if step[0] == "resume":
            for steps in self._consumer.resuming(course.kept, seen):
                yield self._moved("consumer", step, state._replace(consumer=self._push(steps, rest)))
        elif step[0] == "read":
            try:
                found = self._consumer.reading(step[1], course.kept, seen)
            except model.Broken as error:
                yield Move("consumer", step, state, f"the consumer dies: {error}")
                return
            if found is not None:
                yield self._moved("consumer", step, state._replace(consumer=self._push(found, rest)))
        elif step[0] == "commit":
            steps = self._consumer.writing(step[1], disk, seen)
            yield self._moved("consumer", step, state._replace(consumer=self._push(steps, rest)))
        elif step[0] in ("checkpoint", "committed"):
            kept = self._consumer.keep(course.kept, step[1])
            saved = step[0] == "checkpoint"
            course = replace(course, kept=kept) if saved else replace(course, cursors=(("cursor", step[1]),))
            yield self._moved("consumer", step, state._replace(consumer=rest, course=self._course(course)))
        else:
            after = state._replace(disk=self._do(state.disk, step), consumer=rest)
            if model.CURSOR in step:
                value = self._visible(after.disk)[model.CURSOR]  # From here on it may be the new one or the one before
                cursors = {*course.cursors, value} if value[0] == "cursor" else set(course.cursors)
                course = replace(course, cursors=tuple(sorted(cursors, key=str)))
                after = after._replace(course=self._course(course))
            yield self._moved("consumer", step, after)

    def kill(self, state: State, who: str) -> Iterator[Move]:
        cell = state.producer if who == "producer" else state.consumer
        if cell in (_DONE, self._restart[who]):
            return
        step = self._cells.values[cell][0]
        disk, course = self._disks.values[state.disk], self._courses.values[state.course]
        left: dict[Disk, Step] = {self._left(disk, who): (who,)}
        if step[0] == "write":
            left.setdefault(self._left(do(disk, ("write", step[1], SHORT)), who), (who, "half way through", step))
        number = self._course(replace(course, refused=course.refused and who != "producer"))
        for disk, what in left.items():
            after = State(self._disk(disk), state.producer, state.consumer, number, state.faults - 1)
            yield self._moved("kill", what, after._replace(**{who: self._restart[who]}))

    def cut(self, state: State) -> Iterator[Move]:
        course = self._courses.values[state.course]
        begun = [_DONE if getattr(state, who) == _DONE else begin for who, begin in self._restart.items()]
        left = self._cuts.get(state.disk)
        if left is None:
            cuts = (self._left(disk, "producer", "consumer") for disk in power_cuts(self._disks.values[state.disk]))
            left = self._cuts[state.disk] = [self._disk(disk) for disk in dict.fromkeys(cuts)]
        for disk in left:
            facts = self._facts[disk]
            # What is found now is on the device.
            cursors = (facts.cursor,) if facts.cursor in course.cursors else course.cursors
            done, sealed = state.producer == _DONE, min(course.sealed, facts.sealed)
            after = replace(course, cursors=cursors, sealed=sealed, refused=course.refused and done)
            after = replace(after, cut_since_end=course.cut_since_end or done)
            yield self._moved("power cut", (), State(disk, begun[0], begun[1], self._course(after), state.faults - 1))

    def _refusals(self, state: State) -> Iterator[Move]:
        if state.producer == _DONE:
            return
        refused, cell = self._cells.values[state.producer]
        step = refused
        while step[0] != model.RETIRED_DONE:
            if step[0] in LOOKS or not cell:
                return
            step, cell = self._cells.values[cell]
        there = refused[0] in ("write", "sync", "rename")  # What it was writing is removed, whatever else fails
        steps: list[Step] = [("remove", refused[1])] if there else []
        course = self._course(replace(self._courses.values[state.course], refused=True))
        for again in ([], [("look", *step[1:])]):  # It continues, or is held back anyway and looks again
            rest = self._push(again, self._skip(cell))
            after = state._replace(producer=self._push(steps, rest), course=course, faults=state.faults - 1)
            yield self._moved("refuse", refused, after)

    def _moved(self, who: str, what: Step, state: State) -> Move:
        key = (state.disk, state.course)
        number = self._told.get(key)
        if number is None:
            course, facts = self._courses.values[state.course], self._facts[state.disk]
            more = replace(course, told=max(course.told, facts.told), sealed=max(course.sealed, facts.sealed))
            number = self._told[key] = self._course(more)
        judged = (state.disk, state.course, state.producer == _DONE)
        if judged not in self._broken:
            facts, course = self._facts[state.disk], self._courses.values[state.course]
            self._broken[judged] = broken(facts, course, self.plan.chunks, producer_done=judged[2])
        if number != state.course:
            state = state._replace(course=number)
        return Move(who, what, state, self._broken[judged])

    def _do(self, disk: int, step: Step) -> int:
        found = self._done.get((disk, step))
        if found is None:
            found = self._done[disk, step] = self._disk(self._left(do(self._disks.values[disk], step)))
        return found

    def _left(self, disk: Disk, *stopped: str) -> Disk:
        return disk if self._every_junk else without_junk(disk, stopped)

    def _disk(self, disk: Disk) -> int:
        number = self._disks.number(disk)
        if number == len(self._facts):
            self._facts.append(look(disk.visible()))
        return number

    def _course(self, course: Course) -> int:
        return self._courses.number(course)

    def _push(self, steps: list[Step], rest: int) -> int:
        for step in reversed(steps):
            rest = self._cells.number((step, rest))
        return rest

    def _skip(self, cell: int) -> int:
        step, rest = self._cells.values[cell]
        return rest if step[0] == model.RETIRED_DONE else cell
