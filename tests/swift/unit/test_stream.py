"""`stream`: what a start or a resume refuses; packs; `StepGate`: the same decision on every rank, without a word."""

import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.utils.data import Subset

from lazyshard.errors import SkipSample, WaitTimeout
from lazyshard.format.batch import encode_pack
from lazyshard.format.row import check_row, encode_row
from lazyshard.stream import list_consumers
from lazyshard.stream.listing import retire
from lazyshard_swift import rows
from lazyshard_swift import stream as streams
from lazyshard_swift.errors import ResumeRefused, SettingsRefused, StreamTooShort
from lazyshard_swift.stream import StepGate
from tests.data.runs import open_rank
from tests.stream.streams import foreign, produce, publish_rows, raised, refusal_of
from tests.swift.unit import runs
from tests.swift.unit.runs import checkpoint, hugging_face, megatron, open_stream, opened, plan, position, tells

TWO = b'{"id": 1}\n{"id": 2}\n'
PER_CHUNK = 3
# Ranks, samples of a micro batch, micro batches of a step, and the window.
SETTINGS = [(1, 2, 3, 2), (2, 1, 2, 2), (2, 2, 1, 0), (3, 1, 3, 0), (3, 2, 2, 2), (2, 1, 3, 0), (1, 1, 1, 0)]
HashStore: Any = vars(dist)["HashStore"]


def resumable(directory: Path, folder: Path, step: int) -> dict[str, Any]:
    """Trains so many steps of one sample, in windows of 3 chunks; returns the arguments to continue."""
    changes: dict[str, Any] = {"train_iters": 18, "sharded_lazy_shuffle_window": 3, "finetune": False}
    return {**changes, "mcore_model": checkpoint(folder, opened(directory, **changes).plan.position(step, step))}


