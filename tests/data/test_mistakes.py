"""Mistakes that are easily made in a training script, and what the data set says of them."""

import gc
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import BlendedDataset, ChunkWriter
from lazyshard.errors import ConfigInvalid
from tests.data.runs import open_rank, read
from tests.data.workers import DEADLINE_S, ids
from tests.stream.streams import produce
from tests.tiers import full


@pytest.mark.filterwarnings("ignore:Exception in thread QueueFeederThread:pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "rank", "options"),
    [
        (DataLoader, 0, {"num_workers": 1}),
        (DataLoader, 1, {"shuffle": True}),
        (DataLoader, 0, {"batch_size": None}),
        (StatefulDataLoader, 1, {}),
        *full((StatefulDataLoader, 0, {"shuffle": True})),
    ],
)
def test_a_forgotten_sampler_is_refused_at_once(kind: Any, rank: int, options: dict[str, Any], tmp_path: Path) -> None:
    dataset = open_rank(produce(tmp_path / "s", 16, 4), rank, 2, batch_size=2)
    blend = BlendedDataset([(open_rank(tmp_path / "s", rank, 2), 1)], batch_size=2)
    for data, name in ((dataset, "dataset"), (blend, "blend")):
        loader = kind(data, **{"batch_size": 2, "collate_fn": ids, **options})
        assert len(loader) > 1
        with pytest.raises(ConfigInvalid) as raised:
            next(iter(loader))
        assert (raised.value.dp_rank, raised.value.dp_size) == (rank, 2)
        assert f"sampler={name}.rank_indices" in str(raised.value)
        del loader, raised
    # Torch has started its workers by then, and ends them with the error.
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(DEADLINE_S)


def test_who_deals_samples_out_or_reads_them_all_is_not_refused(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 16, 4)
    options: dict[str, Any] = {"batch_size": 2, "collate_fn": ids}
    assert [*chain.from_iterable(DataLoader(open_rank(stream), **options))] == list(range(16))
    ranks = [open_rank(stream, rank, 2, batch_size=2, layout="strided") for rank in (0, 1)]
    assert [[dataset[index]["id"] for index in range(2)] for dataset in ranks] == [[0, 4], [0, 4]]
    for rank, dataset in enumerate(ranks):
        share: Any = {"num_processes": 2, "process_index": rank, "rng_types": []}
        for loader in (
            DataLoader(dataset, sampler=DistributedSampler(dataset, 2, rank, shuffle=True), **options),
            prepare_data_loader(DataLoader(dataset, shuffle=True, **options), **share),
            prepare_data_loader(DataLoader(dataset, **options), **share),
        ):
            assert len([*chain.from_iterable(loader)]) == 8


def test_part_of_another_rank_is_told_once_by_who_reads_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = produce(tmp_path / "s", 16, 4)
    first, second = (open_rank(stream, rank, 2) for rank in (0, 1))
    assert all(first[index] for index in first.rank_indices)
    assert caplog.messages == []
    assert all(second[index] for index in first.rank_indices)
    (message,) = caplog.messages
    assert all(fact in message for fact in ("rank 1 of 2 ", "index 0, ", "to rank 0"))


def test_another_batch_size_is_told_on_a_live_stream_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = produce(tmp_path / "s", 16, 4, end=False)
    dataset = open_rank(stream, max_total_samples=100, batch_size=2)
    for start in (0, 2):
        assert len(dataset.__getitems__([start, start + 1])) == 2
    assert caplog.messages == []
    for start in (4, 8):
        assert len(dataset.__getitems__(list(range(start, start + 4)))) == 4
    assert len(caplog.messages) == 1
    assert "of 4, batch_size is 2" in caplog.messages[0]
    caplog.clear()
    produce(stream, 16, 4)
    for count, told in ((None, 0), (16, 0), (32, 1)):
        ended = open_rank(stream, batch_size=2, num_samples=count)
        assert len(ended) == (count or 16)
        assert len(ended.__getitems__(list(range(4)))) == 4
        assert len(caplog.messages) == told


def test_next_epoch_and_samples_past_the_maximum_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = produce(tmp_path / "s", 8, 4, end=False)
    dataset = open_rank(stream, max_total_samples=20)
    assert len(dataset) == 20
    produce(stream, 10, 4)
    assert read([dataset]) == [[*range(10), *range(10)]]
    assert read([open_rank(stream, max_total_samples=6)]) == [list(range(6))]
    facts = (("10 samples", "next epoch"), (str(stream), "10 samples", "max_total_samples is 6"))
    for message, told in zip(caplog.messages, facts, strict=True):
        assert all(fact in message for fact in told)


MADE = {"recipe": {"balance": 2, "micro_batch_size": 2, "length_field": "length", "cost_per_token": 1.0}}


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"shuffle_window": 2}, ["shuffle_window=2"]),
        ({"unit": "sample"}, ["unit='sample'"]),
        ({"batch_size": 3}, ["batch_size=3"]),
        # The order in which rows were dealt; and one rank says it for all; and other streams.
        ({"batch_size": 4, "unit": 4}, []),
        ({"rank": 1, "shuffle_window": 2}, []),
        ({"source": {"recipe": {"shuffle": 8}}, "shuffle_window": 2}, []),
    ],
)
def test_an_order_that_undoes_the_deal_is_said_once(
    arguments: dict[str, Any], facts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream, source = tmp_path / "s", arguments.pop("source", MADE)
    with ChunkWriter(stream, 4) as writer:
        for number in range(16):
            writer.write({"id": number}, source=source)
    read([open_rank(stream, **{"dp": 2, "batch_size": 2, **arguments})])
    said = [message for message in caplog.messages if "dealt by cost" in message]
    assert len(said) == bool(facts)
    assert all(fact in said[0] and str(stream) in said[0] for fact in facts)
