"""`batches`: what a loop is handed out, what counts as trained, and where the epoch ends, on all ranks alike."""

from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import BlendedDataset
from lazyshard.errors import CursorTaken
from lazyshard.stream.listing import retire
from tests.data.runs import State, chunks_before, continued, open_rank, open_ranks
from tests.data.workers import DEADLINE_S, ids
from tests.stream.streams import produce, raised, refusal_of

WORKERS: Final[dict[str, Any]] = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": DEADLINE_S}


def open_batches(stream: Path, dp: int, state: State | None = None, workers: bool = False, **options: Any) -> Any:
    loader = WORKERS if workers else {}
    return [dataset.batches(collate_fn=ids, **loader) for dataset in open_ranks(stream, dp, state, **options)]


@pytest.mark.parametrize(
    ("order", "workers"), [({"layout": "strided"}, False), ({"shuffle_window": 2}, True), ({"unit": "batch"}, False)]
)
def test_each_sample_comes_once_with_other_ranks_later(order: dict[str, Any], workers: bool, tmp_path: Path) -> None:
    """A live stream of 50, then of 61, whose end nobody has said: three steps of two ranks, two of three, the rest."""
    stream = produce(tmp_path / "s", 50, 5, end=False)
    trained: list[int] = []
    state: State | None = None
    for dp, steps in ((2, 3), (3, 2), (1, None)):
        if steps is None:
            produce(stream, 61, 5)
        ranks = open_batches(stream, dp, state, workers, batch_size=2, **order)
        assert [one.step for one in ranks] == [{2: 0, 3: 3, 1: 5}[dp]] * dp
        for one in ranks:
            trained += chain.from_iterable(islice(one, steps))
        assert {(one.consumed, one.step) for one in ranks} == {(len(trained), ranks[0].step)}
        states = [one.state_dict() for one in ranks]
        assert states == states[:1] * dp
        state = states[0]
        assert state["parts"][-1]["draws_per_step"] == 2
    assert ranks[0].step == 3 + 2 + (61 - 24) // 2
    assert len(trained) == len(set(trained)) == 60


@pytest.mark.parametrize("workers", [False, True])
def test_a_loop_goes_on_after_break_and_after_an_error(workers: bool, tmp_path: Path) -> None:
    flag = tmp_path / "fails"
    flag.touch()

    def collate(rows: Any) -> list[int]:
        if rows[0]["id"] == 4 and flag.exists():
            raise OSError("once")
        return ids(rows)

    (dataset,) = open_ranks(produce(tmp_path / "s", 12, 4), 1, batch_size=2)
    batches = dataset.batches(collate_fn=collate, **(WORKERS if workers else {}))
    seen = []
    for batch in batches:
        seen += batch
        break
    with pytest.raises(OSError, match="once"):
        for batch in batches:
            seen += batch
    flag.unlink()
    assert (seen, batches.consumed) == ([0, 1, 2, 3], 4)
    seen += chain.from_iterable(batches)
    assert (seen, batches.consumed) == (list(range(12)), 12)


