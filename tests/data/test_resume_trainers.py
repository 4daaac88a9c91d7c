"""Hugging Face's Trainer and accelerate continue in the middle: by skipping, or with other ranks by the state.

Trainer by the state is `tests/packaging/test_guide_programs.py`.
"""

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


def test_as_many_ranks_go_on_by_skipping_and_others_by_the_state_of_batches(trainers: Nursery, tmp_path: Path) -> None:
    # Ten chunks of eight: 80 rows, of two ranks 8 in a step. Lost two steps after a checkpoint.
    stream = produce(tmp_path / "s", 80, 8)

    def run(name: str, way: str, behind: str | None = None, **options: Any) -> dict[str, Any]:
        place = {"stream": str(stream), "folder": str(tmp_path / name)}
        begun = {"from": behind and str(tmp_path / behind / "checkpoint-4"), "begin": 4 if behind else 0}
        counts = {"ranks": 2, "rows": 80, "save": 4, "stop": 10 if behind else 6}
        return {"way": way, **place, **begun, **counts, **options}

    runs = [
        run("trainer", "trainer"),
        run("trainer skips", "trainer", "trainer"),
        run("accelerate", "accelerate"),
        run("accelerate loads", "accelerate", "accelerate"),
        # Alone from there on: half as many rows a step, so twelve steps are left of the 80 rows.
        run("accelerate alone", "accelerate", "accelerate", ranks=1, stop=16),
    ]
    *trained, alone = trainers.result(train, runs)
    whole = read(open_ranks(stream, 2, batch_size=2, shuffle_window=1, num_samples=80))
    steps = [whole[0][at : at + 4] for at in range(0, 40, 4)]
    assert trained == [steps[:6], steps[4:], steps[:6], steps[4:]]
    assert [len(step) for step in alone] == [4] * 12
    assert sorted(chain(*alone)) == sorted(set(range(80)) - {*whole[0][:16], *whole[1][:16]})
