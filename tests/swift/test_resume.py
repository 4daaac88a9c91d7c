"""Kill -9 in mid-run, and on from the checkpoint: together each sample once, and the same steps as if nothing had been.

What was trained after the checkpoint and before the kill is trained again: those steps are compared.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from lazyshard.stream import read_cursor
from tests.swift.commands import (
    RESUMABLE,
    Batch,
    Run,
    Training,
    ids_by_dp,
    megatron_sft,
    start_megatron_sft,
    start_swift_sft,
    swift_sft,
)
from tests.swift.conftest import ModelMaker
from tests.swift.consumption import (
    SIZE,
    TP2_DP2,
    assert_cursor,
    assert_dealt,
    assert_every_sample_once,
    by_epoch,
    fed_live,
    position_of,
    sealed_in,
)
from tests.swift.streams import producing, published, write_stream

pytestmark = [pytest.mark.timeout(400)]


def until(run: Run, step: int) -> list[Batch]:
    return [batch for batch in run.batches if batch.step <= step]


def wait_for_loss(training: Training, step: int) -> None:
    training.wait_for(lambda: step in training.losses, f"loss of step {step}")


def assert_goes_on(killed: Run, resumed: Run, step: int) -> None:
    """Checks that `resumed` begins after `step`, and trains what `killed` trained of the same steps."""
    assert min(batch.step for batch in resumed.batches) == step + 1
    first, second = (
        {(batch.rank, batch.step, batch.micro): batch.ids for batch in run.batches} for run in (killed, resumed)
    )
    both = first.keys() & second.keys()
    assert {place: first[place] for place in both} == {place: second[place] for place in both}
    steps = killed.losses.keys() & resumed.losses.keys()
    assert steps, "no step was trained twice: nothing was compared"
    assert {n: resumed.losses[n] for n in steps} == pytest.approx({n: killed.losses[n] for n in steps}, rel=1e-5)


def assert_still_written(run: Run, directory: Path) -> None:
    assert run.batches[0].time < sealed_in(directory)[-1].time, "the stream was complete before training began"


def test_megatron_live_trainer_and_producer_killed(tmp_path: Path, model: Path) -> None:
    samples, directory, output_dir = 141, tmp_path / "stream", tmp_path / "output"  # 17 steps of 8
    options: dict[str, Any] = {
        **RESUMABLE,
        **TP2_DP2,
        "dataset": directory,
        "output_dir": output_dir,
        "sharded_lazy": True,
        "train_iters": 60,
    }
    with (
        start_megatron_sft(tmp_path / "run1", model, **options, save_steps=4) as training,
        fed_live(training, directory, samples, 3, processes=4) as producer,
    ):
        wait_for_loss(training, 6)
        producer.kill()
        training.kill()
        killed = training.wait()
    assert not (directory / "stream.end").exists()
    checkpoint = output_dir / "checkpoint-4"
    # The first window of 2 chunks of each rank is through.
    assert_cursor(checkpoint, directory, 32, set(ids_of(until(killed, 4))))
    begun = published(directory)
    more = {"mcore_model": checkpoint, "finetune": False, "dataloader_num_workers": 2, "save_steps": 1000}
    with (
        start_megatron_sft(tmp_path / "run2", model, **{**options, **more}) as training,
        fed_live(training, directory, samples, 6, processes=4),
    ):
        resumed = training.end()
    assert_still_written(resumed, directory)
    assert begun < samples
    assert_goes_on(killed, resumed, 4)
    left_over = assert_dealt(ids_by_dp([*until(killed, 4), *resumed.batches]), samples)
    assert len(left_over) == 5
    assert list(resumed.losses) == list(range(1, 18))
    assert_cursor(output_dir / "checkpoint-17", directory, 136, set(range(samples)) - left_over)


def ids_of(batches: list[Batch]) -> list[int]:
    return [number for batch in batches for number in batch.ids]


def test_megatron_async_save_moves_the_cursor_when_it_is_durable(tmp_path: Path, model: Path) -> None:
    directory, output_dir = write_stream(tmp_path / "stream", 0, 2000, SIZE), tmp_path / "output"
    options: dict[str, Any] = {"no_save_optim": False, "save_safetensors": False, "async_save": True, "save_steps": 30}

    def consumed() -> int:
        cursor = read_cursor(directory, "async")
        return 0 if cursor is None else cursor.consumed

    with start_megatron_sft(
        tmp_path / "run",
        model,
        processes=2,
        dataset=directory,
        output_dir=output_dir,
        sharded_lazy=True,
        sharded_lazy_consumer="async",
        num_train_epochs=1,
        global_batch_size=4,
        **options,
    ) as training:
        training.wait_for(lambda: consumed() > 0, "cursor")
        training.kill()
        run = training.wait()
    step = consumed() // 4
    # The position lies there from the beginning of the save on, Megatron's metadata only at its end.
    assert position_of(output_dir / f"checkpoint-{step}").consumed == 4 * step
    assert (output_dir / f"checkpoint-{step}" / f"iter_{step:07d}" / "metadata.json").exists()
    assert step % 30 == 0
    assert max(batch.step for batch in run.batches) > step, "written during the save, not some steps later"


def test_swift_live_killed_twice_then_ended(tmp_path: Path, model: Path) -> None:
    samples, directory, output_dir = 141, tmp_path / "stream", tmp_path / "output"  # 17 steps of 2 micro batches
    options: dict[str, Any] = {
        "dataset": directory,
        "output_dir": output_dir,
        "sharded_lazy": True,
        "max_steps": 60,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    runs: list[Run] = []
    # With another number of workers each time: what they had read ahead does not count.
    for last, workers in ((6, 2), (10, 1)):
        more: dict[str, Any] = {"resume_from_checkpoint": output_dir / f"checkpoint-{last - 6}"} if runs else {}
        with (
            start_swift_sft(
                tmp_path / f"run{last}", model, **options, **more, dataloader_num_workers=workers
            ) as training,
            # However slow the training is, the stream has not ended: nothing far ahead of its readers is published.
            fed_live(training, directory, samples, 16, 2, "--max-ahead", 5) as producer,
        ):
            wait_for_loss(training, last)
            producer.kill()
            training.kill()
            runs.append(training.wait())
        assert not (directory / "stream.end").exists()
    with producing(directory, directory.with_suffix(".source.jsonl"), SIZE, 1000):
        pass
    assert (directory / "stream.end").exists()
    more = {"resume_from_checkpoint": output_dir / "checkpoint-8", "dataloader_num_workers": 0}
    runs.append(swift_sft(tmp_path / "last", model, **{**options, **more}))
    first, second, third = runs
    assert_still_written(second, directory)
    assert_goes_on(first, second, 4)
    assert_goes_on(second, third, 8)
    left_over = assert_dealt(ids_by_dp([*until(first, 4), *until(second, 8), *third.batches]), samples)
    assert len(left_over) == 5
    assert max(batch.step for batch in third.batches) == 17
    # Checkpoint 4 is still there, so the cursor gives up no chunk that going on from it would need.
    assert_cursor(output_dir / "checkpoint-17", directory, 136, set(ids_of(until(first, 4))))


class Killed(NamedTuple):
    """A run of one process over an ended stream, killed in its second epoch."""

    run: Run
    directory: Path
    checkpoint: Path


SAMPLES: Final = 47
"""23 micro batches: 8 steps of 3, the last of 2."""

ONE: Final[dict[str, Any]] = {
    "processes": 1,
    "sharded_lazy": True,
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 3,
    "save_strategy": "steps",
    "save_steps": 5,
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, make_model: ModelMaker) -> Killed:
    """What the tests below go on from, or are refused to; none of them changes it."""
    work = tmp_path_factory.mktemp("killed")
    directory = write_stream(work / "stream", 0, SAMPLES, SIZE)
    with start_swift_sft(work / "run", make_model(), dataset=directory, **ONE) as training:
        wait_for_loss(training, 12)
        training.kill()
        run = training.wait()
    return Killed(run, directory, run.output_dir / "checkpoint-10")


def test_swift_killed_in_its_second_epoch(tmp_path: Path, model: Path, killed: Killed) -> None:
    resumed = swift_sft(
        tmp_path / "run", model, dataset=killed.directory, resume_from_checkpoint=killed.checkpoint, **ONE
    )
    assert_goes_on(killed.run, resumed, 10)
    first, second = by_epoch(ids_by_dp([*until(killed.run, 10), *resumed.batches]), SAMPLES)
    assert len(assert_dealt(first, SAMPLES)) == len(assert_dealt(second, SAMPLES)) == 1
    assert position_of(resumed.output_dir / "checkpoint-16").consumed == 92


def refusal(work: Path, dataset: Path, train: Any = swift_sft, code: int = 2, **options: Any) -> str:
    """The message with which a run is refused before it has trained."""
    run = train(work / "refused", options.pop("model"), dataset=dataset, code=code, **options)
    (message,) = re.findall(r"^lazyshard(?:: rank 0)?: error: (.*) \(exit code 2\)$", run.output, re.MULTILINE)
    assert not run.batches
    return str(message)


@pytest.mark.parametrize("command", ["swift", "megatron"])
def test_a_checkpoint_whose_save_was_killed_is_refused(
    tmp_path: Path, model: Path, killed: Killed, command: str
) -> None:
    """What such a kill leaves: without the trainer's last file, trained further than the newest whole one."""
    whole, torn = tmp_path / "checkpoint-5", tmp_path / "checkpoint-10"
    for folder in (whole, torn):
        shutil.copytree(killed.run.output_dir / folder.name, folder)
    (torn / "trainer_state.json").unlink()
    option, train, code, options = "resume_from_checkpoint", swift_sft, 2, ONE
    if command == "megatron":
        (whole / "trainer_state.json").rename(whole / "latest_checkpointed_iteration.txt")
        option, train, code = "mcore_model", megatron_sft, 1
        options = {"processes": 1, "sharded_lazy": True, "train_iters": 20, "global_batch_size": 6, "finetune": False}
    message = refusal(tmp_path, killed.directory, train, code, model=model, **{option: torn}, **options)
    assert message.startswith(f"{torn}: ") and message.endswith(f"--{option} {whole}")


def test_swift_goes_on_in_its_second_epoch_with_two_ranks(tmp_path: Path, model: Path, killed: Killed) -> None:
    options = {**ONE, "processes": 2, "gradient_accumulation_steps": 2}
    run = swift_sft(
        tmp_path / "run", model, dataset=killed.directory, resume_from_checkpoint=killed.checkpoint, **options
    )
    last = run.output_dir / f"checkpoint-{max(batch.step for batch in run.batches)}"
    assert_every_sample_once([killed.run, run], [killed.checkpoint, last], SAMPLES, epochs=2)
    assert "the trainer takes the rest of the run for one epoch" in run.output
