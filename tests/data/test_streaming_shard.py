"""`streaming_shard`: accelerate's own sharding, before anything expensive; its state, its workers, its epochs."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import streaming_shard
from lazyshard.errors import BadSample, SkipSample, StateInvalid, StateMismatch
from tests.stream.streams import raised, refusal_of

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def resumed(opened: Callable[[], Any], taken: int) -> tuple[list[Any], Any]:
    """What a pass hands out before it is stopped, and the shard that continues."""
    before, after = opened(), opened()
    elements = list(itertools.islice(iter(before), taken))
    after.load_state_dict(before.state_dict())
    return elements, after


@pytest.mark.parametrize(("split_batches", "drop_last"), [(False, False), (False, True), (True, False), (True, True)])
def test_elements_and_lengths_are_those_of_accelerate(split_batches: bool, drop_last: bool) -> None:
    for shards, size, total in itertools.product((1, 2, 3), (1, 2, 3, 6), (*range(14), 29)):
        if split_batches and size % shards:
            continue
        numbers: Any = list(range(total))
        for index in range(shards):
            theirs = IterableDatasetShard(numbers, size, drop_last, shards, index, split_batches)
            ours = streaming_shard(numbers, shards, index, size, split_batches, drop_last)
            assert list(ours) == list(theirs)
            # With split_batches, theirs counts as without.
            assert len(ours) == (len(list(theirs)) if split_batches else len(theirs))


def test_only_ones_own_elements_are_transformed() -> None:
    seen: list[int] = []

    def transform(element: int) -> int:
        seen.append(element)
        return -element

    assert list(streaming_shard(range(40), 4, 3, transform=transform)) == [-n for n in range(3, 40, 4)]
    assert seen == list(range(3, 40, 4))


def without(*left_out: int) -> Callable[[int], list[int]]:
    def transform(element: int) -> list[int]:
        if element in left_out:
            raise SkipSample(f"{element} is too long")
        return [element]

    return transform


@pytest.mark.parametrize(
    ("left_out", "handed_out", "skipped"),
    [
        ((0,), [1, 1, 4, 5, 8, 1], 2),
        ((0, 1, 4), [5, 5, 5, 5, 8, 5], 4),
        ((5, 8), [0, 1, 4, 0, 0, 0], 2),
        ((0, 8), [1, 1, 4, 5, 1, 1], 3),
    ],
)
def test_the_place_of_a_skipped_element_gets_the_next_one_so_that_shards_stay_equally_long(
    left_out: tuple[int, ...], handed_out: list[int], skipped: int, caplog: pytest.LogCaptureFixture
) -> None:
    def opened(index: int = 0) -> Any:
        return streaming_shard(range(9), 2, index, 2, transform=without(*left_out))

    shard = opened()
    found = list(shard)
    assert found == [[element] for element in handed_out]
    assert (len(found), shard.skipped) == (len(shard), skipped)
    assert len({id(one) for one in found}) == len(found)
    assert f"{left_out[0]} is too long" in caplog.text
    for taken in range(len(found) + 1):
        begun, after = resumed(opened, taken)
        assert begun + list(after) == found


def test_a_shard_of_which_nothing_is_left_is_an_error() -> None:
    raised(BadSample, lambda: list(streaming_shard(range(4), 1, 0, transform=without(*range(4)))))
    endless = streaming_shard(itertools.count(), 1, 0, transform=without(*range(10_000)))
    assert raised(BadSample, list, endless).count == 10_000
    bad = refusal_of(BadSample, "transform=", lambda: list(streaming_shard(map(without(1), range(4)), 2, 0)))
    assert isinstance(bad.__cause__, SkipSample)


def test_an_element_that_cannot_be_transformed_was_not_handed_out() -> None:
    before = streaming_shard([1, 2, 0, 4], 1, 0, transform=lambda element: 8 // element)
    elements = iter(before)
    assert [next(elements), next(elements)] == [8, 4]
    raised(ZeroDivisionError, lambda: next(elements))
    after = streaming_shard([1, 2, 0, 4], 1, 0)
    after.load_state_dict(before.state_dict())
    assert list(after) == [0, 4]


class Places:
    """A data set of numbers that knows its place, and counts what it is asked for."""

    read: ClassVar[int] = 0

    def __init__(self, total: int) -> None:
        self.total, self.start, self.at = total, 0, 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.start = self.start, 0
        while self.at < self.total:
            self.at += 1
            Places.read += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"even_batches": False}, {"strided": True}])
def test_a_state_goes_on_exactly_wherever_it_was_taken(known: bool, options: dict[str, Any]) -> None:
    def opened() -> Any:
        return streaming_shard(Places(23) if known else range(23), 2, 1, 3, **options)

    whole = list(opened())
    for taken in range(len(whole) + 1):
        elements, after = resumed(opened, taken)
        already = Places.read
        assert elements + list(after) == whole
        if known and options in ({"drop_last": True}, {"even_batches": False}):
            # What knows its place is not read from the start.
            assert Places.read - already <= 23 - 6 * max(0, (taken - 1) // 3)
        assert list(after) == whole


def test_states_of_others_are_refused() -> None:
    state = streaming_shard(range(9), 3, 1).state_dict()
    refusal_of(StateMismatch, "index=1, this shard has index=0", streaming_shard(range(9), 3, 0).load_state_dict, state)
    raised(StateInvalid, streaming_shard(range(9), 3, 1).load_state_dict, {"format": 1})


def test_workers_give_the_order_of_one_process_and_a_stateful_loader_goes_on() -> None:
    def loader(kind: Any = StatefulDataLoader) -> Any:
        return kind(streaming_shard(range(50), 2, 1, 4), batch_size=4, num_workers=3, collate_fn=list)

    left_out = [streaming_shard(range(9), 2, index, 2, transform=without(0, 8)) for index in range(2)]
    assert [len(list(DataLoader(shard, None, num_workers=2))) for shard in left_out] == [6, 6]
    whole = list(loader(DataLoader))
    assert [element for batch in whole for element in batch] == list(streaming_shard(range(50), 2, 1, 4))
    begun, after = resumed(loader, 3)
    assert begun + list(after) == whole


class Shuffled(IterableDataset[int]):
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12, generator=self.generator).tolist())


def test_a_generator_is_seeded_with_the_epoch_alike_on_all_shards() -> None:
    passes = []
    for epoch in (3, 4, 3):
        shards = [streaming_shard(Shuffled(), 2, index) for index in range(2)]
        for shard in shards:
            shard.set_epoch(epoch)
        passes.append([list(shard) for shard in shards])
    assert passes[0] == passes[2] != passes[1]
    assert all(sorted(a + b) == list(range(12)) for a, b in passes)


def test_hugging_faces_iterable_is_dealt_whole_and_goes_on_by_its_own_state(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text("".join(f'{{"id":{number * 20 + i}}}\n' for i in range(20)))
    files = [str(tmp_path / f"{number}.jsonl") for number in range(2)]
    rows = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=tmp_path / "cache")
    orders = []
    for epoch in range(2):
        shards = [streaming_shard(rows.shuffle(seed=5, buffer_size=8), 2, index, 2) for index in range(2)]
        for shard in shards:
            shard.set_epoch(epoch)
        orders.append([row["id"] for shard in shards for row in shard])
        assert sorted(orders[-1]) == list(range(40))
    assert orders[0] != orders[1]
    whole = list(streaming_shard(rows, 3, 1, 2))
    for taken in (0, 1, 5, 12):
        elements, after = resumed(lambda: streaming_shard(rows, 3, 1, 2), taken)
        assert elements + list(after) == whole
    loaders = [DataLoader(streaming_shard(rows, 2, index), None, num_workers=2) for index in range(2)]
    assert sorted(row["id"] for loader in loaders for row in loader) == list(range(40))


def test_elements_of_other_shards_are_not_kept() -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    counts = []

    class Element:
        def __init__(self) -> None:
            alive.add(self)

    class Elements(IterableDataset[Element]):
        def __iter__(self) -> Iterator[Element]:
            for _ in range(200):
                yield Element()
                counts.append(len(alive))

    assert sum(1 for _ in streaming_shard(Elements(), 10, 3, batch_size=2, drop_last=True)) == 20
    # Its own of a global batch of 20 and of the next one, and what passes by.
    assert len(counts) == 200 and max(counts) <= 8
