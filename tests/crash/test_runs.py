"""Training jobs killed at any instant and resumed with other ranks train every sample once, in the declared order."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.harness.planted.runs import MUTANTS
from tests.harness.runs.plan import Kill, LifePlan, RunPlan, Where, Whose, make_blend_plan, make_plan
from tests.harness.runs.play import Played, Runs
from tests.tiers import full

BLOCKS = 6
KILLS_A_BLOCK = 10  # 60 in all
MOST_RUNS = 12  # In so many runs each mistake is to be found
MISTAKES = [name for name, mutant in MUTANTS.items() if mutant.kind != "hang"]
LAST = LifePlan(dp=3, batch_size=2, workers=0, iterable=False, early=True, every=2, back=0, kill=None)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("runs")) as found:
        yield found


def assert_held(played: Played, how: str = "") -> None:
    again = f"scripts/sweep_resumes {how}--runs 1 --seed {played.seed}"
    assert played.kind is None, f"{played.kind}: {played.text}\nagain: {again}"


def play_block(nursery: Runs, block: int, make: Callable[[int], RunPlan], how: str = "") -> None:
    kills, seed = 0, 1000 * block
    while kills < KILLS_A_BLOCK:
        played = nursery.play(make(seed))
        assert_held(played, how)
        kills += sum(played.kills.values())
        seed += 1


@pytest.mark.parametrize("block", [0, *full(*range(1, BLOCKS))])
def test_killed_and_resumed_runs_train_every_sample_once_in_order(block: int, nursery: Runs) -> None:
    play_block(nursery, block, make_plan)


@pytest.mark.full
@pytest.mark.parametrize("block", range(2))  # 20 more over blends
def test_killed_and_resumed_blends_train_no_sample_twice_and_none_is_passed_over(block: int, nursery: Runs) -> None:
    play_block(nursery, block, make_blend_plan, "--blend ")


def killed_once(where: Where, whose: Whose = "all", **changes: object) -> RunPlan:
    """A run whose first life is killed in the middle, at the first call that counts."""
    kill = Kill(where, 0.5, 0, 1, "before", whose, 0.0)
    first = LifePlan(dp=2, batch_size=1, workers=0, iterable=False, early=False, every=2, back=0, kill=kill)
    run = replace(make_plan(0), samples=80, per_chunk=4, unit=4, window=1, limit=80, indices=None)
    lives = (replace(first, **changes), LAST)  # type: ignore[arg-type]
    return replace(run, pace=("--max-ahead", "2"), deaths=(), keep=2, lives=lives)


@pytest.mark.few(2)
@pytest.mark.parametrize("where", ["start", "checkpoint", "publish", "any", "end"])
def test_kill_falls_where_it_is_planned(where: Where, nursery: Runs) -> None:
    played = nursery.play(killed_once(where))
    assert_held(played)
    assert played.kills == {where: 1}
    assert played.deleted >= 5


@pytest.mark.few(2)
@pytest.mark.parametrize(("whose", "iterable"), [("all", True), ("job", False), ("one", False), ("one", True)])
def test_run_with_loader_workers_is_resumed_at_once(whose: Whose, iterable: bool, nursery: Runs) -> None:
    # Of a rank that is killed alone, the workers live on for seconds, beside those who continue.
    played = nursery.play(killed_once("step", whose, workers=2, iterable=iterable))
    assert_held(played)
    assert played.kills == {"step": 1}


def test_what_the_last_ranks_left_over_is_kept_for_others(nursery: Runs) -> None:
    # 72 of 78 samples are a multiple of 3 * 3; the stream continues, and with it the producer that deletes.
    run = replace(killed_once("end", "job", dp=3, batch_size=3), samples=400, limit=78, window=0, keep=1)
    last = replace(LAST, dp=1, batch_size=1)
    assert_held(nursery.play(replace(run, pace=("--rate", "250"), lives=(run.lives[0], last))))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MISTAKES)
def test_harness_finds_mistake(name: str, nursery: Runs) -> None:
    mutant = MUTANTS[name]
    for seed in range(MOST_RUNS):
        played = nursery.play(mutant.plan(seed), name)
        assert played.kind in (None, mutant.kind, *mutant.besides.split()), played.text
        if played.kind == mutant.kind:
            return
    pytest.fail(f"not found in {MOST_RUNS} runs")


@pytest.mark.full
def test_hang_tells_who_waits_for_what(nursery: Runs) -> None:
    run = killed_once("step", dp=3)
    played = nursery.play(replace(run, patience_s=8.0), "a rank that stops")
    assert played.kind == "hang"
    assert "is reading, step" in played.text
    assert "is waiting for the other ranks, step" in played.text
    assert "the producer: " in played.text
