"""A sample of the fuzzing, the inputs that are kept, and proof that planted bugs are found: see `fuzz.sweep`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyshard.inspection.verification import verify
from tests.harness.fuzz import sweep as fuzz
from tests.harness.fuzz.damage import ARRAYS, STREAMS, Damaged
from tests.harness.planted.fuzz import MUTANTS, planted
from tests.tiers import full

SEED = 0
MOST = 2500  # Cases in which a planted bug has to be found; the same ones break nothing without it, as the samples show
SAMPLES = {"formats": 4000, "rows": 1000, "batches": 300, "foreign": 300, "states": 600, "cursors": 100, "streams": 160}
SAMPLES |= {"arrays": 60, "descriptions": 2500}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with fuzz.quiet():
        yield


@pytest.mark.parametrize("name", [*STREAMS, ARRAYS.name])
def test_stream_is_in_order_before_it_is_damaged(name: str, tmp_path: Path) -> None:
    known = (STREAMS | {ARRAYS.name: ARRAYS})[name]
    known.put(tmp_path / "stream")
    assert not verify(tmp_path / "stream", None if known.native else known.per_chunk).count("damage")
    nothing = Damaged([], False)
    assert [fuzz.look_at(tmp_path / "stream", known, nothing, look) for look in fuzz.LOOKS] == [None] * len(fuzz.LOOKS)


@pytest.mark.parametrize("part", [0, *full(1)], ids=["first", "rest"])
@pytest.mark.parametrize("target", SAMPLES)
def test_sample_of_each_target_breaks_nothing(target: str, part: int, tmp_path: Path) -> None:
    cases = fuzz.Cases(tmp_path)
    count = SAMPLES[target]
    numbers = range(count // 4, count) if part else range(count // 4)
    found = [cases.run(target, SEED, number) for number in numbers]
    assert [(number, one.broken) for number, one in zip(numbers, found, strict=True) if one.broken is not None] == []
    assert any(one.taken for one in found) or target == "cursors" or (target == "arrays" and not part)


@pytest.mark.parametrize("one", [*fuzz.inputs()], ids=lambda one: f"{one.target}-{one.why[:40]}")
def test_input_that_is_kept(one: fuzz.Input, tmp_path: Path) -> None:
    fuzz.run_input(one, tmp_path)


@pytest.mark.parametrize("recipe", [*fuzz.recipes()], ids=lambda recipe: f"{recipe.stream}-{recipe.why[:60]}")
def test_damaged_stream_that_is_kept(recipe: fuzz.Recipe, tmp_path: Path) -> None:
    assert fuzz.run_recipe(recipe, tmp_path) is None


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "a pipe is waited for":
        monkeypatch.setattr(fuzz, "DEADLINE_S", 1.0)
    mutant = MUTANTS[name]
    with planted(name):
        found = next((one for one in _broken(mutant.target, tmp_path) if mutant.words in one), None)
    assert found is not None


def _broken(target: str, place: Path) -> Iterator[str]:
    if target == "corpus":
        yield from filter(None, (fuzz.run_recipe(recipe, place) for recipe in fuzz.recipes()))
        return
    cases = fuzz.Cases(place)
    yield from filter(None, (cases.run(target, SEED, number).broken for number in range(MOST)))