def test_accumulation_counts_whole_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Five micro batches of two samples for each of two ranks: two steps of two, and one that is left over."""
    stream = produce(tmp_path / "s", 20, 5)
    for batches in open_batches(stream, 2, batch_size=2, micro_batches_per_step=2):
        seen = [(batches.step, batches.step_complete, batches.state_dict()["consumed"]) for _ in batches]
        assert seen == [(0, False, 0), (1, True, 8), (1, False, 8), (2, True, 16)]
    (args,) = [record.args for record in caplog.records if record.module == "map_style"]
    assert args == (0, 2, 4, 2)
    state = batches.state_dict()
    # One rank takes what two have left: two micro batches.
    (last,) = open_batches(stream, 1, state, batch_size=2, micro_batches_per_step=2)
    assert (len(list(last)), last.step, last.consumed) == (2, 3, 20)


def test_the_end_is_found_though_the_beginning_is_deleted(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 130, 2, end=False)
    (batches,) = open_batches(stream, 1, workers=True, batch_size=2)
    seen = [*islice(batches, 50)]
    produce(stream, 138, 2)
    retire(stream, 40, 69)
    assert [*chain.from_iterable([*seen, *batches])] == list(range(138))


@pytest.mark.parametrize(("sets", "persistent"), [(False, True), (True, False)])
def test_epochs(sets: bool, persistent: bool, tmp_path: Path) -> None:
    (dataset,) = open_ranks(produce(tmp_path / "s", 10, 5), 1, batch_size=3, shuffle_window=1, consumer="c")
    batches = dataset.batches(epochs=3, collate_fn=ids, persistent_workers=persistent, **WORKERS)
    orders, done = [], []
    for epoch in range(3):
        if sets:
            dataset.set_epoch(epoch)
        orders.append(list(chain.from_iterable(batches)))
        assert (batches.epoch, batches.consumed, batches.step) == (epoch, 9, 3)
        batches.commit()
        done.append(chunks_before(dataset.directory, "c"))
    assert len(set(map(tuple, orders))) == 3
    assert done == [0, 0, 1]
    raised(RuntimeError, lambda: iter(batches))
    dataset.set_epoch(3)
    raised(RuntimeError, lambda: iter(batches))


def test_a_run_goes_on_in_its_epoch_and_an_ended_one_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = produce(tmp_path / "s", 12, 4)
    (first,) = open_ranks(stream, 1, batch_size=2)
    batches = first.batches(epochs=2, collate_fn=ids)
    assert len(list(batches)) == 6
    assert list(islice(batches, 2)) == [[0, 1], [2, 3]]
    batches = open_rank(stream, batch_size=2).batches(epochs=2, collate_fn=ids)
    batches.load_state_dict(State(first.state_dict(4)))
    assert (batches.epoch, batches.consumed) == (1, 4)
    assert list(chain.from_iterable(batches)) == list(range(4, 12))
    (third,) = open_ranks(stream, 1, batches.state_dict(), batch_size=2)
    assert [record for record in caplog.records if record.module == "map_style"] == []
    assert list(third.batches(epochs=2, collate_fn=ids)) == []
    assert [record.args for record in caplog.records if record.module == "map_style"] == [(1, 6)]


def test_a_blend_is_counted_too(tmp_path: Path) -> None:
    """Three of the one for each of the other, which has no end that anybody has said; on from a state with one rank."""
    streams = [produce(tmp_path / name, samples, 4, end=False) for name, samples in (("a", 24), ("b", 16))]

    def blend(rank: int, dp: int) -> BlendedDataset:
        members = [open_rank(stream, rank, dp) for stream in streams]
        return BlendedDataset(list(zip(members, (0.75, 0.25), strict=True)), batch_size=2)

    states = []
    seen: list[Any] = []
    for rank in range(2):
        batches = blend(rank, 2).batches(collate_fn=list)
        seen += chain.from_iterable(islice(batches, 4))
        states.append(batches.state_dict())
        assert (batches.step, batches.consumed) == (4, 16)
    assert states[0] == states[1]
    for stream, samples in zip(streams, (24, 16), strict=True):
        produce(stream, samples, 4)
    batches = continued(blend(0, 1), states[0]).batches(collate_fn=list, **WORKERS)
    seen += chain.from_iterable(batches)
    assert sorted(row["id"] for row in seen) == sorted([*range(24), *range(8)])
    assert (batches.consumed, batches.step) == (32, 12)


def test_what_the_data_set_decides_is_refused(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 10, 5)
    (dataset,) = open_ranks(stream, 1)
    refused: list[dict[str, Any]] = [{"batch_size": 2}, {"sampler": []}, {"shuffle": True}, {"nothing": 1}]
    for options in refused:
        raised(TypeError, dataset.batches, **options)
    refusal_of(ValueError, "epochs", dataset.batches, epochs=0)
    (numbered,) = open_ranks(stream, 1, batch_size=4, num_samples=30)
    refusal_of(ValueError, "num_samples", numbered.batches, epochs=2)
    batches = numbered.batches(collate_fn=ids)
    assert list(chain.from_iterable(batches)) == [*range(8), *range(8), *range(8), *range(4)]
    raised(RuntimeError, lambda: iter(batches))
    first, second = (open_ranks(stream, 1, consumer="c")[0].batches() for _ in range(2))
    assert first.commit()
    raised(CursorTaken, second.commit)
    assert second.commit(take_over=True)


def test_steps_are_settled_before_a_state_is_used(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 12, 4)
    (before,) = open_ranks(stream, 1, batch_size=2)
    (used,) = open_ranks(stream, 1, before.state_dict(4), batch_size=2)
    assert used.rank.dp_size == 1
    raised(RuntimeError, used.batches)
    assert before.batches().step == 0
    (knows,) = open_ranks(stream, 1, before.batches().state_dict(), batch_size=2, micro_batches_per_step=1)
    assert len(knows) == 12
    assert len(list(knows.batches())) == 6
