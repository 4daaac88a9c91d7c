"""`dataset["lengths"]`: the tokens of what each index draws, as samplers that group by length ask for them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lazyshard import LazyShardedDataset, LazyShardedStream, Order
from lazyshard.errors import LengthsMissing, LengthUnknown
from tests.data import swift_samplers
from tests.data.options import grouped
from tests.stream.lengths import put_lengths, sealed
from tests.stream.streams import foreign, produce


def length(sample: int) -> int:
    return 1 + 7 * sample % 23


def stream_of(directory: Path, samples: int, per_chunk: int = 4, *, end: bool = True) -> Path:
    return sealed(directory, [length(sample) for sample in range(samples)], per_chunk, end=end)


@pytest.mark.parametrize("layout", ["block", "strided"])
@pytest.mark.parametrize(("samples", "dp", "options"), [
    (24, 1, {}),
    (37, 3, {}),
    (37, 3, {"shuffle_window": 2, "seed": 5}),
    (37, 2, {"unit": "sample"}),
    (37, 2, {"max_total_samples": 21}),
    (13, 2, {"num_samples": 40}),
    (5, 3, {"batch_size": 1}),
])  # fmt: skip
def test_each_index_has_the_length_of_its_sample(
    layout: Any, samples: int, dp: int, options: dict[str, Any], tmp_path: Path
) -> None:
    stream_of(tmp_path / "s", samples)
    for rank in range(dp):
        dataset = LazyShardedDataset(
            tmp_path / "s", dp_rank=rank, dp_size=dp, **grouped(layout=layout, **{"batch_size": 2, **options})
        )
        lengths = dataset["lengths"]
        assert (lengths.dtype, lengths.shape) == (np.dtype(np.int32), (len(dataset),))
        for epoch in (0, 1):
            dataset.set_epoch(epoch)
            expected = [length(dataset.draw(index).sample) for index in range(len(dataset))]
            assert dataset["lengths"].tolist() == expected


def test_after_a_resume_with_other_ranks_they_are_those_of_what_is_left(tmp_path: Path) -> None:
    stream_of(tmp_path / "s", 37)
    state = LazyShardedDataset(tmp_path / "s", dp_rank=0, dp_size=2, batch_size=2).state_dict(12)
    dataset = LazyShardedDataset(tmp_path / "s", dp_rank=0, dp_size=3, batch_size=2)
    dataset.load_state_dict(state)
    lengths = dataset["lengths"].tolist()
    assert lengths == [length(dataset.draw(index).sample) for index in range(len(dataset))]
    assert [lengths[index] for index in dataset.rank_indices] == [length(row["id"]) for row in _rows(dataset)]


def _rows(dataset: LazyShardedDataset) -> list[Any]:
    return [dataset[index] for index in dataset.rank_indices]


def test_what_was_measured_counts(tmp_path: Path) -> None:
    put_lengths(produce(tmp_path / "s", 4), [10, 20], [30, 40])
    dataset = LazyShardedDataset(tmp_path / "s", dp_rank=0, dp_size=1)
    assert dataset["lengths"].tolist() == [10, 20, 30, 40]
    # They are not sent to workers.
    assert "_tokens" not in pickle.loads(pickle.dumps(dataset)).__dict__
    assert dataset["lengths"].tolist() == [10, 20, 30, 40]


def test_length_beyond_32_bits_is_whole(tmp_path: Path) -> None:
    sealed(tmp_path / "s", [2**32 - 1, 1])
    assert LazyShardedDataset(tmp_path / "s", dp_rank=0, dp_size=1)["lengths"].tolist() == [2**32 - 1, 1]


def test_what_is_not_known_is_refused_with_the_way_out(tmp_path: Path) -> None:
    def ask(directory: Path, **options: Any) -> Any:
        return LazyShardedDataset(directory, dp_rank=0, dp_size=1, **grouped(options))["lengths"]

    live = stream_of(tmp_path / "live", 6, end=False)
    with pytest.raises(LengthsMissing, match=r"still being produced \(4 samples so far\).*once it has ended"):
        ask(live)
    with pytest.raises(LengthsMissing, match="still being produced"):
        ask(live, max_total_samples=100)
    assert ask(live, max_total_samples=3).tolist() == [length(0), length(1), length(2)]
    with pytest.raises(LengthsMissing, match=r"chunk 0 are in tokens is not known.*`lazyshard-producer run --source "):
        ask(produce(tmp_path / "plain", 4))
    with pytest.raises(LengthsMissing, match=r"another program fills it.*`lazyshard-producer run --source "):
        ask(foreign(tmp_path / "foreign", b'{"id":0}\n', end=True), samples_per_chunk=1)
    with pytest.raises(TypeError):
        LazyShardedDataset(live, dp_rank=0, dp_size=1, max_total_samples=4)["length"]  # type: ignore[index]
    dataset = LazyShardedDataset(stream_of(tmp_path / "s", 4), dp_rank=0, dp_size=1)
    LazyShardedStream(dataset)
    with pytest.raises(LengthUnknown):
        dataset["lengths"]


def test_lengths_can_be_asked_for_once_they_are_measured(tmp_path: Path) -> None:
    dataset = LazyShardedDataset(produce(tmp_path / "s", 4), dp_rank=0, dp_size=1)
    with pytest.raises(LengthsMissing):
        dataset["lengths"]
    put_lengths(tmp_path / "s", [1, 2], [3, 4])
    assert dataset["lengths"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_sampler_of_hugging_face_trainers_in_ms_swift_groups_and_draws_each_sample_once(
    dp: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    stream_of(tmp_path / "s", 157)
    real = swift_samplers.load("dataloader/shard.py").BatchSamplerShard
    seen: list[int] = []
    spreads: list[list[int]] = []
    for rank in range(dp):
        dataset = LazyShardedDataset(
            tmp_path / "s", dp_rank=rank, dp_size=dp, batch_size=4, order=Order(layout="strided")
        )
        placed = type("Placed", (real,), {"rank": rank, "world_size": dp})
        sampler: Any = placed(
            len(dataset), 4, shuffle=True, drop_last=True, data_seed=7, group_by_length=True, lengths=dataset["lengths"]
        )
        for batch in DataLoader(dataset, batch_sampler=sampler, collate_fn=list):
            seen += [row["id"] for row in batch]
            spreads.append([length(row["id"]) for row in batch])
    dataset = LazyShardedDataset(tmp_path / "s", dp_rank=0, dp_size=dp, batch_size=4, order=Order(layout="strided"))
    assert len(seen) == len(set(seen)) == len(dataset)
    # Lengths are 1 to 23; a batch in any order spans about 14 of that.
    assert np.mean([max(batch) - min(batch) for batch in spreads]) < 7


@pytest.mark.parametrize("dp", [1, 2])
def test_sampler_of_megatron_in_ms_swift_groups_and_draws_each_sample_once(dp: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    stream_of(tmp_path / "s", 157)
    real = swift_samplers.load("megatron/trainers/batch_sampler.py").MegatronPretrainingRandomSampler
    seen: list[int] = []
    for rank in range(dp):
        dataset = LazyShardedDataset(
            tmp_path / "s", dp_rank=rank, dp_size=dp, batch_size=4, order=Order(layout="strided")
        )
        sampler = real(
            dataset,
            total_samples=len(dataset),
            consumed_samples=0,
            micro_batch_size=4,
            data_parallel_rank=rank,
            data_parallel_size=dp,
            data_sharding=False,
            group_by_length=True,
        )
        seen += [row["id"] for batch in sampler for row in dataset.__getitems__(batch)]
    assert len(seen) == len(set(seen)) == len(dataset)
