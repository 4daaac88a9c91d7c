"""The model of publishing, recovering, retiring and committing keeps every promise, and finds each known mistake."""

import pytest

from tests.harness.model.producer import Plan
from tests.harness.model.sweep import Explored, explore
from tests.harness.model.world import World
from tests.harness.planted.model import MUTANTS, Mutant
from tests.tiers import full

EVERY_OTHER = [mutant for number, mutant in enumerate(MUTANTS) if number % 4]


def explored(world: World, faults: int) -> Explored:
    found = explore(world, faults)
    print(found if found.broken else f"{found.states:,} states, {found.moves:,} moves, faults: {dict(found.faults)}")
    return found


@pytest.mark.parametrize(
    ("plan", "faults", "states"),
    [
        (Plan(3, keeps=2), 0, 2000),
        (Plan(1), 1, 17_000),
        *full((Plan(2), 1, 45_000), (Plan(1, partial=True), 2, 50_000)),
    ],
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


@pytest.mark.few(4)
@pytest.mark.parametrize("mutant", [*MUTANTS[::4], *full(*EVERY_OTHER)], ids=lambda mutant: mutant.name)
def test_model_finds_a_protocol_that_makes_a_mistake(mutant: Mutant) -> None:
    found = explored(mutant.world(), len(mutant.kinds))
    assert found.broken is not None, f"{mutant.name} was not found in {found.states} states"
    assert mutant.finds in found.broken
    faults = [line for line in found.history if line.startswith(("KILL", "POWER CUT", "ERROR"))]
    assert len(faults) == len(mutant.kinds)
    assert str(found).splitlines()[1] == f"  1. {found.history[0]}"
