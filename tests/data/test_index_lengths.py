"""`dataset["lengths"]`: the tokens of what each index draws, as samplers that group by length ask for them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyshard import LazyShardedStream
from lazyshard.errors import LengthUnknown
from tests.data import runs
from tests.stream.lengths import put_lengths, sealed
from tests.stream.streams import foreign, produce


def length(sample: int) -> int:
    return 1 + 7 * sample % 23


def stream_of(directory: Path, samples: int, per_chunk: int = 4, *, end: bool = True) -> Path:
    return sealed(directory, [length(sample) for sample in range(samples)], per_chunk, end=end)


@pytest.mark.parametrize(
    ("samples", "dp", "options"),
    [
        (24, 1, {}),
        (37, 3, {"layout": "strided"}),
        (37, 3, {"shuffle_window": 2, "seed": 5}),
        (37, 2, {"unit": "sample", "layout": "strided"}),
        (37, 2, {"max_total_samples": 21}),
        (13, 2, {"num_samples": 40}),
        (5, 3, {"batch_size": 1}),
    ],
)
def test_each_index_has_the_length_of_its_sample(
    samples: int, dp: int, options: dict[str, Any], tmp_path: Path
) -> None:
    stream_of(tmp_path / "s", samples)
    for rank in range(dp):
        dataset = runs.open_rank(tmp_path / "s", rank, dp, **{"batch_size": 2, **options})
        lengths = dataset["lengths"]
        assert (lengths.dtype, lengths.shape) == (np.dtype(np.int32), (len(dataset),))
        for epoch in (0, 1):
            dataset.set_epoch(epoch)
            expected = [length(dataset.draw(index).sample) for index in range(len(dataset))]
            assert dataset["lengths"].tolist() == expected


def test_after_a_resume_with_other_ranks_they_are_those_of_what_is_left(tmp_path: Path) -> None:
    state = runs.open_rank(stream_of(tmp_path / "s", 37), 0, 2, batch_size=2).state_dict(12)
    dataset = runs.open_ranks(tmp_path / "s", 3, state, batch_size=2)[0]
    assert dataset["lengths"].tolist() == [length(dataset.draw(index).sample) for index in range(len(dataset))]


def test_what_was_measured_counts_once_it_is(tmp_path: Path) -> None:
    sealed(tmp_path / "long", [2**32 - 1, 1])
    assert runs.open_rank(tmp_path / "long")["lengths"].tolist() == [2**32 - 1, 1]
    dataset = runs.open_rank(produce(tmp_path / "s", 4))
    with pytest.raises(LengthUnknown):
        dataset["lengths"]
    put_lengths(tmp_path / "s", [10, 20], [30, 40])
    assert dataset["lengths"].tolist() == [10, 20, 30, 40]
    # They are not sent to workers.
    assert "_tokens" not in pickle.loads(pickle.dumps(dataset)).__dict__
    assert dataset["lengths"].tolist() == [10, 20, 30, 40]


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    live = stream_of(tmp_path / "live", 6, end=False)
    elsewhere = foreign(tmp_path / "foreign", b'{"id":0}\n', end=True)
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (live, {}, "4 samples so far"),
        (live, {"max_total_samples": 100}, "still being produced"),
        (produce(tmp_path / "plain", 4), {}, "chunk 0"),
        (elsewhere, {"samples_per_chunk": 1}, "another program"),
    ]
    for directory, options, fact in cases:
        with pytest.raises(LengthUnknown, match=fact):
            runs.open_rank(directory, **options)["lengths"]
    assert runs.open_rank(live, max_total_samples=3)["lengths"].tolist() == [length(0), length(1), length(2)]
    with pytest.raises(TypeError):
        runs.open_rank(live, max_total_samples=4)["length"]  # type: ignore[index]
    dataset = runs.open_rank(stream_of(tmp_path / "s", 4))
    LazyShardedStream(dataset)
    with pytest.raises(LengthUnknown):
        dataset["lengths"]
