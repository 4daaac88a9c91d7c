"""The model of publishing, recovering, retiring and committing keeps every promise, and finds each known mistake."""

import pytest

from tests.harness.model.producer import Plan
from tests.harness.model.sweep import explore
from tests.harness.model.world import World
from tests.harness.planted.model import MUTANTS, Mutant
from tests.tiers import full

EVERY_OTHER = [mutant for number, mutant in enumerate(MUTANTS) if number % 4]


@pytest.mark.parametrize(
    ("plan", "faults", "states"),
    [
        (Plan(3, keeps=2), 0, 2000),
        (Plan(1), 1, 17_000),
        *full((Plan(2), 1, 45_000), (Plan(1, partial=True), 2, 48_000)),
    ],
    ids=str,
)
def test_protocol_keeps_every_promise_wherever_faults_come(plan: Plan, faults: int, states: int) -> None:
    found = explore(World(plan), faults)
    assert found.broken is None, str(found)
    assert found.finished > 0
    assert found.states > states


@pytest.mark.few(4)
@pytest.mark.parametrize("mutant", [*MUTANTS[::4], *full(*EVERY_OTHER)], ids=lambda mutant: mutant.name)
def test_model_finds_a_protocol_that_makes_a_mistake(mutant: Mutant) -> None:
    found = explore(mutant.world(), len(mutant.kinds))
    assert found.broken is not None, f"{mutant.name} was not found in {found.states} states"
    assert mutant.finds in found.broken
    assert sum(line.startswith(("KILL", "POWER CUT", "ERROR")) for line in found.history) == len(mutant.kinds)
