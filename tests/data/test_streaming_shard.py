"""`streaming_shard`: accelerate's own sharding, before anything expensive; its state, its workers, its epochs."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import streaming_shard
from lazyshard.errors import BadSample, SkipSample, StateInvalid, StateMismatch
from tests.stream.streams import raised, refusal_of

# Hugging Face's torch format
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")


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


@pytest.mark.parametrize(
    ("options", "of_nine"),
    [
        ({"strided": True}, [[0, 2, 4, 6, 8, 1], [1, 3, 5, 7, 0, 2]]),
        ({"even_batches": False}, [[0, 1, 4, 5, 8], [2, 3, 6, 7]]),
        ({"strided": True, "drop_last": True}, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_every_element_is_one_shards(options: dict[str, Any], of_nine: list[list[int]]) -> None:
    """With the options that accelerate does not have."""
    assert [list(streaming_shard(range(9), 2, index, 2, **options)) for index in range(2)] == of_nine
    for shards, size, total in itertools.product((1, 2, 3), (1, 2, 4), range(30)):
        ours = [streaming_shard(range(total), shards, index, size, **options) for index in range(shards)]
        found = list(map(list, ours))
        assert [*map(len, ours)] == [*map(len, found)]
        elements = sorted(itertools.chain(*found))
        if options == {"strided": True}:
            assert len({*map(len, found)}) == 1
            elements = sorted({*elements})
        assert elements == [*range(total - total % (shards * size) if "drop_last" in options else total)]


def test_impossible_numbers_are_refused() -> None:
    wrong: dict[tuple[Any, ...], str] = {(0, 0): "num_shards", (2, 2): "index", (2, -1): "index"}
    wrong |= {(2, 0, 0): "batch_size", (2, 0, 3, True): "with split_batches, batch_size"}
    for numbers, field in wrong.items():
        refusal_of(ValueError, f"^{field} ", streaming_shard, range(9), *numbers)


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


class Shuffled(IterableDataset[dict[str, int]]):
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"id": number} for number in torch.randperm(12, generator=self.generator).tolist())


@pytest.mark.parametrize("make", [Shuffled, lambda: hugging_face(12).shuffle(5, buffer_size=8)])
def test_an_order_is_that_of_the_epoch_alike_on_all_shards(make: Callable[[], Any]) -> None:
    passes = []
    for epoch in (3, 4, 3):
        shards = [streaming_shard(make(), 2, index) for index in range(2)]
        for shard in shards:
            shard.set_epoch(epoch)
        passes.append([[row["id"] for row in shard] for shard in shards])
    assert passes[0] == passes[2] != passes[1]
    assert all(sorted(a + b) == list(range(12)) for a, b in passes)


def test_elements_of_other_shards_are_not_kept() -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    counts = []

    class Element:
        def __init__(self) -> None:
            alive.add(self)

    def elements() -> Iterator[Element]:
        for _ in range(200):
            yield Element()
            counts.append(len(alive))

    assert sum(1 for _ in streaming_shard(elements(), 10, 3, batch_size=2, drop_last=True)) == 20
    # Its own of a global batch of 20 and of the next one, and what passes by.
    assert len(counts) == 200 and max(counts) <= 8


def hugging_face(total: int = 23, files: int = 1) -> Any:
    datasets = pytest.importorskip("datasets")
    columns = {"id": list(range(total)), "text": [f"row {number}" for number in range(total)]}
    return datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=files)


TOKENIZED: list[int] = []


def tokenize(row: dict[str, Any]) -> dict[str, Any]:
    TOKENIZED.append(row["id"])
    return {"tokens": [row["id"]] * 3}


def labelled(row: dict[str, Any]) -> dict[str, Any]:
    row["labels"] = row["tokens"][1:]
    return row


def is_kept(row: dict[str, Any], divisor: int = 3) -> bool:
    return bool(row["id"] % divisor)


def counted(rows: dict[str, Any]) -> dict[str, Any]:
    return {"n": [len(rows["id"]), sum(rows["id"])]}


CHAINS: dict[str, Callable[[Any], Any]] = {
    "of the feature request": lambda rows: rows.map(tokenize).map(labelled).filter(is_kept),
    "filter first": lambda rows: rows.filter(is_kept, fn_kwargs={"divisor": 4}).map(tokenize, remove_columns="text"),
    "shuffle last": lambda rows: rows.map(tokenize).map(labelled, remove_columns=["tokens"]).shuffle(5, buffer_size=4),
    "shuffle first": lambda rows: rows.shuffle(seed=0, buffer_size=4).map(function=tokenize).filter(is_kept),
    "columns": lambda rows: rows.map(lambda one, more: {"id": one + more}, input_columns="id", fn_kwargs={"more": 7}),
    "several rows": lambda rows: rows.map(counted, batched=True, batch_size=4, remove_columns=["id", "text"]),
    "row numbers": lambda rows: rows.map(tokenize).map(lambda row, at: {"at": at}, with_indices=True),
    "torch": lambda rows: rows.map(lambda row: {"next": row["id"] + 1}).filter(is_kept).batch(2),
}


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"strided": True}])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_deals_what_hugging_face_makes_of_all_rows(name: str, options: dict[str, Any]) -> None:
    source = hugging_face().with_format("torch") if name == "torch" else hugging_face()
    everything = list(CHAINS[name](source))
    for index in range(3):
        shard = CHAINS[name](streaming_shard(source, 3, index, 2, **options))
        assert repr(list(shard)) == repr(list(streaming_shard(everything, 3, index, 2, **options)))


def test_a_map_is_called_for_the_rows_of_a_shard_only_and_a_filter_after_it_if_shards_may_differ_in_length() -> None:
    def calls(chain: Callable[[Any], Any], **options: Any) -> list[list[int]]:
        found = []
        for index in range(4):
            TOKENIZED.clear()
            rows = list(chain(streaming_shard(hugging_face(40), num_shards=4, index=index, **options)))
            found.append([row["id"] for row in rows])
            assert {*found[-1]} <= {*TOKENIZED}
            assert len(TOKENIZED) == expected
        return found

    expected = 10
    assert calls(lambda rows: rows.map(tokenize))[1] == [*range(1, 40, 4)]
    kept = calls(CHAINS["of the feature request"], even_batches=False)
    assert [len(one) for one in kept] == [6, 7, 7, 6]
    assert sorted(itertools.chain(*kept)) == [number for number in range(40) if number % 3]
    # With shards of equal length, a filter after the map needs all of its results, and one before it none.
    expected = 40
    assert {len(one) for one in calls(CHAINS["of the feature request"])} == {7}
    expected = 7
    assert {len(one) for one in calls(lambda rows: rows.filter(is_kept).map(tokenize))} == {7}


def test_batches_are_of_the_rows_of_a_shard() -> None:
    def opened(index: int, size: int, **options: Any) -> Any:
        rows = streaming_shard(hugging_face(24), 2, index, 4).map(tokenize)
        return rows.batch(size, **options).map(lambda batch: {"least": min(batch["id"])}, remove_columns="text")

    whole = [list(opened(index, 4)) for index in range(2)]
    unsharded = hugging_face(24).map(tokenize).batch(4)
    assert [batch for pair in zip(*whole, strict=True) for batch in pair] == list(
        unsharded.map(lambda batch: {"least": min(batch["id"])}, remove_columns="text")
    )
    assert [batch["id"] for batch in opened(1, 5)] == [[4, 5, 6, 7, 12], [13, 14, 15, 20, 21], [22, 23]]
    assert [batch["least"] for batch in opened(0, 5, drop_last_batch=True)] == [0, 9]
    raised(ValueError, lambda: opened(0, 4).map(tokenize, batched=True))
    assert [hasattr(opened(0, 4), name) for name in ("map", "filter", "shuffle", "batch")] == [True, *[False] * 3]


class Doubling:
    """A data set with a `map` of its own and none of the other methods."""

    def __init__(self, *functions: Callable[[int], int]) -> None:
        self.functions = functions

    def __iter__(self) -> Iterator[int]:
        for number in range(9):
            for function in self.functions:
                number = function(number)
            yield number

    def map(self, function: Callable[[int], int]) -> "Doubling":
        return Doubling(*self.functions, function)


def test_a_chain_has_the_methods_of_its_source() -> None:
    def methods(shard: Any) -> list[str]:
        return [name for name in ("map", "filter", "shuffle", "batch", "take") if hasattr(shard, name)]

    assert methods(streaming_shard(hugging_face(), 2, 0)) == ["map", "filter", "shuffle", "batch"]
    assert methods(streaming_shard(Doubling(), 2, 0).map(lambda number: number * 2)) == ["map"]
    assert list(streaming_shard(Doubling(), 2, 1).map(lambda number: number * 2)) == [2, 6, 10, 14, 0]
    assert methods(streaming_shard(Shuffled(), 2, 0)) == methods(streaming_shard(range(9), 2, 0)) == []
    raised(AttributeError, lambda: streaming_shard(Shuffled(), 2, 0).map(abs))
    assert methods(streaming_shard(hugging_face(), 2, 0, transform=tokenize)) == []
    raised(ValueError, streaming_shard(hugging_face(), 2, 0).shuffle, buffer_size=4)


SOURCES: dict[str, Callable[[], Any]] = {
    "a list": lambda: [*range(53)],
    "with a state": lambda: Places(53),
    "Hugging Face's": lambda: hugging_face(53),
    "shuffled": lambda: hugging_face(53),
}


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"even_batches": False}, {"strided": True}])
@pytest.mark.parametrize("name", ["a list", "with a state", *(name for name in CHAINS if name != "torch"), "batches"])
def test_a_state_goes_on_exactly_wherever_it_was_taken(name: str, options: dict[str, Any]) -> None:
    def opened() -> Any:
        shard = streaming_shard(SOURCES[name]() if name in SOURCES else hugging_face(), 2, 1, 3, **options)
        return shard.map(tokenize).batch(2) if name == "batches" else CHAINS.get(name, lambda rows: rows)(shard)

    whole = list(opened())
    for taken in range(len(whole) + 1):
        elements, after = resumed(opened, taken)
        already = Places.read
        assert elements + list(after) == whole
        if name == "with a state" and options in ({"drop_last": True}, {"even_batches": False}):
            # What knows its place is not read from the start.
            assert Places.read - already <= 53 - 6 * max(0, (taken - 1) // 3)
        assert list(after) == whole


def test_rows_of_which_a_step_failed_were_not_handed_out() -> None:
    def fails(batch: dict[str, Any]) -> dict[str, Any]:
        return {"inverse": 1 / (batch["id"][0] - 4)}

    shard = streaming_shard(hugging_face(8), 1, 0).batch(2).map(fails)
    elements = iter(shard)
    assert [next(elements)["id"], next(elements)["id"]] == [[0, 1], [2, 3]]
    raised(ZeroDivisionError, lambda: next(elements))
    after = streaming_shard(hugging_face(8), 1, 0).batch(2)
    after.load_state_dict(shard.state_dict())
    assert [batch["id"] for batch in after] == [[4, 5], [6, 7]]


@pytest.mark.parametrize("options", [{}, {"even_batches": False}, {"drop_last": True}])
@pytest.mark.parametrize("kind", SOURCES)
def test_other_numbers_of_shards_go_on_after_whole_global_batches(kind: str, options: dict[str, Any]) -> None:
    def shards(number: int, size: int) -> list[Any]:
        found: list[Any] = [streaming_shard(SOURCES[kind](), number, at, size, **options) for at in range(number)]
        return [shard.shuffle(seed=1, buffer_size=9) for shard in found] if kind == "shuffled" else found

    def dealt(passes: list[Any], size: int, batches: int = 53) -> list[Any]:
        """The order of all shards in global batches: `size` elements of each in turn."""
        rows = [row for _ in range(batches) for one in passes for row in itertools.islice(one, size)]
        return [row["id"] if isinstance(row, dict) else row for row in rows]

    whole = dealt([iter(shards(1, 1)[0])], 1)
    assert sorted(whole) == [*range(53)]
    for numbers in (((3, 2), (2, 4), (4, 3)), ((1, 5), (5, 4), (3, 2)), ((4, 3), (1, 5), (2, 4))):
        done, states, passes, size = list[Any](), list[Any](), list[Any](), 0
        for number, size in numbers:
            now = shards(number, size)
            for shard in now if states else ():
                shard.load_state_dict(states[-1])
            passes = [iter(shard) for shard in now]
            done += dealt(passes, size, batches=1)
            states = [shard.state_dict() for shard in now]
            assert len({repr({**state, "index": 0}) for state in states}) == 1
        assert done == whole[: len(done)]
        rest, each = whole[len(done) :], len(passes) * size
        if "drop_last" in options:
            rest = rest[: len(rest) // each * each]
        elif not options:
            rest += whole[: -len(rest) % each]
        assert dealt(passes, size) == rest


def test_other_numbers_of_shards_go_on_in_workers() -> None:
    def loader(number: int, index: int) -> Any:
        shard = streaming_shard(hugging_face(48, files=2), number, index, 2).map(tokenize).batch(2)
        return StatefulDataLoader(shard, None, num_workers=2)

    def ids(batches: Iterator[Any]) -> list[int]:
        return [number for batch in batches for number in batch["id"]]

    before = [loader(2, index) for index in range(2)]
    begun = [ids(itertools.islice(iter(one), 4)) for one in before]
    after = [loader(4, index) for index in range(4)]
    for one in after:
        one.load_state_dict(before[0].state_dict())
    assert sorted(itertools.chain(*begun, *(ids(iter(one)) for one in after))) == [*range(48)]


def test_other_numbers_of_shards_are_refused_within_a_global_batch_and_after_a_filter_of_one_shard() -> None:
    def state(rows: Any, taken: int) -> Any:
        list(itertools.islice(iter(rows), taken))
        return rows.state_dict()

    other = streaming_shard(range(40), 3, 2, 2)
    raised(StateMismatch, other.load_state_dict, state(streaming_shard(range(40), 2, 0, 2), 3))
    other.load_state_dict(state(streaming_shard(range(40), 2, 0, 2), 4))
    assert list(other)[:2] == [12, 13]
    raised(StateMismatch, other.load_state_dict, state(streaming_shard(range(40), 2, 0, 2, strided=True), 4))
    uneven = CHAINS["of the feature request"](streaming_shard(hugging_face(), 3, 0, even_batches=False))
    raised(StateMismatch, uneven.load_state_dict, state(streaming_shard(hugging_face(), 2, 0, even_batches=False), 1))
