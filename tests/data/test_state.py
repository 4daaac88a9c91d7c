"""Where a run stands: saved as plain values, loaded by any ranks, and refused with the reason."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyshard import LazyShardedDataset, Order
from lazyshard.data import commits as state_checks
from lazyshard.errors import LengthUnknown, RankInvalid, StateInvalid, StateMismatch, VersionUnsupported
from lazyshard.stream.retire import retire
from tests.data.runs import State, open_ranks, part, read
from tests.stream.streams import foreign, produce


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Forty samples in ten chunks."""
    return produce(tmp_path / "s", 40, 4)


def saved(stream: Path, dp: int, consumed: int, **options: Any) -> State:
    """Returns a state as a checkpoint brings it back."""
    state = open_ranks(stream, dp, **options)[0].state_dict(consumed)
    return dict(json.loads(json.dumps(state)))


def test_state_is_plain_values_that_any_checkpoint_keeps(stream: Path, tmp_path: Path) -> None:
    dataset = open_ranks(stream, 2, batch_size=2, shuffle_window=1, seed=3, micro_batches_per_step=2)[1]
    state = dataset.state_dict(12)
    assert state == {
        "format": 1,
        "stream_id": dataset.stream_id,
        "samples_per_chunk": 4,
        "unit": 4,
        "window": 4,
        "seed": 3,
        "max_total_samples": None,
        "parts": [part(2, 6, batch_size=2, draws_per_step=4)],
        "consumed": 12,
    }
    assert json.loads(json.dumps(state)) == state
    torch.save({"data": state}, tmp_path / "checkpoint.pt")
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True) == {"data": state}


def test_state_says_what_was_trained_and_not_what_was_read(stream: Path) -> None:
    dataset = open_ranks(stream, 2)[0]
    begun = dataset.state_dict()
    assert (begun["consumed"], begun["parts"]) == (0, [part(2, 0)])
    read([dataset], 10)
    assert dataset.state_dict() == begun
    assert dataset.state_dict(4)["parts"] == [part(2, 2)]


def test_same_ranks_go_on_in_the_same_part(stream: Path) -> None:
    whole = read(open_ranks(stream, 2))
    ranks = open_ranks(stream, 2, saved(stream, 2, 12))
    assert [dataset.rank_indices for dataset in ranks] == [range(6, 20), range(26, 40)]
    assert [(dataset.consumed, dataset.epoch, len(dataset)) for dataset in ranks] == [(12, 0, 40)] * 2
    assert read(ranks) == [lane[6:] for lane in whole]
    assert ranks[0].state_dict() == saved(stream, 2, 12)
    assert ranks[0].state_dict(20) == saved(stream, 2, 20)


@pytest.mark.parametrize(
    ("layout", "indices"),
    [("block", [range(9), range(9, 18), range(18, 27)]), ("strided", [range(n, 27, 3) for n in range(3)])],
)
def test_other_ranks_go_on_with_what_is_left(stream: Path, layout: Any, indices: list[range]) -> None:
    assert read(open_ranks(stream, 2), 6) == [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 12, 13]]
    ranks = open_ranks(stream, 3, saved(stream, 2, 12), layout=layout)
    assert [dataset.rank_indices for dataset in ranks] == indices
    assert [(dataset.consumed, len(dataset), dataset.leftover) for dataset in ranks] == [(12, 27, 1)] * 3
    assert read(ranks) == [
        [10, 11, 16, 17, 18, 19, 28, 29, 30],
        [14, 20, 21, 22, 23, 32, 33, 34, 35],
        [15, 24, 25, 26, 27, 36, 37, 38, 39],
    ]
    state = ranks[0].state_dict(18)
    assert state["parts"] == [part(2, 6), part(3, 2)]
    assert read(open_ranks(stream, 1, state), 5) == [[16, 17, 18, 19, 21]]


def test_one_that_goes_on_elsewhere_every_time_reads_each_sample_once(stream: Path) -> None:
    state, seen = None, list[int]()
    for dp, steps in ((2, 3), (3, 2), (1, 5), (4, 1), (3, 3), (2, 2), (1, 2)):
        ranks = open_ranks(stream, dp, state, shuffle_window=1)
        seen += [i for lane in read(ranks, steps) for i in lane]
        state = ranks[-1].state_dict(len(seen))
        assert state["consumed"] == len(seen)
    rest = open_ranks(stream, 1, state, shuffle_window=1)
    seen += read(rest)[0]
    assert sorted(seen) == list(range(40))
    assert rest[0].state_dict(40)["consumed"] == 40
    # Nothing is left of that epoch, whoever asks.
    for dp in (1, 2):
        assert read(open_ranks(stream, dp, rest[0].state_dict(40), shuffle_window=1)) == [[]] * dp


