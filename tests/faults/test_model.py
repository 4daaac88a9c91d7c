"""The model of publishing, recovering, retiring and committing keeps every promise, and finds each known mistake."""

from __future__ import annotations

import pytest

from tests.harness.model.disk import FOLDER, SHORT, ZEROS, Content, Disk, Step, do, half_written, power_cuts
from tests.harness.model.producer import Plan
from tests.harness.model.sweep import Explored, explore
from tests.harness.model.world import World
from tests.harness.planted.model import MUTANTS, Mutant, NoSyncAtRestart
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


def test_file_that_was_not_synced_may_be_torn_and_its_name_be_missing() -> None:
    written = made(("create", "s/a"), ("write", "s/a", ROWS))
    assert written.visible() == {"s": FOLDER, "s/a": ROWS}
    assert left(written) == [{"s/a": ROWS}, {"s/a": SHORT}, {"s/a": ZEROS}, {}]
    synced = do(written, ("sync", "s/a"))
    assert left(synced) == [{"s/a": ROWS}, {}]
    assert left(do(synced, ("sync_directory", "s"))) == [{"s/a": ROWS}]
    assert left(do(written, ("sync_directory", "s"))) == [{"s/a": ROWS}, {"s/a": SHORT}, {"s/a": ZEROS}]


def test_of_a_rename_either_half_may_be_there_without_the_other() -> None:
    disk = made(("create", "s/a"), ("write", "s/a", ROWS), ("sync", "s/a"), ("sync_directory", "s"))
    renamed = do(disk, ("rename", "s/a", "s/b"))
    assert left(renamed) == [{"s/a": ROWS, "s/b": ROWS}, {"s/a": ROWS}, {"s/b": ROWS}, {}]
    assert left(do(renamed, ("sync_directory", "s"))) == [{"s/b": ROWS}]


def test_name_is_one_of_those_files_that_it_has_stood_for() -> None:
    disk = made()
    for value in (("head", 0, False), ("head", 1, False)):
        for step in (("create", "s/t"), ("write", "s/t", value), ("sync", "s/t"), ("rename", "s/t", "s/head")):
            disk = do(disk, step)
    found = [cut.get("s/head") for cut in left(disk) if "s/t" not in cut]
    assert found == [("head", 0, False), ("head", 1, False), None]


def test_what_was_removed_may_come_back_until_its_directory_is_synced() -> None:
    disk = made(("create", "s/a"), ("write", "s/a", ROWS), ("sync", "s/a"), ("sync_directory", "s"))
    removed = do(disk, ("remove", "s/a"))
    assert left(removed) == [{"s/a": ROWS}, {}]
    assert left(do(removed, ("sync_directory", "s"))) == [{}]


def test_directory_takes_with_it_what_is_in_it_however_that_was_synced() -> None:
    disk = Disk()
    for step in (("mkdir", "s"), ("create", "s/a"), ("sync", "s/a"), ("sync_directory", "s")):
        disk = do(disk, step)
    assert [cut.visible() for cut in power_cuts(disk)] == [{"s": FOLDER, "s/a": SHORT}, {}]
    disk = do(made(("mkdir", "s/d"), ("sync_directory", "s"), ("create", "s/d/a")), ("rmdir", "s/d"))
    assert "s/d" in disk.visible()  # it is not empty
    disk = do(do(disk, ("remove", "s/d/a")), ("rmdir", "s/d"))
    assert left(disk) == [{"s/d": FOLDER, "s/d/a": SHORT}, {"s/d": FOLDER}, {}]
    assert left(do(disk, ("sync_directory", "s"))) == [{}]


def test_kill_keeps_what_was_written_and_tears_what_is_being_written() -> None:
    disk = made(("create", "s/a"))
    assert half_written(disk, "s/a").visible() == {"s": FOLDER, "s/a": SHORT}
    linked = do(do(disk, ("link", "s/a", "s/b")), ("write", "s/b", ROWS))
    assert linked.visible() == {"s": FOLDER, "s/a": ROWS, "s/b": ROWS}


# The full tier has these besides
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


def test_missing_sync_at_a_restart_takes_a_kill_and_a_power_cut() -> None:
    mutant = Mutant(NoSyncAtRestart, "", ("kill", "power cut"))
    assert explored(mutant.world(), 1).broken is None
