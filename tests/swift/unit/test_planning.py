"""`opening`: from arguments, stream and checkpoint to a plan that is the same on all ranks."""

import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from lazyshard.data.rank import Rank
from lazyshard.plan.deal import Rules
from lazyshard_swift.arguments import batch_sizes, rollout_of
from lazyshard_swift.checkpoints import resume_checkpoint, save_position
from lazyshard_swift.errors import PositionInvalid, ResumeRefused, SettingsRefused, StreamTooShort
from tests.stream.streams import raised
from tests.swift.unit.runs import DIRECTORY, checkpoint, decide_one, decided, facts, position, tells
from tests.swift.unit.runs import hugging_face as hf
from tests.swift.unit.runs import megatron as mg

BLOCK = {"window": 0, "layout": "block"}  # what a run in ms-swift's own shuffle has saved
# What is in a checkpoint once it is whole; the last of it is written last.
IN_MEGATRON = ["latest_checkpointed_iteration.txt"]
IN_ASYNC = [*IN_MEGATRON, "iter_0000003/__0_0.distcp", "iter_0000003/metadata.json"]


def resumed(folder: Path, **changes: Any) -> Any:
    """Arguments of a run that continues from a checkpoint in this folder, of a position with these changes."""
    saved = {name: changes.pop(name) for name in ("window", "layout", "consumer") if name in changes}
    where = checkpoint(folder / "checkpoint-3", position(**saved))
    return mg(train_iters=7, finetune=False, mcore_model=where, **changes)


def test_batch_sizes() -> None:
    for args, dp, sizes in (
        (mg(micro_batch_size=2, global_batch_size=16), 4, (2, 16)),
        (hf(per_device_train_batch_size=2, gradient_accumulation_steps=3), 4, (2, 24)),
        (hf(per_device_train_batch_size=2, n_gpu=0), 1, (2, 2)),
        # One process with several devices, torch's DataParallel.
        (hf(per_device_train_batch_size=2, n_gpu=4), 1, (8, 8)),
    ):
        assert batch_sizes(args, dp) == sizes