def test_num_samples_counts_from_the_beginning_of_the_run(stream: Path) -> None:
    # Two and a half epochs.
    state = open_ranks(stream, 2, num_samples=100)[0].state_dict(60)
    ranks = open_ranks(stream, 3, state, num_samples=100)
    assert [len(dataset) for dataset in ranks] == [39] * 3
    epochs = [[dataset.draw(index).epoch for index in dataset.rank_indices] for dataset in ranks]
    assert epochs == [[1] * 6 + [2] * 7] * 3
    assert not ranks[0].in_epoch(0)
    assert len(set(chain(*read(ranks, 6)))) == 18
    again = open_ranks(stream, 3, ranks[0].state_dict(90), num_samples=100)
    assert [dataset.rank_indices for dataset in again] == [range(10, 13), range(23, 26), range(36, 39)]
    assert [d.rank_indices for d in open_ranks(stream, 3, ranks[0].state_dict(99), num_samples=90)] == [
        range(10, 10),
        range(20, 20),
        range(30, 30),
    ]


def test_epoch_of_the_state_goes_on_and_every_other_one_is_whole(stream: Path) -> None:
    first = open_ranks(stream, 2, shuffle_window=1)
    for dataset in first:
        dataset.set_epoch(3)
    begun = read(first, 6)
    state = first[0].state_dict(12)
    assert state["parts"] == [part(2, 6, epoch=3)]
    ranks = open_ranks(stream, 3, state, shuffle_window=1)
    assert [(d.epoch, d.consumed, len(d)) for d in ranks] == [(3, 12, 27)] * 3
    for dataset in ranks:
        dataset.set_epoch(dataset.epoch)
    rest = read(ranks)
    assert len(set(chain(*begun, *rest))) == 39
    for dataset in ranks:
        dataset.set_epoch(4)
    assert [(d.epoch, d.consumed, len(d), d.leftover) for d in ranks] == [(4, 0, 39, 1)] * 3
    assert ranks[0].state_dict(9)["parts"] == [part(3, 3, epoch=4)]
    fresh = open_ranks(stream, 3, shuffle_window=1)
    for dataset in fresh:
        dataset.set_epoch(4)
    assert read(ranks) == read(fresh)
    for dataset in ranks:
        dataset.set_epoch(3)
    assert read(ranks) == rest


def test_rank_need_not_be_known_before_the_data_set_is_used(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = saved(stream, 2, 12)
    monkeypatch.setenv("WORLD_SIZE", "3")
    dataset = LazyShardedDataset(stream)
    dataset.load_state_dict(state)
    assert dataset.consumed == 12
    with pytest.raises(RankInvalid):
        dataset.state_dict(18)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert dataset.state_dict()["parts"] == [part(2, 6), part(1, 0)]


def test_copy_goes_on_where_its_original_does(stream: Path) -> None:
    dataset = open_ranks(stream, 3, saved(stream, 2, 12))[1]
    copied = pickle.loads(pickle.dumps(dataset))
    assert (copied.rank_indices, copied.consumed) == (range(9, 18), 12)
    assert copied.state_dict(18) == dataset.state_dict(18)
    assert [copied[index]["id"] for index in copied.rank_indices[:3]] == [14, 20, 21]


def test_state_is_loaded_before_the_data_set_is_used_or_not_at_all(stream: Path) -> None:
    state = saved(stream, 2, 12)
    uses: list[Callable[[LazyShardedDataset], object]] = [len, lambda d: d.rank_indices, lambda d: d[0]]
    for use in uses:
        dataset = open_ranks(stream, 2)[0]
        use(dataset)
        with pytest.raises(RuntimeError, match="in use already and stands elsewhere; load the state into a new one"):
            dataset.load_state_dict(state)
        # It stands where it did, which is no change.
        dataset.load_state_dict(saved(stream, 2, 0))
        assert dataset.rank_indices == range(20)
    dataset = open_ranks(stream, 2)[0]
    dataset.load_state_dict(saved(stream, 2, 20))
    dataset.load_state_dict(state)
    assert dataset.rank_indices == range(6, 20)
    for _ in range(2):
        dataset.load_state_dict(state)
    for other in (saved(stream, 2, 20), saved(stream, 3, 12)):
        with pytest.raises(RuntimeError, match="in use already"):
            dataset.load_state_dict(other)


@pytest.mark.parametrize(("consumed", "message"), [(13, "whole steps of all 2 ranks"), (-2, "consumed is at least 0")])
def test_number_that_no_step_ends_with_is_refused(stream: Path, consumed: int, message: str) -> None:
    dataset = open_ranks(stream, 2)[0]
    with pytest.raises(ValueError, match=message):
        dataset.state_dict(consumed)


def test_fewer_than_when_the_run_went_on_are_refused(stream: Path) -> None:
    dataset = open_ranks(stream, 3, saved(stream, 2, 12))[0]
    with pytest.raises(
        ValueError, match="consumed is at least 12, what was trained when the loaded state was saved, got 9"
    ):
        dataset.state_dict(9)


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"unit": "sample"}, "unit", "saved with unit 4, here it is 1: the deal would be another: give unit as it was"),
        ({"shuffle_window": 1}, "window", "saved with window 0, here it is 4: .* give shuffle_window as it was"),
        ({"seed": 1}, "seed", "saved with seed 0, here it is 1: .* give seed as it was"),
        ({"max_total_samples": 20}, "max_total_samples", "saved with max_total_samples None, here it is 20"),
    ],
)
def test_state_of_other_settings_is_refused(stream: Path, options: dict[str, Any], field: str, message: str) -> None:
    state = saved(stream, 2, 12)
    with pytest.raises(StateMismatch, match=message) as caught:
        open_ranks(stream, 2, state, **options)
    assert (caught.value.field, caught.value.directory) == (field, str(stream))


