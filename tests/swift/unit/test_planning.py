"""`opening`: from arguments, stream and checkpoint to a plan that is the same on all ranks."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from lazyshard.data.rank import Rank
from lazyshard.plan.deal import Rules
from lazyshard_swift.arguments import Progress, batch_sizes
from lazyshard_swift.checkpoints import resume_checkpoint, save_position
from lazyshard_swift.errors import PositionInvalid, ResumeRefused, SettingsRefused, StreamTooShort
from tests.swift.unit.runs import (
    DIRECTORY,
    checkpoint,
    decide_one,
    decided,
    facts,
    hugging_face,
    megatron,
    position,
    refused,
)


def resumed(folder: Path, **changes: Any) -> Any:
    """Arguments of a run that goes on from a checkpoint in this folder, of a position with these changes."""
    saved = {name: changes.pop(name) for name in ("window", "layout", "consumer") if name in changes}
    where = checkpoint(folder / "checkpoint-3", position(**saved))
    return megatron(train_iters=7, finetune=False, mcore_model=where, **changes)


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


BLOCK = {"window": 0, "layout": "block"}
"""What a run in ms-swift's own shuffle has saved."""

# Of Megatron in 7 steps or of the other trainer: what changes, whether the stream has ended, and the window; None for
# ms-swift's own shuffle.
ORDERS: list[tuple[dict[str, Any], bool, int | None]] = [
    ({}, False, 2),
    ({}, True, 8),
    ({"train_dataloader_shuffle": False}, True, 0),
    ({"sharded_lazy_shuffle_window": 3}, False, 3),
    ({"data_sharding": True}, True, None),
    ({"data_sharding": True, "sharded_lazy_shuffle_window": 3}, True, 3),
    ({"data_sharding": True, "train_dataloader_shuffle": False}, True, 0),
]


@pytest.mark.parametrize(("changes", "ended", "window"), ORDERS)
def test_order_of_a_new_run(changes: dict[str, Any], ended: bool, window: int | None, notices: list[str]) -> None:
    made = [megatron(train_iters=7, **changes)]
    if "data_sharding" not in changes:
        made.append(hugging_face(max_steps=7, **changes))
    for args in made:
        run = decided(args, ended=ended)
        assert (run.layout, run.window) == (("block", 0) if window is None else ("strided", window))
        assert run.course.rules == Rules(4, (window or 0) * 4, 42)
        assert [(part.dp, part.draws) for part in run.course.parts] == [(2, 0)]
    assert notices == []


def test_a_stream_that_was_dealt_by_cost_is_not_shuffled_once_more(notices: list[str], tmp_path: Path) -> None:
    dealt = facts()._replace(dealt=True)
    for args, window in (
        (megatron(train_iters=7), 0),
        (megatron(train_iters=7, data_sharding=True), 0),
        (hugging_face(max_steps=7), 0),
        # What the user names counts; the data set then says what it undoes.
        (megatron(train_iters=7, sharded_lazy_shuffle_window=3), 3),
        (megatron(train_iters=7, train_dataloader_shuffle=False), 0),
        # A run keeps the window that it began with.
        (resumed(tmp_path / "a", window=0), 0),
        (resumed(tmp_path / "b", window=8), 8),
    ):
        run = decide_one(args, DIRECTORY, dealt, Rank(0, 2))
        assert (run.layout, run.window) == ("strided", window)
    assert sum("dealt by cost" in text for text in notices) == 4


@pytest.mark.parametrize(
    ("args", "ended", "told"),
    [
        # Chunks of 4: (3 * 4 + 1) / 3 > 4 > (2 * 4 + 1) / 3.
        (megatron(train_iters=7), True, "windows of 3 chunks"),
        (hugging_face(max_steps=20), False, "training begins with 6 chunks"),
        # Named by the user, as a window would be.
        (megatron(train_iters=7, data_sharding=True), True, "windows of 3 chunks"),
    ],
)
def test_distance_chooses_the_window(args: Any, ended: bool, told: str, notices: list[str]) -> None:
    args.sharded_lazy_shuffle_distance = 4
    run = decided(args, ended=ended)
    assert (run.layout, run.window, run.course.rules) == ("strided", 3, Rules(4, 12, 42))
    assert len(notices) == 1 and told in notices[0]


