"""Splits of a stream: each sample is in one of them, drawn exactly once, live and ended, resumed by other ranks."""

from pathlib import Path
from typing import Any, Literal

import pytest

from lazyshard import BlendedDataset, Filter, LazyShardedDataset, Order, Pack
from lazyshard.errors import StateMismatch, WaitTimeout
from tests.cli.commands import lazyshard
from tests.data.runs import all_written, continued, open_rank, open_sequences, write_rows
from tests.plan.oracle import split_owners
from tests.stream.streams import go_on, produce, raised

SPLITS = (7, 2, 1)
Name = Literal["train", "validation", "test"]
NAMES: tuple[Name, ...] = ("train", "validation", "test")


def of(split: Name, total: int) -> list[int]:
    return [sample for sample, owner in enumerate(split_owners(SPLITS, total)) if NAMES[owner] == split]


def open_split(directory: Path, split: Name, rank: int = 0, ranks: int = 1, **given: Any) -> LazyShardedDataset:
    order = Order(split=split, splits=SPLITS, **given.pop("order", {}))
    return LazyShardedDataset(directory, dp_rank=rank, dp_size=ranks, order=order, **given)


def ids(dataset: LazyShardedDataset) -> list[int]:
    return [dataset[index]["id"] for index in dataset.rank_indices]


@pytest.mark.parametrize("order", [{}, {"shuffle_window": 2}, {"unit": "sample"}, {"unit": "batch"}, {"unit": "auto"}])
@pytest.mark.parametrize("split", NAMES)
def test_ranks_draw_each_sample_of_their_split_once(tmp_path: Path, split: Name, order: dict[str, Any]) -> None:
    stream = produce(tmp_path / "stream", 240, per_chunk=7)
    datasets = [open_split(stream, split, rank, 3, order=order) for rank in range(3)]
    drawn = [sample for dataset in datasets for sample in ids(dataset)]
    assert len(drawn) + (datasets[0].leftover or 0) == len(of(split, 240))
    assert sorted(drawn) == sorted(set(drawn) & set(of(split, 240)))


def test_a_split_of_a_live_stream_stays_as_the_stream_grows_and_waits_for_its_own_samples(tmp_path: Path) -> None:
    stream = produce(tmp_path / "stream", 20, end=False)
    test = open_split(stream, "test", num_samples=4, max_wait=0.2, order={"unit": "sample"})
    assert [test[index]["id"] for index in (0, 1)] == of("test", 40)[:2] == [9, 19]
    raised(WaitTimeout, lambda: test[2])
    go_on(stream, 40)
    assert [test[index]["id"] for index in range(4)] == of("test", 40)


def test_a_run_resumed_by_other_ranks_draws_the_rest_of_its_split(tmp_path: Path) -> None:
    stream = produce(tmp_path / "stream", 200, per_chunk=7)
    before = [open_split(stream, "train", rank, 2, order={"shuffle_window": 1}) for rank in range(2)]
    begun = [dataset[index]["id"] for dataset in before for index in list(dataset.rank_indices)[:30]]
    state = before[0].state_dict(60)
    assert state["split"] == [list(SPLITS), 0]
    after = [open_split(stream, "train", rank, 5, order={"shuffle_window": 1}) for rank in range(5)]
    rest = [sample for dataset in after for sample in ids(continued(dataset, state))]
    assert sorted(begun + rest) == of("train", 200)
    for other in (open_split(stream, "test", order={"shuffle_window": 1}), open_rank(stream, shuffle_window=1)):
        assert raised(StateMismatch, other.load_state_dict, state).field == "split"


def test_rows_that_take_the_place_of_others_are_of_the_same_split(tmp_path: Path) -> None:
    stream = produce(tmp_path / "stream", 100, per_chunk=50)
    drawn = ids(open_split(stream, "validation", steps=Filter(lambda row: row["id"] % 10 == 3)))
    assert len(drawn) == 20
    assert set(drawn) <= set(of("validation", 100))
    assert {sample % 10 for sample in drawn} == {3}


def test_blends_and_sequences_draw_from_splits(tmp_path: Path) -> None:
    one, other = (produce(tmp_path / name, 100) for name in ("one", "other"))
    blend = BlendedDataset([(open_split(one, "test"), 1.0), (open_split(other, "validation"), 2.0)])
    assert sorted(blend[index]["id"] for index in range(30)) == sorted(of("test", 100) + of("validation", 100))

    stream = write_rows(tmp_path / "packs", [1 + number % 4 for number in range(60)])
    packs = all_written(open_sequences(open_split(stream, "train"), Pack(8)))
    assert sorted(sample for pack in packs for sample in pack) == of("train", 60)


def test_trace_and_audit_know_the_split(tmp_path: Path) -> None:
    stream = produce(tmp_path / "stream", 40)
    training = open_split(stream, "train", batch_size=4, consumer="run", order={"micro_batches_per_step": 1})
    batches = training.batches(collate_fn=list)
    assert len(list(batches)) == 7
    batches.commit()
    traced = [lazyshard("trace", str(stream), "--sample", sample, "--json").stdout for sample in (0, 3, 9)]
    assert ["other split" in one for one in traced] == [False, True, True]
    audited = lazyshard("audit", str(stream), "--json")
    assert '"other_splits": {"samples": 12, "ranges": [[3, 4], [6, 7], [9, 10]' in audited.stdout
    assert '"trained": 28' in audited.stdout
    assert '"consistent": true' in audited.stdout
