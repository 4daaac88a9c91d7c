"""`LazyShardedSequences` of a blend: its rows in its order, packed, cut or padded as those of one stream."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard import BlendedDataset, Filter, LazyShardedDataset, LazyShardedSequences, Map, Order, Pack, Pad, Split
from lazyshard.errors import LengthUnknown, StateMismatch
from tests.data.sequence_runs import LENGTHS, all_written, dealt, expected, forms, loader_of, tokens_of_row, write_rows
from tests.data.workers import DEADLINE_S
from tests.stream.streams import produce, raised, refusal_of

# Which torchdata still calls, and torch has given up.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

Lists = dict[str, list[int]]

SECOND = 50  # What is added to the ids of rows of the second stream, so that no two are equal


def write_both(directory: Path, lists: Lists, *, end: bool = True) -> None:
    for name, lengths in lists.items():
        write_rows(directory / name, lengths, end=end)


def number(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"] + SECOND, "input_ids": [token + 100 * SECOND for token in row["input_ids"]]}


def blend(directory: Path, weights: dict[str, float], **options: Any) -> BlendedDataset:
    members = []
    for place, (name, weight) in enumerate(weights.items()):
        order = Order(shuffle_window=place, seed=3)
        steps = [Map(number)] if place else []
        members.append((LazyShardedDataset(directory / name, order=order, steps=steps, max_wait=DEADLINE_S), weight))
    return BlendedDataset(members, **options)


def open_all(
    directory: Path, weights: dict[str, float], form: Any, dp: int, state: Any = None, **options: Any
) -> list[LazyShardedSequences]:
    own = {name: options.pop(name) for name in ("num_samples", "stopping") if name in options}
    options = {"window": 2, **options}
    found = []
    for rank in range(dp):
        run = LazyShardedSequences(blend(directory, weights, **own), form=form, dp_rank=rank, dp_size=dp, **options)
        if state is not None:
            run.load_state_dict(json.loads(json.dumps(state)))
        found.append(run)
    return found


def rows_of(directory: Path, weights: dict[str, float], epoch: int = 0, **options: Any) -> list[int]:
    """The ids of the rows in the order in which one rank of the blend itself draws them."""
    drawn = blend(directory, weights, **options)
    drawn.set_epoch(epoch)
    return [row["id"] for batch in drawn.batches(epochs=epoch + 1, collate_fn=list) for row in batch]


def made_of(ids: list[int], lengths: list[int], form: Any, seed: int | None = None, epoch: int = 0) -> list[Any]:
    """What is made of rows that come in this order, by brute force: of those of a stream in which they stand so."""
    found = expected(lengths, form, 6, seed, epoch)
    if isinstance(form, Pack):
        return [[ids[place] for place in pack] for pack in found]
    # Its tokens tell place and offset, but for those that were put in.
    return [
        [token if token < 0 else tokens_of_row(ids[token // 100], 99)[token % 100] for token in one] for one in found
    ]


@settings(max_examples=30, deadline=None)
@given(
    first=st.lists(st.integers(0, 9), min_size=3, max_size=20),
    second=st.lists(st.integers(0, 9), min_size=3, max_size=20),
    form=forms,
    weights=st.sampled_from([(1.0, 1.0), (3.0, 1.0), (1.0, 2.0)]),
    options=st.sampled_from([{"num_samples": 30}, {"stopping": "first_exhausted"}, {"stopping": "all_exhausted"}]),
    ranks=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 3)), min_size=2, max_size=3),
    seed=st.one_of(st.none(), st.just(5)),
    epoch=st.integers(0, 1),
)
def test_rows_of_a_blend_are_made_sequences_and_any_ranks_go_on_with_the_next_one(
    tmp_path_factory: pytest.TempPathFactory,
    first: list[int],
    second: list[int],
    form: Any,
    weights: tuple[float, float],
    options: dict[str, Any],
    ranks: list[tuple[int, int, int]],
    seed: int | None,
    epoch: int,
) -> None:
    directory, shares = tmp_path_factory.mktemp("s"), dict(zip("ab", weights, strict=True))
    write_both(directory, {"a": first, "b": second})
    # With num_samples one run is one epoch, however many of a stream that takes.
    epoch = 0 if "num_samples" in options else epoch
    ids = rows_of(directory, shares, epoch, **options)
    lengths = [first[one] if one < SECOND else second[one - SECOND] for one in ids]
    left = made_of(ids, lengths, form, seed, epoch)
    state, consumed = None, 0
    for dp, size, steps in ranks:
        runs = open_all(directory, shares, form, dp, state, batch_size=size, seed=seed, **options)
        steps = min(steps, len(left) // (dp * size))
        for run, micro_batches in zip(runs, dealt(left, dp, size), strict=True):
            run.set_epoch(epoch)
            found = all_written(itertools.islice(run, steps * size))
            assert found == list(itertools.chain(*micro_batches[:steps]))
        consumed += steps * dp * size
        left = left[steps * dp * size :]
        state = runs[-1].state_dict(consumed)
    (run,) = open_all(directory, shares, form, 1, state, seed=seed, **options)
    assert all_written(run) == left


WEIGHTS = {"a": 3.0, "b": 1.0}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", [Pack(9), Split(5), Pad(9)])
def test_a_pass_over_a_live_blend_in_workers_waits_and_ends_where_the_blend_does(
    tmp_path: Path, form: Any, workers: int
) -> None:
    write_both(tmp_path, {"a": LENGTHS[:9], "b": LENGTHS[:9]}, end=False)
    (run,) = open_all(tmp_path, WEIGHTS, form, 1, max_wait=DEADLINE_S)
    loader = iter(loader_of(run, workers))
    found = list(next(loader))
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS})
    found += [one for batch in loader for one in batch]
    ids = rows_of(tmp_path, WEIGHTS)
    assert found == made_of(ids, [LENGTHS[one % SECOND] for one in ids], form)
    assert run.stats().dropped == 0


def test_each_data_set_has_its_own_steps(tmp_path: Path) -> None:
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS})
    odd = LazyShardedDataset(tmp_path / "a", steps=[Filter(lambda row: row["id"] % 2)])
    plain = LazyShardedDataset(tmp_path / "b", steps=[Map(number)])
    sequences = LazyShardedSequences(BlendedDataset([(odd, 1), (plain, 1)]), form=Pack(30), dp_rank=0, dp_size=1)
    ids = [one for pack in all_written(sequences) for one in pack]
    assert sorted(ids) == [*range(1, 13, 2), *range(SECOND, SECOND + 13)]
    assert sequences.stats().dropped == 7


def test_a_state_goes_on_with_the_same_blend_alone(tmp_path: Path) -> None:
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS, "c": LENGTHS})
    (run,) = open_all(tmp_path, WEIGHTS, Pack(9), 1)
    state = run.state_dict(2)
    for weights, options, what in (
        ({"a": 1.0, "b": 1.0}, {}, "blend"),
        (WEIGHTS, {"num_samples": 20}, "blend"),
        ({"a": 3.0, "c": 1.0}, {}, "stream"),
    ):
        no = refusal_of(StateMismatch, f"with {what} = ", open_all, tmp_path, weights, Pack(9), 1, state, **options)
        assert no.field == what
    alone = LazyShardedSequences(tmp_path / "a", form=Pack(9), dp_rank=0, dp_size=1)
    raised(StateMismatch, alone.load_state_dict, state)
    raised(StateMismatch, run.load_state_dict, alone.state_dict(1))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS})
    produce(tmp_path / "unmeasured", 9, 3)

    def of(dataset: LazyShardedDataset, **options: Any) -> BlendedDataset:
        return BlendedDataset([(dataset, 1)], **options)

    def member(**options: Any) -> LazyShardedDataset:
        return LazyShardedDataset(tmp_path / "a", **options)

    def sequences(drawn: Any, *encode: Any, **options: Any) -> LazyShardedSequences:
        return LazyShardedSequences(drawn, *encode, form=Pack(9), dp_rank=0, dp_size=1, **options)

    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: sequences(of(member(), batch_size=2)), "batch_size=1"),
        (lambda: sequences(of(member(dp_rank=1, dp_size=2))), "without dp_rank and dp_size"),
        (lambda: sequences(of(member()), number), "settings of the data sets"),
        (lambda: sequences(of(member()), consumer="run"), "settings of the data sets"),
    ]
    for make, what in refused:
        refusal_of(ValueError, what, make)
    begun = of(member(dp_rank=0, dp_size=1))
    begun.load_state_dict(of(member(dp_rank=0, dp_size=1)).state_dict(3))
    refusal_of(ValueError, "it continues from a state", sequences, begun)
    used = of(member())
    assert len(used) == 13
    raised(RuntimeError, sequences, used)
    raised(LengthUnknown, sequences, blend(tmp_path, {"a": 1, "unmeasured": 1}))
