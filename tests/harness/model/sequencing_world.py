"""The states of writers and sequencers, what leads from one to the next, and what must hold in each.

A call that only its own process can see is not interleaved with those of others, and no fault comes before it but a
refusal of it: the call before leaves the same. With `every_order` all are told apart.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from lazyshard.format import records
from tests.harness.model import sequencing
from tests.harness.model.disk import Disk, Step, as_hint, do, folder_of, power_cuts, settle
from tests.harness.model.producer import END_PATH, HEAD_PATH, STREAM, TMP, Broken, Seen, data_path, value_of
from tests.harness.model.sequencing import COMMITTED, NAMES, OWNER, REQUEST, SEQUENCERS, Plan, Sequencer, listed, own
from tests.harness.model.world import FAULTS, Interned

USER: Final = "user"  # who requests the end
_DONE: Final = 0
_CALLS: Final = ("create", "write", "sync", "link", "rename", "sync_directory", "remove", "mkdir", "rmdir")
_PRIVATE: Final = ("create", "write", "sync", "remove", "link")


class Course(NamedTuple):
    told: int = 0  # of how many chunks a reader or writer was ever told
    sealed: int = 0  # as the directory shows, since the last power cut
    refused: bool = False  # a sequencer could not read a piece
    cut: bool = False  # the power was cut
    untidy: int = 0  # how often a clean-up was refused: after the first time the next sequencer repeats it


class Facts(NamedTuple):
    wrong: str | None  # what no state may show
    told: int = 0  # chunks, by the head and by `committed.json`
    sealed: int = 0
    refuses: bool = False  # whether a writer is told that its pieces are not taken
    left: tuple[str, ...] = ()  # rows without a seal


class State(NamedTuple):
    disk: int  # what is on the disk
    todo: tuple[int, ...]  # what each process has still to do
    course: int  # what has happened
    faults: int  # how many faults may still come
    takeovers: int  # how often a sequencer may still open the stream while the other one runs


class Move(NamedTuple):
    who: str
    what: Step
    state: State
    broken: str | None = None


def facts(seen: Seen, plan: Plan) -> Facts:
    try:
        return _facts(seen, plan)
    except Broken as error:
        return Facts(f"{error}")


def _facts(seen: Seen, plan: Plan) -> Facts:
    found = listed(seen, STREAM)
    if found.beyond:
        return Facts(f"a gap: chunk {found.sealed} is not sealed")
    taken, last = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
    for chunk in range(found.sealed):
        _, number, position, rows = sequencing.seal_of(seen, STREAM, chunk)
        if number != chunk or seen.get(data_path(chunk)) != ("rows", rows):
            return Facts(f"chunk {chunk} is sealed with {number}, {rows} and holds {seen.get(data_path(chunk))}")
        for name, first, count in rows:
            if first != taken[name]:
                return Facts(f"chunk {chunk} holds row {first} of writer {name} after {taken[name]} rows of it")
            taken[name], last[name] = first + count, chunk
        if position != tuple((taken[name], last[name]) for name in NAMES):
            return Facts(f"the position in chunk {chunk} is {position}, its rows say {taken}, {last}")
        if chunk + 1 < found.sealed and sum(count for *_, count in rows) != plan.size:
            return Facts(f"chunk {chunk} is not full and not the last one")
    end, head, committed = value_of(seen, END_PATH, "end"), seen.get(HEAD_PATH, ("",)), seen.get(COMMITTED, ("",))
    if end is not None and end[1:] != (found.sealed, sum(taken.values())):
        return Facts(f"the stream ends with {end[1:]}, sealed are {found.sealed} chunks with {taken}")
    if end is not None and not plan.request and tuple(taken.values()) != plan.rows:
        return Facts(f"the stream has ended without all rows: {taken}")
    told = [one[1] for one in (head, committed) if one[0] in ("head", "committed")]
    if committed[0] == "committed":
        for name, (rows, _) in zip(NAMES, committed[2], strict=True):
            if rows > taken[name]:
                return Facts(f"{rows} rows of writer {name} are told to be committed, in the stream are {taken[name]}")
    for name in NAMES:
        if (wrong := _lost(seen, plan, name, taken[name])) is not None:
            return Facts(wrong)
    refuses = committed[0] == "committed" and bool(committed[3])
    return Facts(None, max(told, default=0), found.sealed, refuses, tuple(map(data_path, found.open)))


def _lost(seen: Seen, plan: Plan, name: str, taken: int) -> str | None:
    """Says which rows of a writer are neither in the stream nor in its folder."""
    folder = folder_of(own(name, ""))
    found = listed(seen, folder)
    if found.mark * plan.size > taken:
        return f"pieces before {found.mark} of writer {name} are retired, {taken} rows of it are in the stream"
    rows, _ = sequencing.published(seen, name)
    for piece in range(taken // plan.size, found.sealed):
        first = piece * plan.size
        count = min(plan.size, rows - first)
        chunk = own(name, records.chunk_name(piece))
        if first + count > taken and seen.get(chunk) != ("rows", ((name, first, count),)):
            return f"rows of piece {piece} of writer {name} are gone"
    return None


class World:
    """`kinds`: of the faults, one of each in this order; None for any."""

    def __init__(
        self,
        plan: Plan,
        sequencer: type[Sequencer] = Sequencer,
        writer: type[sequencing.Writer] = sequencing.Writer,
        *,
        kinds: Sequence[str] | None = None,
        every_order: bool = False,
    ) -> None:
        self.plan, self._kinds, self._every_order = plan, kinds, every_order
        self.processes = (*SEQUENCERS, *NAMES, *([USER] if plan.request else []))
        self._who = {name: sequencer(plan, name) for name in SEQUENCERS}
        self._writers = {name: writer(plan, name) for name in NAMES}
        self._disks: Interned[Disk] = Interned()
        self._facts: list[Facts] = []
        self._visible: Callable[[int], Seen] = lru_cache(1 << 15)(lambda disk: self._disks.values[disk].visible())
        self._cells: Interned[tuple[Step, int]] = Interned()
        self._cells.number((("",), _DONE))
        self._courses: Interned[Course] = Interned()
        self._run: dict[tuple[int, Step], int | str | None] = {}
        self._looked: dict[tuple[int, str, Step, bool], list[list[Step]] | str | None] = {}
        self._verdicts: dict[tuple[int, int, bool], tuple[int, str | None]] = {}
        self._cuts: dict[int, list[int]] = {}
        self._open = self.push([("open",)])
        self._first = self.push([("create", REQUEST), ("sync", REQUEST), ("sync_directory", folder_of(REQUEST))])

    def first(self, faults: int, disk: Disk | None = None) -> State:
        todo = tuple(self._first if name == USER else self._open for name in self.processes)
        number = self._disk(self.plan.first() if disk is None else disk)
        return State(number, todo, self._courses.number(Course()), faults, self.plan.takeovers)

    def disk(self, state: State) -> Disk:
        return self._disks.values[state.disk]

    def push(self, steps: Sequence[Step], rest: int = _DONE) -> int:
        for step in reversed(steps):
            if rest or step[0] != "done":
                rest = self._cells.number((step, rest))
        return rest

    def has_finished(self, state: State) -> bool:
        return not any(state.todo)

    def moves(self, state: State) -> list[Move]:
        moves = [move for number in range(len(state.todo)) for move in self.go_on(state, number)]
        if not moves and not self.has_finished(state):
            return [Move("a", ("wait",), state, "all wait for ever")]
        if state.faults:
            moves += self._faults(state)
        return moves

    def go_on(self, state: State, number: int) -> Iterator[Move]:
        """Yields what a process may do next."""
        if not (cell := state.todo[number]):
            return
        who, (step, rest) = self.processes[number], self._cells.values[cell]
        if step == ("open",) and who in SEQUENCERS:
            other = state.todo[1 - number]
            if other not in (_DONE, self._open):
                if not state.takeovers:
                    return
                state = state._replace(takeovers=state.takeovers - 1)
            elif who == SEQUENCERS[1] and other:
                return  # As if the other one did, but for the name
        if step[0] not in (*_CALLS, "try", "check", "free", "publish", "end"):
            yield from self._look(state, number, who, step, rest, refused=False)
            return
        disk = self._do(state.disk, who, step)
        if isinstance(disk, str):
            yield Move(who, step, state, disk)
        elif disk is not None:
            yield self._moved(who, step, state._replace(disk=disk), number, rest)
        elif not (after := self._failed(cell)):
            yield Move(who, step, state, f"{who} cannot continue: {step}")
        else:
            yield self._moved(who, step, state, number, after)

    def _look(self, state: State, number: int, who: str, step: Step, rest: int, *, refused: bool) -> Iterator[Move]:
        key = state.disk, who, step, refused
        if key not in self._looked:
            seen = self._visible(state.disk)
            try:
                sequencer = self._who.get(who)
                found = (
                    sequencer.look(step, seen, refused=refused) if sequencer else self._writers[who].look(step, seen)
                )
                self._looked[key] = found
            except Broken as error:
                self._looked[key] = f"{who} cannot continue: {error}"
        after = self._looked[key]
        if isinstance(after, str):
            yield Move(who, step, state, after)
        for one in () if after is None or isinstance(after, str) else after:
            yield self._moved("refuse" if refused else who, step, state, number, self.push(one, rest))

    def _do(self, disk: int, who: str, step: Step) -> int | str | None:
        """Returns the disk after a call; None if it fails, what is wrong if it cannot be."""
        key = disk, step if step[0] not in ("publish", "end") else (who, *step)
        if key not in self._run:
            self._run[key] = self._called(disk, who, step)
        return self._run[key]

    def _called(self, number: int, who: str, step: Step) -> int | str | None:
        disk, seen = self._disks.values[number], self._visible(number)
        if step[0] in ("publish", "end"):
            for one in self._writers[who].at_once(step):
                disk = do(disk, one)
            return self._disk(disk)
        tries, step = step[0] == "try", step[1] if step[0] == "try" else step
        if step[0] == "check":
            return number if seen.get(OWNER) == self._who[who].owner(step[1]) else None
        if step[0] == "free":
            return None if step[1] in seen else number
        if step[0] == "mkdir" and step[1] in seen:
            return number
        made = step[1] if step[0] in ("create", "mkdir") else step[2] if step[0] in ("rename", "link") else ""
        if (made and folder_of(made) not in seen) or (step[0] not in ("create", "mkdir") and step[1] not in seen):
            return number if tries else None
        if step[0] == "rename":
            files = {path: file for path, file, _ in disk.names}
            if files[step[1]] == files.get(step[2]):
                return f"{step[1]} and {step[2]} are one file, so a rename does nothing"
        return self._disk(as_hint(settle(do(disk, step)), HEAD_PATH, COMMITTED))

    def _failed(self, cell: int) -> int:
        """Returns what a sequencer does after a call that fails; 0 for a process without calls that may fail."""
        while cell:
            step, cell = self._cells.values[cell]
            if step[0] == "done":
                return self.push([("leave", step[1].kept())])
        return _DONE

    def _faults(self, state: State) -> Iterator[Move]:
        for kind in FAULTS if self._kinds is None else self._kinds[-state.faults :][:1]:
            for number in range(len(state.todo)) if kind != "power cut" else ():
                yield from (self._kill if kind == "kill" else self._refusals)(state, number)
            if kind == "power cut":
                yield from self._cut(state)

    def _kill(self, state: State, number: int) -> Iterator[Move]:
        who = self.processes[number]
        if state.todo[number] not in (_DONE, self._open) and who != USER:
            disk = self._disk(settle(self.disk(state), gone=lambda path: _is_of(path, who)))
            after = state._replace(disk=disk, faults=state.faults - 1)
            yield self._moved("kill", (who,), after, number, self._open)

    def _refusals(self, state: State, number: int) -> Iterator[Move]:
        """A call of a sequencer is refused: for a writer that is as a kill."""
        cell, who = state.todo[number], self.processes[number]
        if not (cell and state.faults and who in SEQUENCERS) or "refuse" not in self._next_kinds(state.faults):
            return
        (step, rest), less = self._cells.values[cell], state._replace(faults=state.faults - 1)
        course = self._courses.values[state.course]
        if step[0] in ("take", "turn"):
            less = less._replace(course=self._courses.number(course._replace(refused=True)))
            yield from self._look(less, number, who, step, rest, refused=True)
        elif step[0] == "try":
            untidy = self._courses.number(course._replace(untidy=course.untidy + 1))
            yield self._moved("refuse", step, less._replace(course=untidy), number, rest)
        elif step[0] in _CALLS and (after := self._failed(cell)):
            yield self._moved("refuse", step, less, number, after)
            disk = self._do(state.disk, who, step)
            if (
                isinstance(disk, int)
                and rest
                and _is_private(self._cells.values[rest][0])
                and (after := self._failed(rest))
            ):
                yield self._moved("refuse", self._cells.values[rest][0], less._replace(disk=disk), number, after)

    def _next_kinds(self, faults: int) -> Sequence[str]:
        return FAULTS if self._kinds is None else self._kinds[-faults:][:1]

    def _cut(self, state: State) -> Iterator[Move]:
        if state.disk not in self._cuts:
            # Nobody is left to be fenced, so owner and workplaces tell nothing.
            disk = settle(self.disk(state), gone=lambda path: TMP in path or any(_is_of(path, who) for who in NAMES))
            disk = settle(disk, (OWNER,), gone=lambda path: path == OWNER)
            self._cuts[state.disk] = [self._disk(one) for one in power_cuts(disk)]
        todo = tuple(
            self._open if cell and name != USER else cell for name, cell in zip(self.processes, state.todo, strict=True)
        )
        if USER in self.processes and todo[-1]:
            todo = (*todo[:-1], self._first)
        course = self._courses.values[state.course]
        for left in self._cuts[state.disk]:
            after = course._replace(sealed=min(course.sealed, self._facts[left].sealed), cut=True)
            number = self._courses.number(after)
            yield self._judged("power cut", (), State(left, todo, number, state.faults - 1, state.takeovers))

    def _moved(self, who: str, what: Step, state: State, number: int, cell: int) -> Move:
        """Returns a move after which a process has all this to do, less what only it can see."""
        disk, process = state.disk, self.processes[number]
        while cell:
            step, rest = self._cells.values[cell]
            if step[0] == "destroy" and not self._every_order:
                rest = self.push((self._who[process].look(step, self._visible(disk)) or [[]])[0], rest)
            elif step[0] != "done":
                if self._every_order or not (_is_private(step) or self._is_vain(disk, step)):
                    break
                after = self._do(disk, process, step)
                assert not isinstance(after, str), after
                if after is None:
                    rest = self._failed(cell)
                else:
                    disk = after
            cell = rest
        todo = (*state.todo[:number], cell, *state.todo[number + 1 :])
        return self._judged(who, what, state._replace(todo=todo, disk=disk))

    def _is_vain(self, disk: int, step: Step) -> bool:
        return step[0] == "try" and self._do(disk, "", step) == disk

    def _judged(self, who: str, what: Step, state: State) -> Move:
        done = not any(state.todo)
        key = state.disk, state.course, done
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(*key)
        course, wrong = self._verdicts[key]
        return Move(who, what, state._replace(course=course), wrong)

    def _judge(self, disk: int, number: int, done: bool) -> tuple[int, str | None]:
        course, found, seen = self._courses.values[number], self._facts[disk], self._visible(disk)
        more = course._replace(told=max(course.told, found.told), sealed=max(course.sealed, found.sealed))
        # Readers that find no head look for the end themselves.
        wrong, told = found.wrong, ("head", found.sealed, True)
        if wrong is None and found.sealed < more.told:
            wrong = f"{more.told} chunks were told of, only {found.sealed} are there"
        elif wrong is None and found.sealed < more.sealed:
            wrong = f"{more.sealed} chunks were sealed, only {found.sealed} are"
        elif wrong is None and found.refuses and not course.refused:
            wrong = "a writer is refused without cause"
        elif wrong is None and done and (END_PATH not in seen or seen.get(HEAD_PATH, told) != told):
            wrong = "all are done, and readers are not told that the stream has ended"
        elif wrong is None and done and not course.cut and course.untidy < 2 and (found.left or TMP in seen):
            wrong = f"the stream has ended, left over are {found.left} {TMP if TMP in seen else ''}"
        return self._courses.number(more), wrong

    def _disk(self, disk: Disk) -> int:
        number = self._disks.number(disk)
        if number == len(self._facts):
            self._facts.append(facts(disk.visible(), self.plan))
        return number


def _is_private(step: Step) -> bool:
    step = step[1] if step[0] == "try" else step
    return step[0] in ("check", "free", "publish") or (
        step[0] in _PRIVATE and f"/{records.TEMPORARY}/" in step[-1 if step[0] == "link" else 1]
    )


def _is_of(path: str, who: str) -> bool:
    """Whether it is a temporary file of a process."""
    folder = folder_of(path)
    if who in NAMES:
        return folder == own(who, records.TEMPORARY)
    return folder_of(folder) == TMP and folder.rpartition("/")[2].split(".")[1] == who