def test_state_of_another_stream_is_refused(stream: Path, tmp_path: Path) -> None:
    state = saved(stream, 2, 12)
    with pytest.raises(StateMismatch, match="belongs to another stream: give the directory of that one"):
        open_ranks(produce(tmp_path / "other", 40, 4), 2, state)


def test_state_that_is_none_is_refused(stream: Path) -> None:
    state = saved(stream, 2, 12)
    dataset = open_ranks(stream, 2)[0]
    with pytest.raises(StateInvalid, match=f"{stream}: the state to go on from: field 'consumed': expected 12"):
        dataset.load_state_dict(state | {"consumed": 10})
    with pytest.raises(StateInvalid, match="field 'parts': expected a value, found no such field"):
        dataset.load_state_dict({name: state[name] for name in state if name != "parts"})
    with pytest.raises(VersionUnsupported, match="in format 2, this release of lazyshard reads format 1; install a"):
        dataset.load_state_dict(state | {"format": 2})
    nothing: Any = None
    with pytest.raises(StateInvalid, match="expected an object, found None"):
        dataset.load_state_dict(nothing)
    assert dataset.rank_indices == range(20)


def test_state_that_needs_deleted_chunks_is_refused_and_a_later_one_is_not(stream: Path) -> None:
    states = {consumed: saved(stream, 2, consumed) for consumed in (8, 12, 16)}
    retire(stream, 3, 10)
    for consumed, chunk in ((8, 2), (12, 2)):
        for dp in (2, 3):
            with pytest.raises(StateMismatch, match=rf"goes on with samples of chunk {chunk}, but .* below 3: ") as no:
                open_ranks(stream, dp, states[consumed])
            assert (no.value.expected, no.value.actual) == (f"chunk {chunk}", "chunks from 3 on")
    assert read(open_ranks(stream, 2, states[16]), 1) == [[16], [20]]
    # Rank 0 has drawn all of chunk 2, which is open with chunk 3 as far as a commit is concerned.
    assert read(open_ranks(stream, 2, saved(stream, 2, 16)), 4) == [[16, 17, 18, 19], [20, 21, 22, 23]]


@pytest.mark.parametrize("at_once", [1, 3, 1 << 20])
def test_deleted_chunk_of_an_open_window_is_refused_only_if_something_of_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(state_checks, "_DRAWS_AT_ONCE", at_once)
    stream = produce(tmp_path / "s", 16, 2)
    # One rank draws four chunks of two in some order.
    assert read(open_ranks(stream, 1, shuffle_window=4, seed=2), 5) == [[1, 4, 2, 0, 6]]
    states = [saved(stream, 1, drawn, shuffle_window=4, seed=2) for drawn in range(9)]
    retire(stream, 1, 8)
    refused = []
    for drawn, state in enumerate(states):
        try:
            open_ranks(stream, 3, state, shuffle_window=4, seed=2)
        except StateMismatch:
            refused.append(drawn)
    # Samples 0 and 1 are gone; the former is the fourth.
    assert refused == [0, 1, 2, 3]


