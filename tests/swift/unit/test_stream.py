"""`stream`: what a start refuses, and a resume, before any sample is trained; and packs, which `--packing` needs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Subset

from lazyshard import ChunkWriter
from lazyshard.errors import LazyShardError, SkipSample, WaitTimeout
from lazyshard.format.batch import encode_pack
from lazyshard.format.row import check_row, encode_row
from lazyshard.stream import list_consumers
from lazyshard.stream.retention import retire
from lazyshard_swift import rows
from lazyshard_swift import stream as streams
from lazyshard_swift.errors import ResumeRefused, SettingsRefused, StreamTooShort
from tests.stream.streams import foreign, produce
from tests.swift.unit.runs import (
    Template,
    checkpoint,
    hugging_face,
    megatron,
    open_stream,
    opened,
    plan,
    position,
    refused,
)

TWO = b'{"id": 1}\n{"id": 2}\n'


def resumable(directory: Path, folder: Path, step: int) -> dict[str, Any]:
    """Trains so many steps of one sample, in windows of 3 chunks; returns the arguments to go on."""
    changes: dict[str, Any] = {"train_iters": 18, "sharded_lazy_shuffle_window": 3, "finetune": False}
    return {**changes, "mcore_model": checkpoint(folder, opened(directory, **changes).plan.position(step, step))}


def test_how_much_was_trained_is_told_now_and_then_and_at_checkpoints(
    tmp_path: Path, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = produce(tmp_path / "s", 8, 2, end=False)
    stream = opened(directory)
    notices.clear()
    stream.tell_progress(4)
    assert notices == []
    stream.tell_progress(4, at_once=True)
    produce(directory, 12, 2, end=False)
    monkeypatch.setattr(streams, "TOLD_EVERY_S", 0.0)
    stream.tell_progress(8)
    stream.tell_progress(14)
    told = "trained 4 of 8 published", "trained 8 of 12 published", "trained 14 of 12 published samples, in several"
    assert [words in text for words, text in zip(told, notices, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("ended", "weights", "consumed", "why", "left"),
    [
        # Steps of 4 samples; the first that the next step would draw past its end.
        ((True, True), [0.5, 0.5], 16, "{0} has ended with 8 samples", "; not trained: 12 of the 20 of {1}"),
        ((True, False), [0.5, 0.5], 16, "{0} has ended with 8 samples", "; not trained: 12 of the 20 of {1}"),
        (
            (False, True),
            [0.25, 0.75],
            24,
            "{1} has ended with 20 samples",
            "; not trained: 2 of the 8 of {0}, 2 of the 20 of {1}",
        ),
    ],
)
def test_end_of_a_blend_tells_which_stream_has_ended_and_what_was_not_trained(
    tmp_path: Path, ended: tuple[bool, bool], weights: list[float], consumed: int, why: str, left: str
) -> None:
    sizes = {"a": 8, "b": 20}
    directories = [
        str(produce(tmp_path / name, sizes[name], 2, end=end)) for name, end in zip(sizes, ended, strict=True)
    ]
    options = {"interleave_prob": weights, "stopping_strategy": "first_exhausted", "sharded_lazy_shuffle_window": 0}
    blend = opened(tmp_path, dataset=directories, micro_batch_size=4, global_batch_size=4, **options)
    found = blend.plan.end(consumed, blend.gate.published())
    assert found == (why.format(*directories), left.format(*directories))


def test_what_is_no_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WaitTimeout):
        opened(tmp_path / "s")
    other = tmp_path / "other"
    other.mkdir()
    (other / "part-00000.jsonl").write_bytes(TWO)
    with refused(SettingsRefused, "part-00000.jsonl", argument="dataset"):
        opened(other)
    with refused(SettingsRefused, argument="sharded_lazy_samples_per_chunk"):
        opened(foreign(tmp_path / "foreign", TWO, TWO, end=True))
    empty = produce(tmp_path / "empty", 0, 2)
    with refused(StreamTooShort, directory=str(empty), samples=0):
        opened(empty)


def test_directory_that_another_program_fills_is_known_by_its_first_row(tmp_path: Path) -> None:
    rows = {"one": TWO, "same": TWO, "other": b'{"id": 3}\n{"id": 2}\n'}
    made = [foreign(tmp_path / name, first, TWO, end=True) for name, first in rows.items()]
    found = [opened(directory, sharded_lazy_samples_per_chunk=2).plan for directory in made]
    assert found[0].facts.stream == found[1].facts.stream != found[2].facts.stream
    assert all(run.facts.stream.startswith("first-row-") for run in found)


@pytest.mark.parametrize("retired", [3, 4])
def test_resume_refuses_where_chunks_of_the_open_window_were_deleted(tmp_path: Path, retired: int) -> None:
    directory = produce(tmp_path / "s", 18, 2)
    changes = resumable(directory, tmp_path / "checkpoint-7", 7)
    opened(directory, **changes)
    # Position 7 lies in the second window: chunks 3, 4 and 5.
    retire(directory, retired, 9)
    if retired == 3:
        opened(directory, **changes)
        return
    with refused(ResumeRefused, checkpoint=changes["mcore_model"], expected="chunk 3", actual="chunks from 4 on"):
        opened(directory, **changes)


@pytest.mark.parametrize("chunk", [4, 5, 6])
def test_resume_refuses_where_any_chunk_of_the_open_window_is_gone(tmp_path: Path, chunk: int) -> None:
    directory = produce(tmp_path / "s", 18, 2)
    changes = resumable(directory, tmp_path / "checkpoint-7", 7)
    # By hand, not by the producer. Position 7 lies in the second window: chunks 3, 4 and 5.
    (directory / f"chunk_{chunk:05d}.jsonl").unlink()
    if chunk == 6:
        opened(directory, **changes)
        return
    with refused(ResumeRefused, expected=f"chunk {chunk}", actual="deleted"):
        opened(directory, **changes)


def test_checkpoint_ahead_of_an_ended_stream_is_refused(tmp_path: Path) -> None:
    directory, args = produce(tmp_path / "s", 8, 2), {"max_steps": 200, "sharded_lazy_shuffle_window": 0}
    where = checkpoint(tmp_path / "checkpoint", plan(hugging_face(**args), directory, 0, 1).position(100, 100))
    with pytest.raises(LazyShardError):
        open_stream(plan(hugging_face(**args, resume_from_checkpoint=where), directory, 0, 1)).check_resume(100, 100)


def test_trained_checkpoint_without_a_position_is_refused(tmp_path: Path) -> None:
    where = str(tmp_path / "checkpoint-3")
    stream = opened(produce(tmp_path / "s", 9, 2), hugging_face, max_steps=9, resume_from_checkpoint=where)
    stream.check_resume(0, 0)
    with refused(ResumeRefused, "--resume_only_model true --ignore_data_skip true", checkpoint=where):
        stream.check_resume(3, 3)


def test_start_registers_the_run_and_tells_what_it_needs(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, 2, end=False)
    stream = opened(directory, train_iters=30, sharded_lazy_consumer="sft", sharded_lazy_shuffle_window=3)
    (consumer,) = list_consumers(directory, 2)
    assert consumer.cursor is not None and consumer.reading is None
    assert (consumer.name, consumer.cursor.consumed, consumer.chunks_before) == ("sft", 0, 0)
    assert consumer.cursor.stream_id == stream.plan.facts.stream
    assert not hasattr(pickle.loads(pickle.dumps(stream)), "gate")
    assert "2 per chunk" in repr(stream) and "in windows of 3 chunks" in repr(stream)
    args = megatron(train_iters=30, global_batch_size=1, sharded_lazy_unit="sample")
    assert "dealt in units of 1 samples" in repr(open_stream(plan(args, directory, 0, 1)))
    produce(directory, 6, 2, end=False)
    open_stream(stream.plan)[0]
    (consumer,) = list_consumers(directory, 3)
    assert consumer.reading is not None
    assert (consumer.reading.needs_chunks, consumer.reading.stream_id) == (3, stream.plan.facts.stream)


def test_start_that_is_refused_registers_nobody(tmp_path: Path) -> None:
    # Its cursor would keep all chunks for ever.
    directory = produce(tmp_path / "s", 18, 2)
    where = checkpoint(tmp_path / "checkpoint-3", position(stream="f" * 32))
    with refused(ResumeRefused, checkpoint=where, expected="f" * 32):
        opened(directory, hugging_face, max_steps=9, resume_from_checkpoint=where)
    retire(directory, 2, 9)
    with refused(SettingsRefused, "below 2", "--consumers sft", argument="dataset"):
        opened(directory, sharded_lazy_consumer="sft")
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


def write_packs(directory: Path, count: int) -> Path:
    with ChunkWriter(directory, 2) as writer:
        for number in range(count):
            writer.write(pack({"id": number}))
    return directory


@pytest.mark.parametrize(
    ("row", "most", "error", "message"),
    [
        ({"id": 3, "tokens": 1}, 4, ValueError, "--pack"),
        (pack({"id": 3}), None, ValueError, "--packing true"),
        (pack({"id": 3}, {"id": 4, "long": True}), 4, SkipSample, "row 1 of its pack"),
        (pack({"id": 3, "bad": True}, {"id": 4}), 4, ValueError, "row 0 of its pack"),
        (pack({"id": 3}, {"id": 4}), 3, ValueError, r"\[2, 2\]"),
    ],
)
def test_what_cannot_be_trained_says_why(row: Any, most: int | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rows.encode_packs(row, most, encode_one)


@pytest.mark.parametrize("make", [megatron, hugging_face])
def test_a_stream_of_packs_and_packing_need_each_other(make: Any, tmp_path: Path) -> None:
    packs, template, options = write_packs(tmp_path / "packs", 40), Template(), {"num_train_epochs": 1}
    with refused(SettingsRefused, argument="packing"):
        opened(packs, make, **options)
    with refused(SettingsRefused, argument="packing"):
        opened(produce(tmp_path / "rows", 40, 2), make, packing=True, packing_length=64, **options)
    # The template is made to take packs as PackingDataset makes it.
    opened(packs, make, template, packing=True, packing_length=None, **options)
    assert (template.packing, template.padding_free) == (True, True)
