"""The model of publishing, recovering, retiring and committing keeps every promise, and finds each known mistake."""

import pytest

from tests.harness.model.disk import FOLDER, SHORT, ZEROS, Content, Disk, Step, do, half_written, power_cuts
from tests.harness.model.producer import Plan
from tests.harness.model.sweep import Explored, explore
from tests.harness.model.world import World
from tests.harness.planted.model import MUTANTS, Mutant
from tests.tiers import full

ROWS: Content = ("rows", 0)


def made(*steps: Step) -> Disk:
    """A disk on which the directory `s` is there for good, after some steps."""
    disk = Disk()
    for step in (("mkdir", "s"), ("sync_directory", ""), *steps):
        disk = do(disk, step)
    return disk


def left(disk: Disk) -> list[dict[str, Content]]:
    """What a power cut may leave in `s`."""
    found = [{path: value for path, value in cut.visible().items() if path != "s"} for cut in power_cuts(disk)]
    return sorted(found, key=str)


A_WRITTEN: tuple[Step, ...] = (("create", "s/a"), ("write", "s/a", ROWS))
A: tuple[Step, ...] = (*A_WRITTEN, ("sync", "s/a"), ("sync_directory", "s"))
TORN: list[dict[str, Content]] = [{"s/a": ROWS}, {"s/a": SHORT}, {"s/a": ZEROS}]
HOLDS: dict[str, Content] = {"s/d": FOLDER}
HELD: dict[str, Content] = {"s/d": FOLDER, "s/d/a": SHORT}
SYNC: Step = ("sync_directory", "s")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # A file that was not synced may be torn, and its name be missing.
        (A_WRITTEN, [*TORN, {}]),
        (A[:3], [{"s/a": ROWS}, {}]),
        (A, [{"s/a": ROWS}]),
        ((*A_WRITTEN, SYNC), TORN),
        # Of a rename either half may be there without the other.
        ((*A, ("rename", "s/a", "s/b")), [{"s/a": ROWS, "s/b": ROWS}, {"s/a": ROWS}, {"s/b": ROWS}, {}]),
        ((*A, ("rename", "s/a", "s/b"), SYNC), [{"s/b": ROWS}]),
        # What was removed may come back until its directory is synced.
        ((*A, ("remove", "s/a")), [{"s/a": ROWS}, {}]),
        ((*A, ("remove", "s/a"), SYNC), [{}]),
        # A directory takes with it what is in it; one that is not empty stays.
        (
            (("mkdir", "s/d"), ("create", "s/d/a"), ("sync", "s/d/a")),
            [{"s/d": FOLDER, "s/d/a": SHORT}, {"s/d": FOLDER}, {}],
        ),
        (
            (("mkdir", "s/d"), SYNC, ("create", "s/d/a"), ("rmdir", "s/d")),
            [{"s/d": FOLDER, "s/d/a": SHORT}, {"s/d": FOLDER}],
        ),
    ],
)
def test_what_a_power_cut_may_leave(steps: tuple[Step, ...], expected: list[dict[str, Content]]) -> None:
    assert left(made(*steps)) == expected


def test_name_is_one_of_those_files_that_it_has_stood_for() -> None:
    disk = made()
    for value in (("head", 0, False), ("head", 1, False)):
        for step in (("create", "s/t"), ("write", "s/t", value), ("sync", "s/t"), ("rename", "s/t", "s/head")):
            disk = do(disk, step)
    found = [cut.get("s/head") for cut in left(disk) if "s/t" not in cut]
    assert found == [("head", 0, False), ("head", 1, False), None]


def test_kill_keeps_what_was_written_and_tears_what_is_being_written() -> None:
    disk = made(("create", "s/a"))
    assert half_written(disk, "s/a").visible() == {"s": FOLDER, "s/a": SHORT}
    linked = do(do(disk, ("link", "s/a", "s/b")), ("write", "s/b", ROWS))
    assert linked.visible() == {"s": FOLDER, "s/a": ROWS, "s/b": ROWS}


EVERY_OTHER = [mutant for number, mutant in enumerate(MUTANTS) if number % 4]


def explored(world: World, faults: int) -> Explored:
    found = explore(world, faults)
    print(found if found.broken else f"{found.states:,} states, {found.moves:,} moves, faults: {dict(found.faults)}")
    return found


@pytest.mark.parametrize(
    ("plan", "faults", "states"),
    [(Plan(3, keeps=2), 0, 2000), (Plan(2), 1, 45_000), *full((Plan(1, partial=True), 2, 50_000))],
    ids=lambda value: str(value),
)
def test_protocol_keeps_every_promise_wherever_faults_come(plan: Plan, faults: int, states: int) -> None:
    found = explored(World(plan), faults)
    assert found.broken is None, str(found)
    assert found.whole
    assert found.finished > 0
    assert found.states > states


def test_without_faults_everything_is_delivered_and_what_was_acknowledged_is_deleted() -> None:
    world = World(Plan(3))
    state = world.first(0)
    while not world.has_finished(state):
        # The consumer is always as far as it can be, and the producer deletes whenever it can.
        move = next(world.consume(state), None) or next(world.produce(state))
        assert move.broken is None
        state = move.state
    assert world.course(state).kept == (3,)
    assert sorted(world.disk(state).visible()) == [
        *("stream", "stream/chunk_00002.jsonl", "stream/chunk_00002.jsonl.completed", "stream/cursors"),
        *("stream/cursors/run.json", "stream/head.json", "stream/retired.json", "stream/stream.end"),
        *("stream/stream.json", "stream/stream.owner"),
    ]


@pytest.mark.parametrize("mutant", [*MUTANTS[::4], *full(*EVERY_OTHER)], ids=lambda mutant: mutant.name)
def test_model_finds_a_protocol_that_makes_a_mistake(mutant: Mutant) -> None:
    found = explored(mutant.world(), len(mutant.kinds))
    assert found.broken is not None, f"{mutant.name} was not found in {found.states} states"
    assert mutant.finds in found.broken
    faults = [line for line in found.history if line.startswith(("KILL", "POWER CUT", "ERROR"))]
    assert len(faults) == len(mutant.kinds)
    assert str(found).splitlines()[1] == f"  1. {found.history[0]}"
