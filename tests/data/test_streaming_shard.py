"""`streaming_shard`: accelerate's own sharding, before anything expensive; its state, its workers, its epochs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import streaming_shard
from lazyshard.errors import BadSample, NothingKept, SkipSample, StateInvalid, StateMismatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_elements_and_lengths_are_those_of_accelerate(shards: int, split_batches: bool, drop_last: bool) -> None:
    for size, total in itertools.product(range(1, 7), range(30)):
        if split_batches and size % shards:
            continue
        numbers: Any = list(range(total))
        for index in range(shards):
            theirs = IterableDatasetShard(numbers, size, drop_last, shards, index, split_batches)
            ours = streaming_shard(numbers, shards, index, size, split_batches, drop_last)
            assert list(ours) == list(theirs)
            # With split_batches, theirs counts as without.
            assert len(ours) == len(list(theirs))
            if not split_batches:
                assert len(ours) == len(theirs)


def test_only_ones_own_elements_are_transformed() -> None:
    seen: list[list[int]] = [[], [], [], []]
    for index in range(4):

        def transform(element: int, index: int = index) -> int:
            seen[index].append(element)
            return -element

        assert list(streaming_shard(range(40), 4, index, transform=transform)) == [-n for n in range(index, 40, 4)]
    assert [len(elements) for elements in seen] == [10, 10, 10, 10]


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
    shard = streaming_shard(range(9), 2, 0, 2, transform=without(*left_out))
    found = list(shard)
    assert found == [[element] for element in handed_out]
    assert (len(found), shard.skipped) == (len(shard), skipped)
    assert len({id(one) for one in found}) == len(found)
    assert f"{left_out[0]} is too long; what is made of another element is used instead" in caplog.text


@pytest.mark.parametrize("left_out", [(0,), (1, 4, 5), (5, 8), (0, 1, 4, 5)])
def test_a_state_among_skipped_elements_goes_on_exactly(left_out: tuple[int, ...]) -> None:
    whole = list(streaming_shard(range(9), 2, 0, 2, transform=without(*left_out)))
    for taken in range(len(whole) + 1):
        before = streaming_shard(range(9), 2, 0, 2, transform=without(*left_out))
        begun = list(itertools.islice(before, taken))
        after = streaming_shard(range(9), 2, 0, 2, transform=without(*left_out))
        after.load_state_dict(before.state_dict())
        assert begun + list(after) == whole


def test_shards_are_equally_long_in_workers_too() -> None:
    shards = [streaming_shard(range(9), 2, index, 2, transform=without(0, 4, 8)) for index in range(2)]
    assert [len(list(DataLoader(shard, batch_size=None, num_workers=2))) for shard in shards] == [6, 6]


def test_a_shard_of_which_nothing_is_left_is_an_error() -> None:
    with pytest.raises(NothingKept):
        list(streaming_shard(range(4), 1, 0, transform=without(*range(4))))
    with pytest.raises(NothingKept) as caught:
        list(streaming_shard(itertools.count(), 1, 0, transform=without(*range(10_000))))
    assert caught.value.count == 10_000


def test_an_iterable_that_raises_it_itself_is_told_where_to_raise_it() -> None:
    with pytest.raises(BadSample, match="transform=") as caught:
        list(streaming_shard(map(without(1), range(4)), 2, 0))
    assert isinstance(caught.value.__cause__, SkipSample)


def test_an_element_that_cannot_be_transformed_was_not_handed_out() -> None:
    before = streaming_shard([1, 2, 0, 4], 1, 0, transform=lambda element: 8 // element)
    elements = iter(before)
    assert [next(elements), next(elements)] == [8, 4]
    with pytest.raises(ZeroDivisionError):
        next(elements)
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
        before = opened()
        elements = list(itertools.islice(iter(before), taken))
        after = opened()
        after.load_state_dict(before.state_dict())
        assert elements + list(after) == whole
        # And the pass behind that one begins at the start again.
        assert list(after) == whole


def test_what_knows_its_place_is_not_read_from_the_start() -> None:
    before = streaming_shard(Places(1000), 2, 0, 2, drop_last=True)
    next(itertools.islice(iter(before), 400, None))
    after = streaming_shard(Places(1000), 2, 0, 2, drop_last=True)
    after.load_state_dict(before.state_dict())
    already = Places.read
    list(after)
    assert Places.read - already == 200


def test_states_of_others_are_refused() -> None:
    state = streaming_shard(range(9), 3, 1).state_dict()
    with pytest.raises(StateMismatch, match="the state is of index=1, this shard has index=0"):
        streaming_shard(range(9), 3, 0).load_state_dict(state)
    with pytest.raises(StateInvalid, match="expected a state of streaming_shard, format 1"):
        streaming_shard(range(9), 3, 1).load_state_dict({"format": 1})


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_give_the_order_of_one_process(workers: int) -> None:
    shard = streaming_shard(range(50), 2, 1, 4)
    loader = DataLoader(shard, batch_size=4, num_workers=workers, collate_fn=list)
    assert [element for batch in loader for element in batch] == list(streaming_shard(range(50), 2, 1, 4))


def test_a_stateful_loader_with_workers_goes_on() -> None:
    def loader() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(streaming_shard(range(50), 2, 0, 4), batch_size=4, num_workers=2, collate_fn=list)

    whole = list(loader())
    first = loader()
    batches = list(itertools.islice(iter(first), 3))
    second = loader()
    second.load_state_dict(first.state_dict())
    assert batches + list(second) == whole


class Shuffled(IterableDataset[int]):
    """Numbers in the order of a generator, as accelerate seeds it."""

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


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    for number in range(2):
        lines = "".join(f'{{"id":{number * 20 + i}}}\n' for i in range(20))
        (tmp_path / f"{number}.jsonl").write_text(lines)
    files = [str(tmp_path / f"{number}.jsonl") for number in range(2)]
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=tmp_path / "cache")


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


def test_hugging_faces_iterable_shuffled_is_dealt_whole(rows: Any) -> None:
    orders = []
    for epoch in range(2):
        shards = [streaming_shard(rows.shuffle(seed=5, buffer_size=8), 2, index, 2) for index in range(2)]
        for shard in shards:
            shard.set_epoch(epoch)
        found = [ids(shard) for shard in shards]
        assert sorted(found[0] + found[1]) == list(range(40))
        orders.append(found)
    assert orders[0] != orders[1]


def test_hugging_faces_iterable_goes_on_by_its_own_state(rows: Any) -> None:
    whole = ids(streaming_shard(rows, 3, 1, 2))
    for taken in (0, 1, 5, 12):
        before = streaming_shard(rows, 3, 1, 2)
        elements = ids(itertools.islice(iter(before), taken))
        after = streaming_shard(rows, 3, 1, 2)
        after.load_state_dict(before.state_dict())
        assert elements + ids(after) == whole


def test_hugging_faces_iterable_deals_itself_to_workers(rows: Any) -> None:
    found = []
    for index in range(2):
        shard = streaming_shard(rows, 2, index, 2)
        loader = DataLoader(shard, batch_size=2, num_workers=2, collate_fn=list)
        found += [row["id"] for batch in loader for row in batch]
    assert sorted(found) == list(range(40))