def test_stream_that_ended_with_less_than_was_drawn_is_refused(tmp_path: Path) -> None:
    rows = b"".join(b'{"id":%d}\n' % number for number in range(8))
    long = foreign(tmp_path / "long", rows, rows, end=True)
    short = foreign(tmp_path / "short", rows, end=True)
    options = {"samples_per_chunk": 8}
    state = saved(long, 2, 12, **options)
    for dp in (2, 3):
        with pytest.raises(
            StateMismatch, match=r"has drawn 12 samples since its epoch began, but .* ended with 8: "
        ) as no:
            open_ranks(short, dp, state, **options)
        assert (no.value.expected, no.value.actual) == ("at least 12 samples", "8")
    # Where it may have gone on with another epoch that cannot be told.
    assert open_ranks(short, 2, state, num_samples=16, **options)[0].draw(6).epoch == 1
    # Nor in a foreign directory that is as long whether it is the same one.
    assert read(open_ranks(long, 2, state, **options)) == [[6, 7], [6, 7]]


def test_stream_too_short_for_a_batch_is_refused(tmp_path: Path) -> None:
    long = foreign(tmp_path / "long", b'{"id":0}\n' * 4, end=True)
    short = foreign(tmp_path / "short", b'{"id":0}\n', end=True)
    state = saved(long, 2, 4, samples_per_chunk=4)
    for more in ({}, {"num_samples": 16}):
        with pytest.raises(StateMismatch, match="but the stream has ended with 1"):
            open_ranks(short, 2, state, samples_per_chunk=4, **more)


def test_live_stream_is_waited_for_where_it_has_less_than_was_drawn(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 16, 4, end=False)
    state = saved(stream, 2, 24, max_total_samples=40)
    ranks = open_ranks(stream, 2, state, max_total_samples=40)
    produce(stream, 40, 4)
    assert read(ranks) == [[24, 25, 26, 27, 32, 33, 34, 35], [28, 29, 30, 31, 36, 37, 38, 39]]


def test_live_stream_without_a_maximum_has_no_length_after_a_resume_either(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 16, 4, end=False)
    state = saved(stream, 2, 8, num_samples=100)
    assert len(open_ranks(stream, 2, state, num_samples=100)[0]) == 100
    with pytest.raises(LengthUnknown):
        len(open_ranks(stream, 2, state)[0])


def test_run_that_went_on_with_another_epoch_after_an_early_end_goes_on_there(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 8, 4, end=False)
    ranks = open_ranks(stream, 2, max_total_samples=40)
    assert [len(dataset) for dataset in ranks] == [40, 40]
    produce(stream, 16, 4)
    whole = read(ranks, 20)
    assert [draw[:8] for draw in whole] == [draw[8:16] for draw in whole]
    state = ranks[0].state_dict(24)
    # Half of epoch 1 is drawn: what is left of it.
    assert read(open_ranks(stream, 2, state, max_total_samples=40)) == [lane[12:16] for lane in whole]
    left = read(open_ranks(stream, 1, state, max_total_samples=40))
    assert sorted(left[0]) == sorted(whole[0][12:16] + whole[1][12:16])


@pytest.mark.parametrize("steps", [0, -1, 1.0, True, "2"])
def test_micro_batches_that_cannot_be_are_refused(tmp_path: Path, steps: Any) -> None:
    with pytest.raises(ValueError, match="micro_batches_per_step is an integer from 1, got "):
        LazyShardedDataset(tmp_path / "none", order=Order(micro_batches_per_step=steps))


def test_counting_anew_behind_a_loaded_state_is_refused_with_the_same_ranks_too(stream: Path) -> None:
    dataset = open_ranks(stream, 2, saved(stream, 2, 12))[0]
    with pytest.raises(ValueError, match=r"at least 12, .* got 4: count on from dataset.consumed"):
        dataset.state_dict(4)


@pytest.mark.parametrize(
    ("consumed", "error", "message"),
    [
        (10, ValueError, r"grows by dp_size \* batch_size = 2 \* 2 a batch, got 10"),
        (44, ValueError, "consumed is at most 40, all that this data set has, got 44"),
        ("8", TypeError, "consumed is a number of samples, an int, got '8'"),
        (8.0, TypeError, "consumed is a number of samples, an int, got 8.0"),
    ],
)
def test_a_count_that_cannot_be_is_refused(stream: Path, consumed: Any, error: type[Exception], message: str) -> None:
    dataset = open_ranks(stream, 2, batch_size=2)[0]
    with pytest.raises(error, match=message):
        dataset.state_dict(consumed)


def test_a_count_may_be_any_integer(stream: Path) -> None:
    dataset = open_ranks(stream, 2)[0]
    assert dataset.state_dict(torch.tensor(8))["consumed"] == 8  # type: ignore[arg-type]