@pytest.mark.parametrize(
    ("changes", "samples", "ended", "largest"),
    [
        # 100 samples for 2 ranks: (50 + 1) / 3. 7 steps of 4: 14 on each rank. One sample a rank. Past all numbers.
        ({"train_iters": 7}, 100, True, 17),
        ({"train_iters": 7, "global_batch_size": 4}, 100, False, 5),
        ({"train_iters": 1}, 2, True, 0),
        ({"train_iters": 1}, 2**62, True, 2**61 - 1),
    ],
)
def test_distance_that_cannot_be_reached_is_refused(changes: Any, samples: int, ended: bool, largest: int) -> None:
    if 0 < largest < 100:
        decided(megatron(**changes, sharded_lazy_shuffle_distance=largest), samples, ended)
    with refused(SettingsRefused, argument="sharded_lazy_shuffle_distance"):
        decided(megatron(**changes, sharded_lazy_shuffle_distance=largest + 1), samples, ended)


@pytest.mark.parametrize(
    ("saved", "changes", "ended", "expected"),
    [
        # A run that was begun while the stream was live goes on as it was.
        ({"window": 2}, {}, True, ("strided", 2)),
        ({"window": 3}, {"sharded_lazy_shuffle_window": 3}, True, ("strided", 3)),
        # The window of a distance is the same again, however many samples there are by now.
        ({"window": 3}, {"sharded_lazy_shuffle_distance": 4}, True, ("strided", 3)),
        ({"window": 750}, {"sharded_lazy_shuffle_distance": 1000}, True, ("strided", 750)),
        ({"window": 3}, {"sharded_lazy_shuffle_distance": 5}, True, None),
        # Another order than the one in which it was begun is refused.
        ({"window": 3}, {"sharded_lazy_shuffle_window": 2}, True, None),
        ({"window": 3}, {"train_dataloader_shuffle": False}, True, None),
        ({"window": 0}, {}, True, None),
        ({"window": 0}, {"train_dataloader_shuffle": False}, True, ("strided", 0)),
        ({"window": 0}, {"sharded_lazy_shuffle_window": 0}, True, ("strided", 0)),
        ({"window": 2}, {"data_sharding": True}, True, ("strided", 2)),
        # In order, what ms-swift's sampler has drawn at random would come again.
        (BLOCK, {"data_sharding": True}, True, ("block", 0)),
        (BLOCK, {"data_sharding": False}, True, None),
        (BLOCK, {"data_sharding": False, "train_dataloader_shuffle": False}, True, None),
        (BLOCK, {"data_sharding": True, "train_dataloader_shuffle": False}, True, None),
        (BLOCK, {"data_sharding": True, "sharded_lazy_shuffle_window": 0}, True, None),
        (BLOCK, {"data_sharding": True, "sharded_lazy_shuffle_window": 2}, True, None),
    ],
)
def test_order_of_a_resumed_run(
    tmp_path: Path, saved: dict[str, Any], changes: dict[str, Any], ended: bool, expected: tuple[str, int] | None
) -> None:
    args = resumed(tmp_path, **saved, **changes)
    if expected is None:
        fields = {} if saved == BLOCK else {"checkpoint": args.mcore_model, "expected": str(saved["window"])}
        with refused(ResumeRefused, **fields):
            decided(args, ended=ended)
        return
    run = decided(args, ended=ended)
    assert (run.layout, run.window) == expected
    assert (run.checkpoint, run.saved) == (args.mcore_model, position(**saved))


def test_data_sharding_is_put_aside_on_a_live_stream_and_where_it_was_not_there_before(
    tmp_path: Path, notices: list[str]
) -> None:
    run = decided(megatron(train_iters=7, data_sharding=True), ended=False)
    assert (run.layout, run.window) == ("strided", 2)
    assert decided(resumed(tmp_path, window=2, data_sharding=True)).layout == "strided"
    assert ["--data_sharding true is put aside" in text for text in notices] == [True, True]


