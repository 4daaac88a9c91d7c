"""`stream`: what a start refuses, and a resume, before any sample is trained."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import LazyShardError, WaitTimeout
from lazyshard.stream import list_consumers
from lazyshard.stream.retire import retire
from lazyshard_swift import stream as streams
from lazyshard_swift.checkpoints import save_position
from lazyshard_swift.errors import ResumeRefused, SettingsRefused, StreamTooShort
from lazyshard_swift.opening import open_train_stream
from lazyshard_swift.stream import TrainStream
from tests.stream.streams import foreign, produce
from tests.swift.unit.runs import hugging_face, megatron, open_stream, plan, position

TWO = b'{"id": 1}\n{"id": 2}\n'


class Template:
    """Encodes to what it was given."""

    def encode(self, row: dict[str, Any], return_length: bool = False) -> dict[str, Any]:
        return row


def opened(directory: Path, make: Any = megatron, **changes: Any) -> TrainStream:
    common: dict[str, Any] = {
        "dataset": [str(directory)],
        "columns": None,
        "strict": False,
        "remove_unused_columns": True,
        "sharded_lazy_max_wait": 0.01,
    }
    if make is megatron:
        common |= {"train_iters": 7, "global_batch_size": 1}
    return open_train_stream(make(**{**common, **changes}), Template())


def test_stream_is_opened_by_what_the_arguments_say(tmp_path: Path) -> None:
    stream = opened(produce(tmp_path / "s", 9, 2), num_train_epochs=1, micro_batch_size=2)
    assert len(stream) == 8
    assert repr(stream) == (
        f"TrainStream({tmp_path}/s, ended, 9 samples published, 2 per chunk, rank 0 of 1, "
        f"shuffled in windows of 8 chunks a rank)"
    )


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
    assert notices == [
        "lazyshard: trained 4 of 8 published samples",
        "lazyshard: trained 8 of 12 published samples",
        "lazyshard: trained 14 of 12 published samples, in several epochs",
    ]


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
    directories = [
        str(produce(tmp_path / name, samples, 2, end=end))
        for name, samples, end in zip("ab", (8, 20), ended, strict=True)
    ]
    blend = opened(
        tmp_path,
        dataset=directories,
        interleave_prob=weights,
        stopping_strategy="first_exhausted",
        micro_batch_size=4,
        global_batch_size=4,
        sharded_lazy_shuffle_window=0,
    )
    assert blend.why_it_stops(consumed, 4) == (why.format(*directories), left.format(*directories))


def test_stream_that_is_not_there_is_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(WaitTimeout, match="no stream there yet"):
        opened(tmp_path / "s")


def test_directory_of_other_files_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "part-00000.jsonl").write_bytes(TWO)
    with pytest.raises(SettingsRefused, match=r"no stream in it, but other files \(part-00000\.jsonl\)"):
        opened(tmp_path)


def test_directory_that_another_program_fills_needs_a_size(tmp_path: Path) -> None:
    directory = foreign(tmp_path / "s", TWO, TWO, end=True)
    with pytest.raises(SettingsRefused, match="give --sharded_lazy_samples_per_chunk N") as refused:
        opened(directory)
    assert refused.value.argument == "sharded_lazy_samples_per_chunk"


def test_stream_that_ended_without_a_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StreamTooShort, match="ended with 0 samples"):
        opened(produce(tmp_path / "s", 0, 2))


def test_directory_that_another_program_fills_is_known_by_its_first_row(tmp_path: Path) -> None:
    one, same, other = (
        foreign(tmp_path / name, rows, TWO, end=True)
        for name, rows in (("one", TWO), ("same", TWO), ("other", b'{"id": 3}\n{"id": 2}\n'))
    )
    found = [opened(directory, sharded_lazy_samples_per_chunk=2).plan for directory in (one, same, other)]
    assert found[0].facts.stream == found[1].facts.stream != found[2].facts.stream
    assert [run.stream_id for run in found] == [None, None, None]


@pytest.mark.parametrize("chunk", [4, 5, 6])
def test_resume_refuses_where_any_chunk_of_the_open_window_was_deleted(tmp_path: Path, chunk: int) -> None:
    directory = produce(tmp_path / "s", 18, 2)
    changes: dict[str, Any] = {"train_iters": 18, "sharded_lazy_shuffle_window": 3, "finetune": False}
    checkpoint = tmp_path / "checkpoint-7"
    whole = opened(directory, **changes)
    save_position(whole.plan.position(7, 7), checkpoint)
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("7")
    opened(directory, **changes, mcore_model=str(checkpoint))
    # Position 7 lies in the second window: chunks 3, 4 and 5.
    (directory / f"chunk_{chunk:05d}.jsonl").unlink()
    if chunk == 6:
        opened(directory, **changes, mcore_model=str(checkpoint))
        return
    with pytest.raises(ResumeRefused, match=f"chunk {chunk} is published"):
        opened(directory, **changes, mcore_model=str(checkpoint))


def test_trained_checkpoint_without_a_position_is_refused(tmp_path: Path) -> None:
    stream = opened(
        produce(tmp_path / "s", 9, 2), hugging_face, max_steps=9, resume_from_checkpoint=str(tmp_path / "checkpoint-3")
    )
    stream.check_resume(0, 0)
    with pytest.raises(ResumeRefused, match=r"there is no lazyshard\.json beside the weights") as refused:
        stream.check_resume(3, 3)
    assert refused.value.checkpoint == str(tmp_path / "checkpoint-3")
    assert "--resume_only_model true --ignore_data_skip true" in str(refused.value)


def test_checkpoint_of_another_stream_is_refused_when_the_stream_is_opened(tmp_path: Path) -> None:
    save_position(position(stream="f" * 32), tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "trainer_state.json").touch()
    with pytest.raises(ResumeRefused, match="ffffffff"):
        opened(
            produce(tmp_path / "s", 9, 2),
            hugging_face,
            max_steps=9,
            resume_from_checkpoint=str(tmp_path / "checkpoint-3"),
        )


@pytest.mark.parametrize("consumed", [8, 100])
def test_checkpoint_ahead_of_an_ended_stream_is_refused_or_at_its_end(tmp_path: Path, consumed: int) -> None:
    # The stream ended with 8 samples. A run that stops there never trains a ninth.
    directory = produce(tmp_path / "s", 8, 2)
    args: dict[str, Any] = {"max_steps": 200, "sharded_lazy_shuffle_window": 0}
    run = plan(hugging_face(**args), directory, 0, 1)
    save_position(run.position(consumed, consumed), tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "trainer_state.json").touch()
    resumed = hugging_face(**args, resume_from_checkpoint=str(tmp_path / "checkpoint"))
    stream = open_stream(plan(resumed, directory, 0, 1))
    if consumed == 8:
        stream.check_resume(8, 8)
        assert not stream.gate.allows(8, 9)
        return
    with pytest.raises(LazyShardError):
        stream.check_resume(consumed, consumed)


def test_first_sample_is_not_waited_for(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 2, 2, end=False)
    args = hugging_face(max_steps=9)
    assert open_stream(plan(args, directory, 0, 1)).first_sample() is None
    produce(directory, 4, 2, end=False)
    assert open_stream(plan(args, directory, 0, 1)).first_sample() in (0, 1, 2, 3)


def test_start_registers_the_run_and_tells_what_it_needs(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, 2, end=False)
    stream = opened(directory, train_iters=30, sharded_lazy_consumer="sft", sharded_lazy_shuffle_window=3)
    (consumer,) = list_consumers(directory, 2)
    assert consumer.cursor is not None and consumer.reading is None
    assert (consumer.name, consumer.cursor.consumed, consumer.chunks_before) == ("sft", 0, 0)
    assert consumer.cursor.stream_id == stream.plan.stream_id
    produce(directory, 6, 2, end=False)
    open_stream(stream.plan)[0]
    (consumer,) = list_consumers(directory, 3)
    assert consumer.reading is not None
    assert (consumer.reading.needs_chunks, consumer.reading.stream_id) == (3, stream.plan.stream_id)


def test_start_that_is_refused_registers_nobody(tmp_path: Path) -> None:
    # Its cursor would keep all chunks for ever.
    directory = produce(tmp_path / "s", 18, 2)
    save_position(position(stream="f" * 32), tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "trainer_state.json").touch()
    with pytest.raises(ResumeRefused):
        opened(directory, hugging_face, max_steps=9, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    retire(directory, 2, 9)
    with pytest.raises(SettingsRefused) as refused:
        opened(directory, sharded_lazy_consumer="sft")
    assert refused.value.argument == "dataset"
    assert "has deleted the chunks below 2, which a run that starts anew would train first" in str(refused.value)
    assert "--consumers sft" in str(refused.value)
    assert list_consumers(directory) == ()


def resumable(directory: Path, checkpoint: Path, step: int) -> dict[str, Any]:
    """Trains so many steps of one sample; returns the arguments to go on."""
    changes: dict[str, Any] = {"train_iters": 18, "sharded_lazy_shuffle_window": 3, "finetune": False}
    save_position(opened(directory, **changes).plan.position(step, step), checkpoint)
    (checkpoint / "latest_checkpointed_iteration.txt").write_text(str(step))
    return {**changes, "mcore_model": str(checkpoint)}


def test_resumed_run_shows_a_sample_that_is_still_there(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 18, 2)
    changes = resumable(directory, tmp_path / "checkpoint-7", 7)
    run = opened(directory, **changes).plan
    expected = open_stream(run)[7]
    retire(directory, 3, 9)
    assert open_stream(run).first_sample() == expected
    assert expected in range(6, 12)


def test_resumed_run_at_the_end_of_its_stream_has_no_sample_to_show(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 18, 2)
    changes = resumable(directory, tmp_path / "checkpoint-18", 18)
    retire(directory, 8, 9)
    stream = open_stream(opened(directory, **changes).plan)
    assert stream.first_sample() is None
    assert not stream.gate.allows(18, 19)


@pytest.mark.parametrize("chunk", [4, 6])
def test_resume_refuses_where_a_chunk_of_the_open_window_was_retired(tmp_path: Path, chunk: int) -> None:
    directory = produce(tmp_path / "s", 18, 2)
    changes = resumable(directory, tmp_path / "checkpoint-7", 7)
    retire(directory, chunk, 9)
    # At once, without the patience for chunks that are just appearing.
    with pytest.raises(ResumeRefused, match=f"chunk 3, but .* deleted all chunks below {chunk}"):
        opened(directory, **changes)


def test_stream_travels_to_workers_without_its_gate(tmp_path: Path) -> None:
    stream = opened(produce(tmp_path / "s", 9, 2), num_train_epochs=1, sharded_lazy_shuffle_window=0)
    again = pickle.loads(pickle.dumps(stream))
    assert len(again) == 9
    assert not hasattr(again, "gate")