def grpo(batch: int, generation: int = 1, copies: int = 2, iterations: int = 1, accumulation: int = 1) -> Any:
    args = hf(rlhf_type="grpo", per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
    named = {"steps_per_generation": generation, "num_generations": copies, "num_iterations": iterations}
    vars(args.training_args).update(named)
    return args


def test_rollouts() -> None:
    for args, sizes, rollout in (
        (grpo(4), (2, 4), (2, 1, 1)),
        (grpo(2, accumulation=4), (1, 8), (2, 1, 1)),
        # 8 completions of 4 prompts, in 4 micro batches and so in 2 steps, twice.
        (grpo(2, generation=4, iterations=2, accumulation=2), (4, 8), (2, 8, 4)),
    ):
        assert (batch_sizes(args, 2), rollout_of(args)) == (sizes, rollout)
    tells(raised(SettingsRefused, batch_sizes, grpo(2, copies=4), 2), argument="num_generations")
    for args in (grpo(4, 3, accumulation=2), mg(rlhf_type="gkd", steps_per_generation=2)):
        tells(raised(SettingsRefused, batch_sizes, args, 2), argument="steps_per_generation")
    plan = decided(grpo(2, generation=2, iterations=2))
    # Two samples of each of two ranks, which count after 4 steps.
    assert [plan.counted(step) for step in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]


def test_resume_within_a_rollout_keeps_its_ranks_and_batches(tmp_path: Path) -> None:
    plan = decided(grpo(2, generation=4))
    for step in (4, 6):
        saved = checkpoint(tmp_path / f"checkpoint-{step}", plan.position(plan.counted(step), step))
        for batch, ranks in ((2, 2), (2, 1), (4, 2)):
            args = grpo(batch, generation=4)
            args.training_args.resume_from_checkpoint = args.resume_from_checkpoint = saved
            if step == 4 or (batch, ranks) == (2, 2):
                assert decide_one(args, facts(), Rank(0, ranks)).step == step
            else:
                tells(raised(ResumeRefused, decide_one, args, facts(), Rank(0, ranks)), actual="6", checkpoint=saved)


def test_order_of_a_new_run(notices: list[str]) -> None:
    sharding = {"data_sharding": True}
    for args, ended, layout, window in (
        (mg(train_iters=7), False, "strided", 2),
        (hf(max_steps=7), True, "strided", 8),
        (mg(train_iters=7, train_dataloader_shuffle=False), True, "strided", 0),
        (hf(max_steps=7, sharded_lazy_shuffle_window=3), False, "strided", 3),
        (mg(train_iters=7, **sharding), True, "block", 0),
        (mg(train_iters=7, **sharding, sharded_lazy_shuffle_window=3), True, "strided", 3),
        (mg(train_iters=7, **sharding, train_dataloader_shuffle=False), True, "strided", 0),
    ):
        run = decided(args, ended=ended)
        assert (run.layout, run.window) == (layout, window)
        assert run.course.rules == Rules(4, window * 4, 42)
        assert [(part.dp, part.draws) for part in run.course.parts] == [(2, 0)]
    assert notices == []


def test_a_stream_that_was_dealt_by_cost_is_not_shuffled_once_more(notices: list[str], tmp_path: Path) -> None:
    dealt = facts()._replace(dealt=True)
    for args, window in (
        (mg(train_iters=7), 0),
        (mg(train_iters=7, data_sharding=True), 0),
        (hf(max_steps=7), 0),
        # What the user names counts; the data set then says what it undoes.
        (mg(train_iters=7, sharded_lazy_shuffle_window=3), 3),
        (mg(train_iters=7, train_dataloader_shuffle=False), 0),
        # A run keeps the window that it began with.
        (resumed(tmp_path / "a", window=0), 0),
        (resumed(tmp_path / "b", window=8), 8),
    ):
        run = decide_one(args, dealt, Rank(0, 2))
        assert (run.layout, run.window) == ("strided", window)
    assert sum("dealt by cost" in text for text in notices) == 4


def test_distance_chooses_the_window(notices: list[str]) -> None:
    for args, ended, told in (
        # Chunks of 4: (3 * 4 + 1) / 3 > 4 > (2 * 4 + 1) / 3.
        (mg(train_iters=7), True, "windows of 3 chunks"),
        (hf(max_steps=20), False, "training begins once 6 chunks"),
        # Named by the user, as a window would be.
        (mg(train_iters=7, data_sharding=True), True, "windows of 3 chunks"),
    ):
        args.sharded_lazy_shuffle_distance = 4
        run = decided(args, ended=ended)
        assert (run.layout, run.window, run.course.rules) == ("strided", 3, Rules(4, 12, 42))
        assert told in notices.pop() and not notices


def test_distance_that_cannot_be_reached_is_refused() -> None:
    for changes, samples, ended, largest in (
        # 100 samples for 2 ranks: (50 + 1) / 3. 7 steps of 4: 14 on each rank. One sample a rank. Past all numbers.
        ({"train_iters": 7}, 100, True, 17),
        ({"train_iters": 7, "global_batch_size": 4}, 100, False, 5),
        ({"train_iters": 1}, 2, True, 0),
        ({"train_iters": 1}, 2**62, True, 2**61 - 1),
    ):
        if 0 < largest < 100:
            decided(mg(**changes, sharded_lazy_shuffle_distance=largest), samples, ended)
        args = mg(**changes, sharded_lazy_shuffle_distance=largest + 1)
        tells(raised(SettingsRefused, decided, args, samples, ended), argument="sharded_lazy_shuffle_distance")


IN_ORDER = {"train_dataloader_shuffle": False}
# What was saved, what changes, and the order; None where it would be another one than that in which it was begun.
ORDERS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, int] | None]] = [
    # A run that was begun while the stream was live continues as it was.
    ({"window": 2}, {}, ("strided", 2)),
    ({"window": 3}, {"sharded_lazy_shuffle_window": 3}, ("strided", 3)),
    # The window of a distance is the same again, however many samples there are by now.
    ({"window": 3}, {"sharded_lazy_shuffle_distance": 4}, ("strided", 3)),
    ({"window": 750}, {"sharded_lazy_shuffle_distance": 1000}, ("strided", 750)),
    ({"window": 3}, {"sharded_lazy_shuffle_distance": 5}, None),
    ({"window": 3}, {"sharded_lazy_shuffle_window": 2}, None),
    ({"window": 3}, IN_ORDER, None),
    ({"window": 0}, {}, None),
    ({"window": 0}, IN_ORDER, ("strided", 0)),
    ({"window": 0}, {"sharded_lazy_shuffle_window": 0}, ("strided", 0)),
    ({"window": 2}, {"data_sharding": True}, ("strided", 2)),
    # In order, what ms-swift's sampler has drawn at random would come again.
    (BLOCK, {"data_sharding": True}, ("block", 0)),
    (BLOCK, {"data_sharding": False}, None),
    (BLOCK, {"data_sharding": False, **IN_ORDER}, None),
    (BLOCK, {"data_sharding": True, **IN_ORDER}, None),
    (BLOCK, {"data_sharding": True, "sharded_lazy_shuffle_window": 0}, None),
    (BLOCK, {"data_sharding": True, "sharded_lazy_shuffle_window": 2}, None),
]