@pytest.mark.parametrize(
    ("args", "samples", "ended", "dp", "epoch_samples", "progress", "stop_at_end"),
    [
        # Ended: whole micro batches on all ranks. Live: the run.
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


@pytest.mark.parametrize("ended", [False, True])
def test_epochs_are_taken_from_megatrons_arguments_on_a_live_stream(ended: bool, notices: list[str]) -> None:
    args = megatron(train_iters=7, num_train_epochs=2)
    assert decided(args, ended=ended).progress == (Progress(None, 2) if ended else Progress(7, None))
    # Or ms-swift would count them before the iterations.
    assert args.num_train_epochs == (2 if ended else None)
    assert len(notices) == (not ended)


@pytest.mark.parametrize(
    ("args", "samples", "dp"),
    [
        (megatron(train_iters=7), 3, 4),
        (megatron(num_train_epochs=1, micro_batch_size=4), 7, 2),
        (megatron(train_iters=7, sharded_lazy_on_end="repeat"), 1, 2),
    ],
)
def test_stream_with_less_than_a_micro_batch_a_rank_is_refused(args: Any, samples: int, dp: int) -> None:
    with refused(StreamTooShort, directory=DIRECTORY, samples=samples):
        decided(args, samples, dp=dp)


def test_all_ranks_decide_the_same_and_the_position_holds_it() -> None:
    args = megatron(train_iters=7, micro_batch_size=2, sharded_lazy_shuffle_window=3)
    runs = [decide_one(args, DIRECTORY, facts(ended=False), Rank(rank, 2)) for rank in range(2)]
    assert runs[0] == dataclasses.replace(runs[1], rank=Rank(0, 2))
    assert pickle.loads(pickle.dumps(runs)) == runs
    found = runs[0].position(32, 2)
    own = {"consumed": 32, "step": 2, "batch_size": 2, "window": 3, "epoch_samples": 112, "by_steps": True}
    assert found == position(**own, consumer="one-0436b62a", saved_at=found.saved_at)


@pytest.mark.parametrize(
    ("make", "changes", "found"),
    [
        (megatron, {"finetune": False}, None),
        (megatron, {"finetune": False, "model": "/models/hf"}, None),
        (megatron, {"finetune": False, "mcore_model": "A"}, "A"),
        (megatron, {"finetune": True, "mcore_model": "A"}, None),
        (megatron, {"finetune": False, "mcore_model": "A", "mcore_adapter": "B"}, "B"),
        (megatron, {"finetune": False, "mcore_model": "A", "adapters": ["B"]}, "A"),
        (megatron, {"finetune": False, "adapters": ["B"], "model": "A"}, "B"),
        (megatron, {"finetune": False, "model": "A"}, "A"),
        (megatron, {"finetune": False, "mcore_adapter": "plain", "mcore_model": "A"}, "A"),
        (hugging_face, {}, None),
        (hugging_face, {"resume_from_checkpoint": "A"}, "A"),
        (hugging_face, {"resume_from_checkpoint": "A", "resume_only_model": True}, "A"),
        (hugging_face, {"resume_from_checkpoint": "A", "resume_only_model": True, "ignore_data_skip": True}, None),
    ],
)
def test_checkpoint_that_ms_swift_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, changes: dict[str, Any], found: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "AB":
        checkpoint(Path(name))
    Path("plain").mkdir()
    assert resume_checkpoint(make(**changes)) == found


PARTS = {
    "megatron": ["latest_checkpointed_iteration.txt"],
    "async": ["latest_checkpointed_iteration.txt", "iter_0000003/__0_0.distcp", "iter_0000003/metadata.json"],
    "swift": ["trainer_state.json"],
}
"""What is in a checkpoint once it is whole; the last of it is written last."""


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        *((option, "megatron") for option in ("mcore_model", "mcore_adapter", "adapters", "model")),
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
        for name in PARTS[kind] if whole else PARTS[kind][:-1]:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
    torn, newest = str(made[-1][0]), str(made[1][0])

    def args(checkpoint: str) -> Any:
        if kind == "swift":
            return hugging_face(resume_from_checkpoint=checkpoint)
        return megatron(finetune=False, **{option: [checkpoint] if option == "adapters" else checkpoint})

    with refused(ResumeRefused, f"--{option} {newest}", checkpoint=torn, expected=newest):
        resume_checkpoint(args(torn))
    assert resume_checkpoint(args(newest)) == newest
    for folder, _, _ in made[:-1]:
        shutil.rmtree(folder)
    with refused(ResumeRefused, f"--{option}", checkpoint=torn, expected=None):
        resume_checkpoint(args(torn))
    (made[-1][0] / "lazyshard.json").write_bytes(b"{")
    with pytest.raises(PositionInvalid):
        decided(args(torn))
    # From weights alone it starts anew anyway.
    assert resume_checkpoint(megatron(mcore_model=torn)) is None
