"""`planning`: from arguments, stream and checkpoint to a plan that is the same on all ranks."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from lazyshard.data.rank import Rank
from lazyshard.errors import LazyShardError
from lazyshard.plan import Part, Rules
from lazyshard_swift.checkpoints import save_position
from lazyshard_swift.errors import PositionInvalid, ResumeRefused, SettingsRefused, StreamTooShort
from lazyshard_swift.planning import batch_sizes, decide, resume_checkpoint
from lazyshard_swift.position import Position
from lazyshard_swift.run_plan import RunPlan
from lazyshard_swift.settings import Progress
from tests.data.swift_samplers import megatron_batches
from tests.stream.streams import produce
from tests.swift.unit.runs import facts, hugging_face, megatron, open_stream, plan, position

DIRECTORY = "/streams/one"


def checkpoint(folder: Path, saved: Position | None = None) -> str:
    """Makes what Megatron saves, as far as it is looked at."""
    folder.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    if saved is not None:
        save_position(saved, folder)
    return str(folder)


def decided(args: Any, samples: int = 100, ended: bool = True, dp: int = 2) -> RunPlan:
    return decide(args, DIRECTORY, facts(samples, ended), Rank(0, dp))


@pytest.mark.parametrize(
    ("args", "dp", "sizes"),
    [
        (megatron(micro_batch_size=2, global_batch_size=16), 4, (2, 16)),
        (hugging_face(per_device_train_batch_size=2, gradient_accumulation_steps=3), 4, (2, 24)),
        (hugging_face(per_device_train_batch_size=2, n_gpu=0), 1, (2, 2)),
        # One process with several devices, torch's DataParallel.
        (hugging_face(per_device_train_batch_size=2, n_gpu=4), 1, (8, 8)),
    ],
)
def test_batch_sizes(args: Any, dp: int, sizes: tuple[int, int]) -> None:
    assert batch_sizes(args, dp) == sizes


@pytest.mark.parametrize(
    ("args", "ended", "expected"),
    [
        (megatron(train_iters=7), False, ("strided", 2)),
        (megatron(train_iters=7), True, ("strided", 8)),
        (megatron(train_iters=7, train_dataloader_shuffle=False), False, ("strided", 0)),
        (megatron(train_iters=7, train_dataloader_shuffle=False), True, ("strided", 0)),
        (megatron(train_iters=7, sharded_lazy_shuffle_window=3), False, ("strided", 3)),
        (megatron(train_iters=7, sharded_lazy_shuffle_window=0), True, ("strided", 0)),
        (megatron(train_iters=7, data_sharding=True), True, ("block", 0)),
        (megatron(train_iters=7, data_sharding=True, sharded_lazy_shuffle_window=3), True, ("strided", 3)),
        (megatron(train_iters=7, data_sharding=True, sharded_lazy_shuffle_window=0), True, ("strided", 0)),
        (megatron(train_iters=7, data_sharding=True, train_dataloader_shuffle=False), True, ("strided", 0)),
        (hugging_face(max_steps=7), False, ("strided", 2)),
        (hugging_face(), True, ("strided", 8)),
        (hugging_face(train_dataloader_shuffle=False), True, ("strided", 0)),
    ],
)
def test_order_of_a_new_run(args: Any, ended: bool, expected: tuple[str, int], notices: list[str]) -> None:
    run = decided(args, ended=ended)
    assert (run.layout, run.window) == expected
    assert run.course.rules == Rules(4, expected[1] * 4, 42)
    assert run.course.parts == (Part(2),)
    assert notices == []


@pytest.mark.parametrize(
    ("args", "expected", "told"),
    [
        (megatron(train_iters=7), ("strided", 0), True),
        (megatron(train_iters=7, data_sharding=True), ("strided", 0), True),
        (hugging_face(max_steps=7), ("strided", 0), True),
        # What the user names counts; the data set then says what it undoes.
        (megatron(train_iters=7, sharded_lazy_shuffle_window=3), ("strided", 3), False),
        (megatron(train_iters=7, train_dataloader_shuffle=False), ("strided", 0), False),
    ],
)
def test_a_stream_that_was_dealt_by_cost_is_not_shuffled_once_more(
    args: Any, expected: tuple[str, int], told: bool, notices: list[str]
) -> None:
    run = decide(args, DIRECTORY, facts()._replace(dealt=True), Rank(0, 2))
    assert (run.layout, run.window) == expected
    assert ["dealt by cost" in text for text in notices] == [True] * told


@pytest.mark.parametrize("window", [0, 8])
def test_a_run_over_a_stream_that_was_dealt_by_cost_keeps_its_window(
    window: int, tmp_path: Path, notices: list[str]
) -> None:
    folder = checkpoint(tmp_path / "out", position(window=window))
    run = decide(
        megatron(train_iters=7, mcore_model=folder, finetune=False),
        DIRECTORY,
        facts()._replace(dealt=True),
        Rank(0, 2),
    )
    assert (run.layout, run.window) == ("strided", window)


@pytest.mark.parametrize(
    ("args", "ended", "window", "told"),
    [
        # Chunks of 4: (3 * 4 + 1) / 3 > 4 > (2 * 4 + 1) / 3.
        (megatron(train_iters=7), True, 3, "neighbours are 4 apart"),
        (hugging_face(max_steps=20), False, 3, "training begins with 6 chunks"),
        # Named by the user, as a window would be.
        (megatron(train_iters=7, data_sharding=True), True, 3, "windows of 3 chunks"),
    ],
)
def test_distance_chooses_the_window(args: Any, ended: bool, window: int, told: str, notices: list[str]) -> None:
    args.sharded_lazy_shuffle_distance = 4
    run = decided(args, ended=ended)
    assert (run.layout, run.window) == ("strided", window)
    assert run.course.rules == Rules(4, window * 4, 42)
    assert len(notices) == 1
    assert told in notices[0]


@pytest.mark.parametrize(
    ("args", "ended", "largest", "why"),
    [
        # 100 samples for 2 ranks: (50 + 1) / 3.
        (megatron(train_iters=7), True, 17, "has ended with 100 samples, 50 for each of 2"),
        # 7 steps of 4: 14 on each rank.
        (megatron(train_iters=7, global_batch_size=4), False, 5, "this run trains 28 samples at the most, 14 on each"),
    ],
)
def test_distance_that_cannot_be_reached_is_refused_with_the_largest_that_can(
    args: Any, ended: bool, largest: int, why: str
) -> None:
    args.sharded_lazy_shuffle_distance = largest
    decided(args, ended=ended)
    args.sharded_lazy_shuffle_distance = largest + 1
    with pytest.raises(SettingsRefused) as refused:
        decided(args, ended=ended)
    assert refused.value.argument == "sharded_lazy_shuffle_distance"
    assert f"give {largest} at the most" in str(refused.value)
    assert why in str(refused.value)


def test_distance_of_a_stream_with_a_sample_a_rank_is_refused() -> None:
    with pytest.raises(SettingsRefused, match="leave it out"):
        decided(megatron(train_iters=1, sharded_lazy_shuffle_distance=1), samples=2)


def test_distance_past_all_numbers_is_refused() -> None:
    with pytest.raises(SettingsRefused, match="give a smaller one"):
        decided(megatron(train_iters=1, sharded_lazy_shuffle_distance=2**61))


def test_ms_swifts_shuffle_over_all_is_put_aside_on_a_live_stream(notices: list[str]) -> None:
    run = decided(megatron(train_iters=7, data_sharding=True), ended=False)
    assert (run.layout, run.window) == ("strided", 2)
    assert len(notices) == 1
    assert "--data_sharding true is put aside" in notices[0]


@pytest.mark.parametrize(
    ("saved", "changes", "ended", "expected"),
    [
        # A run that was begun while the stream was live goes on as it was.
        ({"window": 2}, {}, True, ("strided", 2)),
        ({"window": 8}, {}, False, ("strided", 8)),
        ({"window": 3}, {"sharded_lazy_shuffle_window": 3}, True, ("strided", 3)),
        # The window of a distance is the same again, however many samples there are by now.
        ({"window": 3}, {"sharded_lazy_shuffle_distance": 4}, True, ("strided", 3)),
        ({"window": 750}, {"sharded_lazy_shuffle_distance": 1000}, True, ("strided", 750)),
        ({"window": 3}, {"sharded_lazy_shuffle_distance": 5}, True, None),
        ({"window": 0}, {"sharded_lazy_shuffle_distance": 4}, True, None),
        # Another order than the one in which it was begun is refused.
        ({"window": 3}, {"sharded_lazy_shuffle_window": 2}, True, None),
        ({"window": 3}, {"train_dataloader_shuffle": False}, True, None),
        ({"window": 0}, {}, True, None),
        ({"window": 0}, {"train_dataloader_shuffle": False}, True, ("strided", 0)),
        ({"window": 0}, {"sharded_lazy_shuffle_window": 0}, True, ("strided", 0)),
        ({"window": 2}, {"data_sharding": True}, True, ("strided", 2)),
        ({"window": 0, "layout": "block"}, {"data_sharding": True}, True, ("block", 0)),
    ],
)
def test_order_of_a_resumed_run(
    tmp_path: Path, saved: dict[str, Any], changes: dict[str, Any], ended: bool, expected: tuple[str, int] | None
) -> None:
    folder = checkpoint(tmp_path / "checkpoint-3", position(**saved))
    args = megatron(train_iters=7, finetune=False, mcore_model=folder, **changes)
    if expected is None:
        with pytest.raises(ResumeRefused, match="this run has window"):
            decided(args, ended=ended)
        return
    run = decided(args, ended=ended)
    assert (run.layout, run.window) == expected
    assert (run.checkpoint, run.saved) == (folder, position(**saved))


@pytest.mark.parametrize(
    "changes",
    [
        {"data_sharding": True},
        {"data_sharding": False},
        {"data_sharding": True, "train_dataloader_shuffle": False},
        {"data_sharding": False, "train_dataloader_shuffle": False},
        {"data_sharding": True, "sharded_lazy_shuffle_window": 0},
        {"data_sharding": True, "sharded_lazy_shuffle_window": 2},
    ],
)
def test_run_in_ms_swifts_own_shuffle_goes_on_exactly_or_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = produce(tmp_path / "s", 48, 4)

    def batches(args: Any, rank: int, consumed: int) -> list[Any]:
        run = plan(args, directory, rank, 2)
        stream = open_stream(run)
        if run.saved is not None:
            stream.check_resume(run.saved.consumed, run.saved.step)
        assert run.layout == "block", "in order: what ms-swift's sampler has drawn at random would come again"
        # As ms-swift does, with its own arguments.
        found = megatron_batches(
            stream, rank, 2, 2, sharding=args.data_sharding, shuffle=args.train_dataloader_shuffle, consumed=consumed
        )
        return [stream[index] for indices in found for index in indices]

    common: dict[str, Any] = {"num_train_epochs": 1, "micro_batch_size": 2, "global_batch_size": 8}
    first = megatron(**common, data_sharding=True)
    trained = [i for rank in range(2) for i in batches(first, rank, 0)[:8]]
    where = plan(first, directory, 0, 2).position(16, 2)
    folder = checkpoint(tmp_path / "checkpoint-2", where)
    args = megatron(**common, finetune=False, mcore_model=folder, **changes)
    try:
        rest = [i for rank in range(2) for i in batches(args, rank, 16)]
    except LazyShardError:
        assert changes != {"data_sharding": True}
        return
    assert sorted(trained + rest) == list(range(48))


def test_sharding_that_was_not_there_before_is_put_aside(tmp_path: Path, notices: list[str]) -> None:
    folder = checkpoint(tmp_path / "checkpoint-3", position(window=2))
    args = megatron(train_iters=7, finetune=False, mcore_model=folder, data_sharding=True)
    assert decided(args).layout == "strided"
    assert [text for text in notices if "--data_sharding true is put aside" in text]


@pytest.mark.parametrize(
    ("args", "samples", "ended", "dp", "epoch_samples", "progress", "stop_at_end"),
    [
        # Ended: whole micro batches on all ranks. Live: the run.
        (megatron(num_train_epochs=2), 100, True, 2, 100, Progress(None, 2), False),
        (megatron(num_train_epochs=2), 101, True, 2, 100, Progress(None, 2), False),
        (megatron(num_train_epochs=2, micro_batch_size=3), 101, True, 4, 96, Progress(None, 2), False),
        (megatron(train_iters=7), 101, True, 2, 100, Progress(7, None), True),
        (megatron(train_iters=7, sharded_lazy_on_end="repeat"), 100, True, 2, 100, Progress(7, None), False),
        (megatron(train_iters=7), 0, False, 2, 112, Progress(7, None), True),
        (megatron(train_iters=7, sharded_lazy_on_end="repeat"), 0, False, 2, 112, Progress(7, None), False),
        (hugging_face(), 101, True, 2, 100, Progress(None, 3.0), False),
        (hugging_face(max_steps=7), 101, True, 2, 100, Progress(7, None), True),
        (hugging_face(max_steps=7, gradient_accumulation_steps=3), 5, False, 2, 42, Progress(7, None), True),
        (hugging_face(max_steps=7, sharded_lazy_on_end="repeat"), 5, False, 2, 14, Progress(7, None), False),
    ],
)
def test_length_of_an_epoch_and_what_ends_the_run(
    args: Any, samples: int, ended: bool, dp: int, epoch_samples: int, progress: Progress, stop_at_end: bool
) -> None:
    run = decided(args, samples, ended, dp)
    assert (run.epoch_samples, run.progress, run.stop_at_end) == (epoch_samples, progress, stop_at_end)
    assert run.position(16, 1).by_steps is (progress.steps is not None)


def test_epochs_are_taken_from_megatrons_arguments_on_a_live_stream(notices: list[str]) -> None:
    args = megatron(train_iters=7, num_train_epochs=2)
    assert decided(args, ended=False).progress == Progress(7, None)
    # Or ms-swift would count them before the iterations.
    assert args.num_train_epochs is None
    assert len(notices) == 1
    assert "--num_train_epochs 2 is put aside" in notices[0]


def test_epochs_stay_in_megatrons_arguments_once_the_stream_has_ended() -> None:
    args = megatron(train_iters=7, num_train_epochs=2)
    assert decided(args).progress == Progress(None, 2)
    assert args.num_train_epochs == 2


@pytest.mark.parametrize(
    ("args", "samples", "dp"),
    [
        (megatron(train_iters=7), 0, 1),
        (megatron(train_iters=7), 3, 4),
        (megatron(num_train_epochs=1, micro_batch_size=4), 7, 2),
        (hugging_face(per_device_train_batch_size=2), 7, 4),
        (megatron(train_iters=7, sharded_lazy_on_end="repeat"), 1, 2),
    ],
)
def test_stream_with_less_than_a_micro_batch_a_rank_is_refused(args: Any, samples: int, dp: int) -> None:
    with pytest.raises(StreamTooShort, match=f"{DIRECTORY}: the stream has ended with {samples} samples") as refused:
        decided(args, samples, dp=dp)
    assert (refused.value.directory, refused.value.samples) == (DIRECTORY, samples)


def test_live_stream_without_samples_is_waited_for() -> None:
    assert decided(megatron(train_iters=7), 0, ended=False, dp=8).epoch_samples == 112


def test_live_stream_without_a_length_is_refused() -> None:
    with pytest.raises(SettingsRefused, match="--train_iters N"):
        decided(megatron(num_train_epochs=1), ended=False)


@pytest.mark.parametrize(("data_seed", "seed"), [(None, 0), (0, 0), (42, 42), (-1, 2**63 - 1), (2**64 + 5, 5)])
def test_seed_is_one_that_the_plan_takes(data_seed: int | None, seed: int) -> None:
    run = decided(megatron(train_iters=7, data_seed=data_seed))
    assert run.seed == run.state.seed == seed


def test_consumer_is_the_users_else_that_of_the_checkpoint_else_that_of_the_folder(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-3", position(consumer="before"))
    resumed = {"finetune": False, "mcore_model": folder}
    assert decided(megatron(train_iters=7)).consumer == "one-0436b62a"
    assert decided(megatron(train_iters=7, **resumed)).consumer == "before"
    assert decided(megatron(train_iters=7, sharded_lazy_consumer="mine", **resumed)).consumer == "mine"


def test_all_ranks_decide_the_same() -> None:
    runs = [decide(megatron(train_iters=7), DIRECTORY, facts(), Rank(rank, 4)) for rank in range(4)]
    assert len({dataclasses.replace(run, rank=Rank(0, 4)) for run in runs}) == 1


def test_plan_survives_pickling() -> None:
    run = decided(megatron(train_iters=7))
    assert pickle.loads(pickle.dumps(run)) == run


def test_position_holds_what_the_plan_decided() -> None:
    run = decided(megatron(train_iters=7, micro_batch_size=2, sharded_lazy_shuffle_window=3), ended=False)
    found = run.position(32, 2)
    expected = position(
        consumed=32,
        step=2,
        batch_size=2,
        window=3,
        epoch_samples=112,
        by_steps=True,
        consumer="one-0436b62a",
        saved_at=found.saved_at,
    )
    assert found == expected


def test_position_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "lazyshard.json").write_bytes(b"{")
    with pytest.raises(PositionInvalid, match=r"\), torn perhaps\. This checkpoint cannot be gone on from"):
        decided(megatron(train_iters=7, finetune=False, mcore_model=folder))


@pytest.mark.parametrize(
    ("saved", "max_steps", "epoch_samples"),
    [
        # Begun live for 7 steps of 2 * 1; the trainer counts the batches to skip from the start of such epochs.
        ({"by_steps": True, "epoch_samples": 14}, 7, 14),
        ({"by_steps": True, "epoch_samples": 14}, 20, 14),
        ({"by_steps": False, "epoch_samples": 100}, -1, 100),
        ({"by_steps": True, "epoch_samples": 14}, -1, 100),
    ],
)
def test_epoch_of_a_resumed_hugging_face_run(
    tmp_path: Path, saved: dict[str, Any], max_steps: int, epoch_samples: int
) -> None:
    save_position(position(consumed=6, **saved), tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "trainer_state.json").touch()
    args = hugging_face(max_steps=max_steps, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    run = decided(args)
    assert (run.epoch_samples, run.one_pass, run.index_offset) == (epoch_samples, False, 0)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, None),
        ({"finetune": False}, None),
        ({"finetune": False, "model": "/models/hf"}, None),
        ({"finetune": False, "mcore_model": "A"}, "A"),
        ({"finetune": True, "mcore_model": "A"}, None),
        ({"finetune": False, "mcore_model": "A", "mcore_adapter": "B"}, "B"),
        ({"finetune": False, "mcore_model": "A", "adapters": ["B"]}, "A"),
        ({"finetune": False, "adapters": ["B"], "model": "A"}, "B"),
        ({"finetune": False, "model": "A"}, "A"),
        ({"finetune": False, "mcore_model": "plain"}, None),
        ({"finetune": False, "mcore_adapter": "plain", "mcore_model": "A"}, "A"),
    ],
)
def test_checkpoint_that_megatron_goes_on_from(tmp_path: Path, changes: dict[str, Any], found: str | None) -> None:
    for name in "AB":
        checkpoint(tmp_path / name)
    (tmp_path / "plain").mkdir()

    def place(value: Any) -> Any:
        if isinstance(value, list):
            return [place(name) for name in value]
        return str(tmp_path / value) if value in ("A", "B", "plain") else value

    args = megatron(**{name: place(value) for name, value in changes.items()})
    assert resume_checkpoint(args) == (None if found is None else str(tmp_path / found))


MARKS = {
    "megatron": ["latest_checkpointed_iteration.txt"],
    "async": ["latest_checkpointed_iteration.txt", "iter_0000003/__0_0.distcp", "iter_0000003/metadata.json"],
    "swift": ["trainer_state.json"],
}
"""What is in a checkpoint once it is whole; the last of it is written last."""


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("mcore_model", "megatron"),
        ("mcore_adapter", "megatron"),
        ("adapters", "megatron"),
        ("model", "megatron"),
        ("mcore_model", "async"),
        ("resume_from_checkpoint", "swift"),
    ],
)
def test_checkpoint_whose_save_was_killed_is_refused_naming_the_newest_whole_one(
    tmp_path: Path, option: str, kind: str
) -> None:
    # Other starts of the run, and another run.
    folders = [tmp_path / f"v{start}-20261121-01020{start}" for start in range(3)]
    made = [
        (folders[0] / "checkpoint-9", position(saved_at=1.0), True),
        (folders[1] / "checkpoint-6", position(saved_at=2.0), True),
        (folders[1] / "checkpoint-8", position(saved_at=3.0), False),
        (folders[2] / "checkpoint-7", position(saved_at=4.0, consumer="other"), True),
        (folders[2] / "checkpoint-8", position(saved_at=5.0), False),
    ]
    for folder, saved, whole in made:
        save_position(saved, folder)
        for name in MARKS[kind] if whole else MARKS[kind][:-1]:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
    torn, newest = str(made[-1][0]), str(made[1][0])

    def args(checkpoint: str) -> Any:
        if kind == "swift":
            return hugging_face(resume_from_checkpoint=checkpoint)
        return megatron(finetune=False, **{option: [checkpoint] if option == "adapters" else checkpoint})

    with pytest.raises(ResumeRefused) as refused:
        resume_checkpoint(args(torn))
    assert (refused.value.checkpoint, refused.value.expected) == (torn, newest)
    assert f"give --{option} {newest}" in str(refused.value)
    assert resume_checkpoint(args(newest)) == newest
    for folder, _, _ in made[:-1]:
        shutil.rmtree(folder)
    with pytest.raises(ResumeRefused, match=f"start anew, without --{option}") as refused:
        resume_checkpoint(args(torn))
    assert refused.value.expected is None
    # From weights alone it starts anew anyway.
    if kind != "swift":
        assert resume_checkpoint(megatron(mcore_model=torn)) is None


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, None),
        ({"resume_from_checkpoint": ""}, None),
        ({"resume_from_checkpoint": "/c"}, "/c"),
        ({"resume_from_checkpoint": "/c", "resume_only_model": True}, "/c"),
        ({"resume_from_checkpoint": "/c", "resume_only_model": True, "ignore_data_skip": True}, None),
    ],
)
def test_checkpoint_that_the_hugging_face_trainer_goes_on_from(changes: dict[str, Any], found: str | None) -> None:
    assert resume_checkpoint(hugging_face(**changes)) == found