def test_order_of_a_resumed_run(tmp_path: Path) -> None:
    for saved, changes, expected in ORDERS:
        args = resumed(tmp_path, **saved, **changes)
        if expected is None:
            fields = {} if saved == BLOCK else {"checkpoint": args.mcore_model, "expected": str(saved["window"])}
            tells(raised(ResumeRefused, decided, args), **fields)
            continue
        run = decided(args)
        assert (run.layout, run.window) == expected
        assert (run.checkpoint, run.saved) == (args.mcore_model, position(**saved))


def test_data_sharding_is_put_aside_where_it_cannot_be(tmp_path: Path, notices: list[str]) -> None:
    run = decided(mg(train_iters=7, data_sharding=True), ended=False)
    assert (run.layout, run.window) == ("strided", 2)
    assert decided(resumed(tmp_path, window=2, data_sharding=True)).layout == "strided"
    assert ["--data_sharding true is ignored" in text for text in notices] == [True, True]


def test_length_of_an_epoch_and_what_ends_the_run() -> None:
    repeat: dict[str, Any] = {"sharded_lazy_on_end": "repeat"}
    epochs = {"num_train_epochs": 2}
    for args, samples, ended, dp, epoch_samples, progress, stop_at_end in (
        # Ended: whole micro batches on all ranks. Live: the run.
        (mg(**epochs), 101, True, 2, 100, (None, 2), False),
        (mg(**epochs, micro_batch_size=3), 101, True, 4, 96, (None, 2), False),
        (mg(train_iters=7), 101, True, 2, 100, (7, None), True),
        (mg(train_iters=7, **repeat), 100, True, 2, 100, (7, None), False),
        (mg(train_iters=7), 0, False, 2, 112, (7, None), True),
        (mg(train_iters=7, **repeat), 0, False, 2, 112, (7, None), False),
        (hf(), 101, True, 2, 100, (None, 3.0), False),
        (hf(max_steps=7), 101, True, 2, 100, (7, None), True),
        (hf(max_steps=7, gradient_accumulation_steps=3), 5, False, 2, 42, (7, None), True),
        (hf(max_steps=7, **repeat), 5, False, 2, 14, (7, None), False),
    ):
        run = decided(args, samples, ended, dp)
        assert (run.epoch_samples, (run.steps, run.epochs), run.stop_at_end) == (epoch_samples, progress, stop_at_end)
        assert run.position(16, 1).by_steps is (progress[0] is not None)


