"""Hugging Face's Trainer and accelerate continue in the middle: by skipping, or with other ranks by the state."""

import importlib.util
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.data.runs import open_ranks, read
from tests.harness.processes.nursery import Nursery
from tests.stream.streams import produce

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("trainers"), "tests.data.resuming_trainers") as nursery:
        yield nursery


def train(runs: list[dict[str, Any]]) -> Any:
    from tests.data import resuming_trainers

    return resuming_trainers.train(runs)


@pytest.mark.parametrize("kind", ["trainer", "accelerate"])
def test_trainer_goes_on_with_as_many_ranks_and_with_others(trainers: Nursery, tmp_path: Path, kind: str) -> None:
    # Ten chunks of eight: 80 rows.
    stream = produce(tmp_path / "s", 80, 8)
    common: dict[str, Any] = {"stream": str(stream), "from": None, "begin": 0, "rows": 80, "save": 4, "stop": 6}

    def behind(folder: str, step: int) -> dict[str, Any]:
        return {"from": str(tmp_path / folder / f"checkpoint-{step}"), "begin": step}

    def run(name: str, rank: int, ranks: int, **options: Any) -> dict[str, Any]:
        return common | {"with": kind, "rank": rank, "ranks": ranks, "folder": str(tmp_path / name)} | options

    runs = [
        # Two ranks of which one is looked at: 8 rows a step, of which 4 are its. Lost two steps after a checkpoint.
        run("a", 0, 2),
        run("b", 0, 2, **behind("a", 4) | {"with": f"{kind}-skips", "stop": 10}),
        run("c", 0, 2, **behind("a", 4) | {"stop": 10, "save": 8}),
        # Again in the same part, behind a resume.
        run("d", 0, 2, **behind("c", 8) | {"stop": 10, "save": 20}),
        # Alone from there on: half as many rows a step, so twelve steps are left of the 80 rows.
        run("e", 0, 1, **behind("a", 4) | {"stop": 16, "save": 20}),
    ]
    first, *same, alone = trainers.result(train, runs)
    whole = read(open_ranks(stream, 2, batch_size=2, shuffle_window=1, num_samples=80))
    steps = [whole[0][at : at + 4] for at in range(0, 40, 4)]
    assert first == steps[:6]
    assert same == [steps[4:], steps[4:], steps[8:]]
    assert [len(step) for step in alone] == [4] * 12
    before = set(chain(whole[0][:16], whole[1][:16]))
    assert sorted(chain(*alone)) == sorted(set(range(80)) - before)
