"""`StepGate`: the same decision on every rank, without a word between them, on real streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lazyshard import LazyShardedDataset
from lazyshard.errors import WaitTimeout
from lazyshard_swift import parallel
from lazyshard_swift.errors import StreamTooShort
from lazyshard_swift.stream import StepGate
from tests.data.options import grouped
from tests.stream.streams import produce
from tests.swift.unit.runs import refused

PER_CHUNK = 3

SETTINGS = [
    (dp, batch, accumulation, window)
    for dp in (1, 2, 3)
    for batch in (1, 2)
    for accumulation in (1, 2, 3)
    for window in (0, 2)
]


def gate(
    directory: Path, rank: int, dp: int, batch: int, window: int = 0, *, stop_at_end: bool = True, max_wait: float = 0.0
) -> StepGate:
    place: dict[str, Any] = {"dp_rank": rank, "dp_size": dp, "batch_size": batch, "layout": "strided"}
    dataset = LazyShardedDataset(
        directory, num_samples=2**50, max_wait=max_wait, **grouped(**place, shuffle_window=window)
    )
    return StepGate(dataset, stop_at_end)


def decisions(asked: StepGate, per_step: int, steps: int, first_step: int = 0) -> list[bool | str]:
    """What the gate says of each step: whether it is trained, or the name of an error."""
    found: list[bool | str] = []
    for step in range(first_step, steps):
        try:
            found.append(asked.allows(step * per_step, (step + 1) * per_step))
        except (StreamTooShort, WaitTimeout) as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.parametrize("total", [0, 3, 8, 13])
def test_what_is_decided_while_the_stream_grows_is_what_is_decided_after_its_end(tmp_path: Path, total: int) -> None:
    directory = produce(tmp_path / "s", 0, PER_CHUNK, end=False)
    gates = {
        (setting, rank): gate(directory, rank, *setting[:2], setting[3])
        for setting in SETTINGS
        for rank in range(setting[0])
    }
    trained = dict.fromkeys(gates, 0)
    for published in range(0, total + 1, PER_CHUNK):
        produce(directory, published, PER_CHUNK, end=False)
        for key, asked in gates.items():
            (_, batch, accumulation, _), _ = key
            size = batch * accumulation
            while (found := decisions(asked, size, trained[key] + 1, trained[key])) == [True]:
                trained[key] += 1
            # Never the end, as long as there may be more.
            assert found == ["WaitTimeout"]
        for setting in SETTINGS:
            assert len({trained[setting, rank] for rank in range(setting[0])}) == 1
    produce(directory, total, PER_CHUNK, end=True)
    for key, asked in gates.items():
        (dp, batch, accumulation, _), _ = key
        # A step takes so many of all samples; what is not a whole one is left over.
        steps = total // (dp * batch * accumulation)
        after: list[bool | str] = [False] * 3 if steps else ["StreamTooShort"]
        found = decisions(asked, batch * accumulation, steps + len(after), trained[key])
        assert found == [True] * (steps - trained[key]) + after, key
        assert (asked.stopped, asked.published_samples()) == (bool(steps), total)


def test_data_that_do_not_come_are_a_timeout_that_names_them(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 6, PER_CHUNK, end=False)
    asked = gate(directory, 1, 2, 1, max_wait=0.05)
    assert asked.allows(0, 3)
    # Its stripe is chunks 2 and 3. The deadline is that of each wait alone.
    for _ in range(3):
        with refused(WaitTimeout, chunk=3, directory=str(directory)) as timeout:
            asked.allows(3, 4)
        assert timeout.value.waited is not None and 0.05 <= timeout.value.waited < 5
    assert not asked.stopped
    produce(directory, 12, PER_CHUNK, end=False)
    assert asked.allows(3, 4)


@pytest.mark.parametrize("all_come", [True, False])
def test_ranks_that_all_give_up_end_with_the_error_once_they_have_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_come: bool
) -> None:
    keys: list[str] = []

    def come(key: str) -> bool:
        keys.append(key)
        return all_come

    monkeypatch.setattr(parallel, "all_come", come)
    asked = gate(produce(tmp_path / "s", 6, PER_CHUNK, end=False), 1, 2, 1, max_wait=0.01)
    with pytest.raises(WaitTimeout):
        asked.allows(3, 4)
    assert keys == [], "there is nothing to be saved, so nobody is asked"
    if not all_come:
        with pytest.raises(WaitTimeout):
            asked.allows(3, 4, saves=True)
        asked.end()
        assert not asked.stopped
        return
    assert not asked.allows(3, 4, saves=True)
    with refused(WaitTimeout, chunk=3) as timeout:
        asked.end()
    assert timeout.value is asked.gave_up
    assert (asked.stopped, len(keys)) == (True, 1)


HashStore: Any = vars(dist)["HashStore"]


def come(ranks: int, store: Any, patience: float) -> list[bool]:
    """What so many ranks of 3 find that come at the same time."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda _: parallel._all_come(store, "key", 3, patience), range(ranks)))


def test_all_ranks_or_none_find_that_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_POLL_S", 0.01)
    assert come(3, HashStore(), 60.0) == [True, True, True]
    store = HashStore()
    assert come(2, store, 0.05) == [False, False]
    # It comes when the others have given it up: it is not alone in thinking that all are there.
    assert come(1, store, 60.0) == [False]