def test_epochs_are_taken_from_megatrons_arguments_on_a_live_stream(notices: list[str]) -> None:
    for ended in (True, False):
        args = mg(train_iters=7, num_train_epochs=2)
        run = decided(args, ended=ended)
        assert (run.steps, run.epochs) == ((None, 2) if ended else (7, None))
        # Or ms-swift would count them before the iterations.
        assert (args.num_train_epochs, len(notices)) == ((2, 0) if ended else (None, 1))


def test_stream_with_less_than_a_micro_batch_a_rank_is_refused() -> None:
    for args, samples, dp in (
        (mg(train_iters=7), 3, 4),
        (mg(num_train_epochs=1, micro_batch_size=4), 7, 2),
        (mg(train_iters=7, sharded_lazy_on_end="repeat"), 1, 2),
    ):
        tells(raised(StreamTooShort, decided, args, samples, dp=dp), directory=DIRECTORY, samples=samples)


def test_all_ranks_decide_the_same_and_the_position_holds_it() -> None:
    args = mg(train_iters=7, micro_batch_size=2, sharded_lazy_shuffle_window=3)
    runs = [decide_one(args, facts(ended=False), Rank(rank, 2)) for rank in range(2)]
    assert runs[0] == dataclasses.replace(runs[1], rank=Rank(0, 2))
    assert pickle.loads(pickle.dumps(runs)) == runs
    found = runs[0].position(32, 2)
    own = {"consumed": 32, "step": 2, "batch_size": 2, "window": 3, "epoch_samples": 112, "by_steps": True}
    assert found == position(**own, consumer="one-0436b62a", saved_at=found.saved_at)


def test_checkpoint_that_ms_swift_goes_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "AB":
        checkpoint(Path(name))
    Path("plain").mkdir()
    for changes, found in (
        ({}, None),
        ({"model": "/models/hf"}, None),
        ({"mcore_model": "A"}, "A"),
        ({"finetune": True, "mcore_model": "A"}, None),
        ({"mcore_model": "A", "mcore_adapter": "B"}, "B"),
        ({"mcore_model": "A", "adapters": ["B"]}, "A"),
        ({"adapters": ["B"], "model": "A"}, "B"),
        ({"model": "A"}, "A"),
        ({"mcore_adapter": "plain", "mcore_model": "A"}, "A"),
    ):
        assert resume_checkpoint(mg(**{"finetune": False, **changes})) == found
    weights: dict[str, Any] = {"resume_from_checkpoint": "A", "resume_only_model": True}
    assert resume_checkpoint(hf()) is None
    assert resume_checkpoint(hf(resume_from_checkpoint="A")) == resume_checkpoint(hf(**weights)) == "A"
    assert resume_checkpoint(hf(**weights, ignore_data_skip=True)) is None


@pytest.mark.parametrize(
    ("option", "files"),
    [
        *((option, IN_MEGATRON) for option in ("mcore_model", "mcore_adapter", "adapters", "model")),
        ("mcore_model", IN_ASYNC),
        ("resume_from_checkpoint", ["trainer_state.json"]),
    ],
)
def test_torn_checkpoint_is_refused_naming_the_newest_whole_one(tmp_path: Path, option: str, files: list[str]) -> None:
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
        for name in files if whole else files[:-1]:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
    torn, newest = str(made[-1][0]), str(made[1][0])

    def args(checkpoint: str) -> Any:
        if option == "resume_from_checkpoint":
            return hf(resume_from_checkpoint=checkpoint)
        return mg(finetune=False, **{option: [checkpoint] if option == "adapters" else checkpoint})

    error = raised(ResumeRefused, resume_checkpoint, args(torn))
    tells(error, f"--{option} {newest}", checkpoint=torn, expected=newest)
    assert resume_checkpoint(args(newest)) == newest
    for folder, _, _ in made[:-1]:
        shutil.rmtree(folder)
    tells(raised(ResumeRefused, resume_checkpoint, args(torn)), f"--{option}", checkpoint=torn, expected=None)
    (made[-1][0] / "lazyshard.json").write_bytes(b"{")
    raised(PositionInvalid, decided, args(torn))
    # From weights alone it starts anew anyway.
    assert resume_checkpoint(mg(mcore_model=torn)) is None