def test_progress_is_told_now_and_then(tmp_path: Path, notices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = produce(tmp_path / "s", 8, 2, end=False)
    stream = opened(directory)
    notices.clear()
    stream.log_progress(4)
    assert notices == []
    stream.log_progress(4, at_once=True)
    produce(directory, 12, 2, end=False)
    monkeypatch.setattr(streams, "LOG_EVERY_S", 0.0)
    stream.log_progress(8)
    stream.log_progress(14)
    told = "trained 4 of 8 published", "trained 8 of 12 published", "trained 14 of 12 published samples, in several"
    assert [words in text for words, text in zip(told, notices, strict=True)] == [True] * 3


def test_end_of_a_blend(tmp_path: Path) -> None:
    made = [produce(tmp_path / f"ended {size}", size, 2) for size in (8, 20)]
    live = [produce(tmp_path / f"live {size}", size, 2, end=False) for size in (8, 20)]
    # Steps of 4 samples; the first stream that the next step would draw past its end.
    first, last = "{0} has ended with 8 samples", "{1} has ended with 20 samples"
    for directories, weights, consumed, why, left in (
        ([made[0], made[1]], [0.5, 0.5], 16, first, "; not trained: 12 of the 20 of {1}"),
        ([made[0], live[1]], [0.5, 0.5], 16, first, "; not trained: 12 of the 20 of {1}"),
        ([live[0], made[1]], [0.25, 0.75], 24, last, "; not trained: 2 of the 8 of {0}, 2 of the 20 of {1}"),
    ):
        options = {"interleave_prob": weights, "stopping_strategy": "first_exhausted", "sharded_lazy_shuffle_window": 0}
        names = list(map(str, directories))
        blend = opened(tmp_path, dataset=names, micro_batch_size=4, global_batch_size=4, **options)
        assert blend.plan.end(consumed, blend.gate.published()) == (why.format(*names), left.format(*names))


def test_what_is_no_stream_is_refused(tmp_path: Path) -> None:
    raised(WaitTimeout, opened, tmp_path / "s")
    made = foreign(tmp_path / "foreign", TWO, TWO, end=True)
    tells(raised(SettingsRefused, opened, made), argument="sharded_lazy_samples_per_chunk")
    empty = produce(tmp_path / "empty", 0, 2)
    tells(raised(StreamTooShort, opened, empty), directory=str(empty), samples=0)
    # Nor is a copy beside it another one.
    copies = [str(produce(tmp_path / "s", 8, 2)), str(shutil.copytree(tmp_path / "s", tmp_path / "copy"))]
    tells(raised(SettingsRefused, opened, tmp_path, dataset=copies, interleave_prob=[0.5, 0.5]), argument="dataset")


def test_directory_that_another_program_fills_is_known_by_its_first_row(tmp_path: Path) -> None:
    rows = {"one": TWO, "same": TWO, "other": b'{"id": 3}\n{"id": 2}\n'}
    made = [foreign(tmp_path / name, first, TWO, end=True) for name, first in rows.items()]
    found = [opened(directory, sharded_lazy_samples_per_chunk=2).plan for directory in made]
    assert found[0].stream == found[1].stream != found[2].stream
    assert all(run.stream.startswith("first-row-") for run in found)


def test_resume_refuses_where_chunks_of_the_open_window_are_gone(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 18, 2)
    # Position 7 lies in the second window: chunks 3, 4 and 5.
    changes = resumable(directory, tmp_path / "checkpoint-7", 7)
    fields = {"checkpoint": changes["mcore_model"], "expected": "chunk 3", "actual": "chunks from 4 on"}
    retire(directory, 3, 9)
    opened(directory, **changes)
    # By hand, not by the producer.
    for chunk in (6, 5, 4):
        (directory / f"chunk_{chunk:05d}.jsonl").unlink()
        if chunk == 6:
            opened(directory, **changes)
            continue
        tells(raised(ResumeRefused, opened, directory, **changes), expected=f"chunk {chunk}", actual="deleted")
    retire(directory, 4, 9)
    tells(raised(ResumeRefused, opened, directory, **changes), **fields)


def test_trained_checkpoint_without_a_position_is_refused(tmp_path: Path) -> None:
    where = str(tmp_path / "checkpoint-3")
    stream = opened(produce(tmp_path / "s", 9, 2), hugging_face, max_steps=9, resume_from_checkpoint=where)
    stream.check_resume(0, 0)
    error = raised(ResumeRefused, stream.check_resume, 3, 3)
    tells(error, "--resume_only_model true --ignore_data_skip true", checkpoint=where)


def test_start_registers_the_run_and_tells_what_it_needs(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, 2, end=False)
    stream = opened(directory, train_iters=30, sharded_lazy_consumer="sft", sharded_lazy_shuffle_window=3)
    (consumer,) = list_consumers(directory, 2)
    assert consumer.cursor is not None and consumer.reading is None
    assert (consumer.name, consumer.cursor.consumed, consumer.chunks_before) == ("sft", 0, 0)
    assert consumer.cursor.stream_id == stream.plan.stream
    assert not hasattr(pickle.loads(pickle.dumps(stream)), "gate")
    order = "data-parallel rank 0 of 1, shuffled in windows of 3 chunks a rank"
    which = f"{directory} (4 samples published, 2 per chunk, still being produced)"
    assert repr(stream) == f"lazyshard with --sharded_lazy true: {which}; {order}"
    args = megatron(train_iters=30, global_batch_size=1, sharded_lazy_unit="sample")
    assert "dealt in units of 1 samples" in repr(open_stream(plan(args, directory, 0, 1)))
    produce(directory, 6, 2, end=False)
    open_stream(stream.plan)[0]
    (consumer,) = list_consumers(directory, 3)
    assert consumer.reading is not None
    assert (consumer.reading.needs_chunks, consumer.reading.stream_id) == (3, stream.plan.stream)


def test_start_that_is_refused_registers_nobody(tmp_path: Path) -> None:
    # Its cursor would keep all chunks for ever.
    directory = produce(tmp_path / "s", 18, 2)
    where = checkpoint(tmp_path / "checkpoint-3", position(stream="f" * 32))
    error = raised(ResumeRefused, opened, directory, hugging_face, max_steps=9, resume_from_checkpoint=where)
    tells(error, checkpoint=where, expected="f" * 32)
    retire(directory, 2, 9)
    late = raised(SettingsRefused, opened, directory, sharded_lazy_consumer="sft")
    tells(late, "below 2", "--consumers sft", argument="dataset")
    assert list_consumers(directory) == ()


def test_resumed_run_shows_a_sample_that_is_still_there(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 18, 2)
    run = opened(directory, **resumable(directory, tmp_path / "checkpoint-7", 7)).plan
    expected = open_stream(run)[7]
    retire(directory, 3, 9)
    assert open_stream(run).first_sample() == Subset(open_stream(run), range(9))[7] == expected
    assert expected in range(6, 12)
    # At the end of its stream it has none to show.
    changes = resumable(produce(tmp_path / "end", 18, 2), tmp_path / "checkpoint-18", 18)
    retire(tmp_path / "end", 8, 9)
    stream = open_stream(opened(tmp_path / "end", **changes).plan)
    assert stream.first_sample() is None
    assert not stream.gate.allows(18, 19)


def encode_one(row: dict[str, Any]) -> dict[str, Any]:
    if row.get("long"):
        raise SkipSample("Current length of row(9) is larger")
    if row.get("bad"):
        raise ValueError("no such image")
    return {"input_ids": [row["id"]] * row["tokens"], "lengths": [row["tokens"]]}


def pack(*rows: dict[str, Any]) -> dict[str, Any]:
    given = [{"tokens": 2, **row} for row in rows]
    return check_row(encode_pack([encode_row(row) for row in given], [row["tokens"] for row in given]))


def test_what_cannot_be_trained_says_why() -> None:
    for row, most, error, message in (
        ({"id": 3, "tokens": 1}, 4, ValueError, "--pack"),
        (pack({"id": 3}), None, ValueError, "--packing true"),
        (pack({"id": 3}, {"id": 4, "long": True}), 4, SkipSample, "row 1 of its pack"),
        (pack({"id": 3, "bad": True}, {"id": 4}), 4, ValueError, "row 0 of its pack"),
        (pack({"id": 3}, {"id": 4}), 3, ValueError, r"\[2, 2\]"),
    ):
        refusal_of(error, message, rows.encode_packs, row, most, encode_one)


@pytest.mark.parametrize("make", [megatron, hugging_face])
def test_a_stream_of_packs_and_packing_need_each_other(make: Any, tmp_path: Path) -> None:
    template, options = runs.Template(), {"num_train_epochs": 1}
    packs = publish_rows(tmp_path / "packs", 2, (pack({"id": number}) for number in range(40)))
    tells(raised(SettingsRefused, opened, packs, make, **options), argument="packing")
    alone, more = produce(tmp_path / "rows", 40, 2), {**options, "packing": True, "packing_length": 64}
    tells(raised(SettingsRefused, opened, alone, make, **more), argument="packing")
    # The template is made to take packs as PackingDataset makes it.
    opened(packs, make, template, packing=True, packing_length=None, **options)
    assert (template.packing, template.padding_free) == (True, True)


def gate(directory: Path, rank: int, dp: int, batch: int, window: int = 0, *, max_wait: float = 0.0) -> StepGate:
    order: dict[str, Any] = {"batch_size": batch, "layout": "strided", "shuffle_window": window}
    return StepGate(open_rank(directory, rank, dp, num_samples=2**50, max_wait=max_wait, **order), stop_at_end=True)


def decisions(asked: StepGate, per_step: int, steps: int, first_step: int = 0) -> list[bool | str]:
    """What the gate says of each step: whether it is trained, or the name of an error."""
    found: list[bool | str] = []
    for step in range(first_step, steps):
        try:
            found.append(asked.allows(step * per_step, (step + 1) * per_step))
        except (StreamTooShort, WaitTimeout) as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.parametrize("total", [0, 8, 13])
def test_what_is_decided_while_the_stream_grows_is_what_is_decided_after_its_end(tmp_path: Path, total: int) -> None:
    directory = produce(tmp_path / "s", 0, PER_CHUNK, end=False)
    gates = {(one, rank): gate(directory, rank, *one[:2], one[3]) for one in SETTINGS for rank in range(one[0])}
    trained = dict.fromkeys(gates, 0)
    for published in range(0, total + 1, PER_CHUNK):
        produce(directory, published, PER_CHUNK, end=False)
        for key, asked in gates.items():
            (_, batch, accumulation, _), _ = key
            size = batch * accumulation
            while (found := decisions(asked, size, trained[key] + 1, trained[key])) == [True]:
                trained[key] += 1
            # Never the end, as long as there may be more.
            assert found == ["WaitTimeout"]
        for setting in SETTINGS:
            assert len({trained[setting, rank] for rank in range(setting[0])}) == 1
    produce(directory, total, PER_CHUNK, end=True)
    for key, asked in gates.items():
        (dp, batch, accumulation, _), _ = key
        # A step takes so many of all samples; what is not a whole one is left over.
        steps = total // (dp * batch * accumulation)
        after: list[bool | str] = [False] * 3 if steps else ["StreamTooShort"]
        found = decisions(asked, batch * accumulation, steps + len(after), trained[key])
        assert found == [True] * (steps - trained[key]) + after, key
        assert (asked.stopped, sum(one.samples for one in asked.published())) == (bool(steps), total)


def test_data_that_do_not_come_are_a_timeout_that_names_them(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 6, PER_CHUNK, end=False)
    asked = gate(directory, 1, 2, 1, max_wait=0.05)
    assert asked.allows(0, 3)
    # Its stripe is chunks 2 and 3. The deadline is that of each wait alone.
    for _ in range(3):
        timeout = raised(WaitTimeout, asked.allows, 3, 4)
        tells(timeout, chunk=3, directory=str(directory))
        assert timeout.waited is not None and 0.05 <= timeout.waited < 5
    assert not asked.stopped
    produce(directory, 12, PER_CHUNK, end=False)
    assert asked.allows(3, 4)


@pytest.mark.parametrize("all_arrive", [True, False])
def test_ranks_that_give_up_save_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_arrive: bool) -> None:
    asks = mock.Mock(return_value=all_arrive)
    monkeypatch.setattr(streams, "all_arrive", asks)
    asked = gate(produce(tmp_path / "s", 6, PER_CHUNK, end=False), 1, 2, 1, max_wait=0.01)
    raised(WaitTimeout, asked.allows, 3, 4)
    assert not asks.called, "there is nothing to be saved, so nobody is asked"
    if not all_arrive:
        raised(WaitTimeout, asked.allows, 3, 4, saves=True)
        asked.end()
        assert not asked.stopped
        return
    assert not asked.allows(3, 4, saves=True)
    timeout = raised(WaitTimeout, asked.end)
    tells(timeout, chunk=3)
    assert timeout is asked.gave_up
    assert (asked.stopped, asks.call_count) == (True, 1)


def come(ranks: int, store: Any, patience: float) -> list[bool]:
    """What so many ranks of 3 find that come at the same time."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda _: streams._all_arrive(store, "key", 3, patience), range(ranks)))


def test_all_ranks_or_none_find_that_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_POLL_S", 0.01)
    assert come(3, HashStore(), 60.0) == [True, True, True]
    store = HashStore()
    assert come(2, store, 0.05) == [False, False]
    # It comes when the others have given it up: it is not alone in thinking that all are there.
    assert come(1, store, 60.0) == [False]
