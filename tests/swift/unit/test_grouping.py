"""`--group_by_length true`: what ms-swift's real samplers then read, what is refused, and what is kept and told."""

from __future__ import annotations

import functools
import operator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import orjson
import pytest

from lazyshard.cli import exits
from lazyshard.cli.main import main
from lazyshard.errors import StreamMismatch
from lazyshard.stream import read_cursor
from lazyshard.stream.retire import retire
from lazyshard_swift import parallel
from lazyshard_swift.checkpoints import Checkpoints, load_position, save_position
from lazyshard_swift.errors import PositionInvalid, ResumeRefused, SettingsRefused
from lazyshard_swift.opening import check_sampler, read_lengths
from lazyshard_swift.position import parse
from lazyshard_swift.run_plan import RunPlan
from tests.stream.lengths import measured, sealed
from tests.stream.streams import foreign, produce
from tests.swift.unit.runs import facts_of, hugging_face, megatron, open_stream, plan, sampler_of
from tests.swift.unit.trainers import Trained, opened, train_hugging_face, train_megatron

pytest.importorskip("transformers")

TOTAL, PER_CHUNK = 61, 4
MORE = 241
LENGTHS = [1 + 7 * sample % 23 for sample in range(MORE)]

both = pytest.mark.parametrize("kind", ["swift", "megatron"])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return sealed(tmp_path / "s", LENGTHS[:TOTAL], PER_CHUNK)


def args_of(kind: str, output: Path, checkpoint: Path | None = None, *, dp: int = 2, **changes: Any) -> Any:
    """Arguments of a run in micro batches of 2, by steps of `accumulation` of them."""
    batch, accumulation = changes.pop("batch", 2), changes.pop("accumulation", 1)
    common = {"group_by_length": True, "output_dir": str(output), "sharded_lazy_consumer": "run", **changes}
    if kind == "swift":
        args = hugging_face(
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            resume_from_checkpoint=None if checkpoint is None else str(checkpoint),
            **common,
        )
    else:
        args = megatron(
            micro_batch_size=batch,
            global_batch_size=batch * accumulation * dp,
            finetune=checkpoint is None,
            mcore_model=None if checkpoint is None else str(checkpoint),
            padding_free=False,
            **common,
        )
    args.save_steps = 3
    return args


def train(kind: str, directory: Path, args: Any, *, dp: int = 2, kill: int | None = None) -> list[Trained]:
    """Trains on all ranks, one after the other."""
    trainer = train_hugging_face if kind == "swift" else train_megatron
    found = []
    for rank in range(dp):
        with mock.patch.object(parallel, "is_first", functools.partial(operator.eq, rank, 0)):
            found.append(trainer(plan(args, directory, rank, dp), args, kill=kill))
    assert len({tuple(each.steps) for each in found}) == 1, "steps that the ranks have trained"
    return found


def by_step(found: list[Trained]) -> dict[int, list[list[int]]]:
    return {step: [each.steps[step] for each in found] for step in found[0].steps}


def spread(batches: list[list[int]]) -> float:
    return float(np.mean([max(lengths) - min(lengths) for lengths in ([LENGTHS[i] for i in b] for b in batches)]))


@both
@pytest.mark.parametrize(("dp", "accumulation"), [(1, 1), (2, 1), (3, 2)])
def test_each_epoch_trains_each_sample_once_in_batches_of_about_one_length(
    kind: str, dp: int, accumulation: int, tmp_path: Path
) -> None:
    directory = sealed(tmp_path / "s", LENGTHS, PER_CHUNK)
    args = args_of(kind, tmp_path / "o", dp=dp, accumulation=accumulation, num_train_epochs=2)
    args.save_steps = 1000
    found = train(kind, directory, args, dp=dp)
    # What fills no micro batch of all ranks is at the end of the stream.
    samples = MORE - 1
    drawn = [[i for ids in each.steps.values() for i in ids] for each in found]
    assert {len(ids) for ids in drawn} == {2 * samples // dp}
    first = [i for ids in drawn for i in ids[: samples // dp]]
    second = [i for ids in drawn for i in ids[samples // dp :]]
    assert sorted(first) == list(range(samples))
    assert first != second
    assert sorted(second) == list(range(samples))
    batches = [ids[at : at + 2] for ids in drawn for at in range(0, len(ids), 2)]
    # Two of these lengths drawn at random are 7.6 apart on average.
    assert spread(batches) < 2.5


@both
@pytest.mark.parametrize("progress", ["epochs", "steps"])
def test_killed_run_goes_on_with_exactly_the_next_sample(
    kind: str, progress: str, directory: Path, tmp_path: Path
) -> None:
    steps: dict[str, Any] = {"max_steps": 99} if kind == "swift" else {"train_iters": 99}
    length: dict[str, Any] = {"num_train_epochs": 2} if progress == "epochs" else steps
    whole = by_step(train(kind, directory, args_of(kind, tmp_path / "whole", **length)))
    # By steps the run ends with the stream: 60 samples in steps of 4.
    assert len(whole) == (30 if progress == "epochs" else 15)
    # In mid-epoch, between checkpoints; and after the end of the first epoch.
    for kill, saved in ((8, 6), (20, 18)) if progress == "epochs" else ((8, 6),):
        output = tmp_path / f"killed-{kill}"
        begun = by_step(train(kind, directory, args_of(kind, output, **length), kill=kill))
        resumed = by_step(train(kind, directory, args_of(kind, output, output / f"checkpoint-{saved}", **length)))
        assert begun == {step: whole[step] for step in range(kill)}
        assert resumed == {step: whole[step] for step in range(saved, len(whole))}


def checkpoint_of(kind: str, directory: Path, output: Path, **changes: Any) -> Path:
    """Saves after 6 steps of 4 samples."""
    run = plan(args_of(kind, output, num_train_epochs=2, **changes), directory, 0, 2)
    folder = output / "checkpoint-6"
    save_position(run.position(24, 6), folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("6")
    return folder


@both
def test_other_ranks_batches_or_lengths_are_refused(kind: str, directory: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(kind, directory, tmp_path / "o")

    def resumed(dp: int = 2, **changes: Any) -> RunPlan:
        return plan(args_of(kind, tmp_path / "o", checkpoint, dp=dp, num_train_epochs=2, **changes), directory, 0, dp)

    assert opened(resumed()).plan.saved == load_position(checkpoint)
    with pytest.raises(ResumeRefused, match=r"saved with dp size 2, this run has dp size 3: .* without --group_by_l"):
        resumed(dp=3)
    with pytest.raises(ResumeRefused, match="start with the micro batch that it had"):
        resumed(batch=1)
    with pytest.raises(ResumeRefused, match="--data_seed 42"):
        resumed(data_seed=43)
    with pytest.raises(ResumeRefused, match=r"was trained with --group_by_length true.*keep it"):
        resumed(group_by_length=False)
    if kind == "swift":
        # Its trainer skips as many batches as that many steps of now would have.
        with pytest.raises(ResumeRefused, match=r"24 samples were trained in 6 steps, and with --gradient_ac.* for 48"):
            resumed(accumulation=2)
    else:
        assert resumed(accumulation=2).saved is not None
    measured(directory, [9, 9, 9, 9])
    with pytest.raises(ResumeRefused, match="its samples were grouped by other lengths than they have now"):
        resumed()


@both
def test_other_version_of_the_sorting_is_refused(kind: str, directory: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(kind, directory, tmp_path / "o")
    args = args_of(kind, tmp_path / "o", checkpoint, num_train_epochs=2)

    def otherwise(lengths: list[int], *rest: Any, **options: Any) -> list[int]:
        return list(range(len(lengths)))

    with (
        mock.patch("transformers.trainer_pt_utils.get_length_grouped_indices", otherwise),
        pytest.raises(ResumeRefused, match="or by another version of ms-swift, transformers or torch"),
    ):
        plan(args, directory, 0, 2)


@both
def test_run_that_was_begun_without_it_is_not_gone_on_with(kind: str, directory: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(kind, directory, tmp_path / "o", group_by_length=False)
    with pytest.raises(ResumeRefused, match=r"was trained without --group_by_length true.*leave it out"):
        plan(args_of(kind, tmp_path / "o", checkpoint, num_train_epochs=2), directory, 0, 2)


def test_chunk_that_is_gone_is_refused_whichever_comes_next(directory: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("swift", directory, tmp_path / "o")
    found = opened(plan(args_of("swift", tmp_path / "o", checkpoint, num_train_epochs=2), directory, 0, 2))
    retire(directory, 1, TOTAL // PER_CHUNK + 1)
    with pytest.raises(ResumeRefused, match=r"deleted the chunks below 1, .* may need all of them"):
        found.check_resume(24, 6)
    with pytest.raises(SettingsRefused, match="chunk 0 was deleted by the stream's producer"):
        plan(args_of("swift", tmp_path / "o", checkpoint, num_train_epochs=2), directory, 0, 2)


def test_stream_that_cannot_be_grouped_is_refused_with_the_way_out(tmp_path: Path) -> None:
    def ask(directory: Path, samples_per_chunk: int | None = None, **facts: Any) -> Any:
        args = hugging_face(group_by_length=True, sharded_lazy_samples_per_chunk=samples_per_chunk)
        known = facts_of(stream)._replace(**facts)
        return read_lengths(args, str(directory), known, sampler_of(megatron=False))

    stream = sealed(tmp_path / "s", LENGTHS[:TOTAL], PER_CHUNK)
    assert ask(stream).tokens.tolist() == LENGTHS[:TOTAL]
    with pytest.raises(SettingsRefused, match=r"still being produced.*`lazyshard measure`.* --balance`") as refused:
        ask(stream, ended=False)
    assert refused.value.argument == "group_by_length"
    with pytest.raises(SettingsRefused, match=r"dealt by cost.*: leave it out"):
        ask(stream, dealt=True)
    with pytest.raises(SettingsRefused, match=r"chunk 0 are in tokens is not known.*`lazyshard measure "):
        ask(produce(tmp_path / "plain", TOTAL, PER_CHUNK))
    with pytest.raises(SettingsRefused, match=r"another program fills it.*`lazyshard adopt`"):
        ask(foreign(tmp_path / "foreign", b'{"id":0}\n', end=True), 1, samples=1)


def test_ranks_that_see_other_lengths_are_refused(directory: Path) -> None:
    with (
        mock.patch.object(parallel, "agree", lambda value: "of rank 0"),
        pytest.raises(StreamMismatch, match="rank 0 sees other lengths"),
    ):
        read_lengths(
            hugging_face(group_by_length=True), str(directory), facts_of(directory), sampler_of(megatron=False)
        )


def test_sampler_that_does_not_group_is_refused() -> None:
    class Plain:
        def __init__(self, total_samples: int) -> None: ...

    for is_megatron in (False, True):
        check_sampler(sampler_of(is_megatron))
    for sampler in (Plain, None):
        with pytest.raises(SettingsRefused, match="upgrade to a later ms-swift 4"):
            check_sampler(sampler)


def test_stream_hands_out_its_lengths_in_the_main_process_alone(directory: Path, tmp_path: Path) -> None:
    found: Any = open_stream(plan(args_of("swift", tmp_path / "o", num_train_epochs=1), directory, 1, 2))
    assert found["lengths"] == LENGTHS[:60]
    assert len(found) == 60
    assert found.__getitems__([7, 58, 0]) == [7, 58, 0], "indices are samples, on every rank"
    assert "grouped by length by ms-swift's sampler" in repr(found)
    with pytest.raises(KeyError):
        found["length"]
    assert "_tokens" not in found.__getstate__()


def test_nothing_is_given_up_for_deletion(directory: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    run = plan(args_of("megatron", output, train_iters=15), directory, 0, 2)
    saves = Checkpoints(run, str(output))
    saves.register()
    assert open_stream(run).__getitems__([59, 0]) == [59, 0]
    saves.begin(str(output / "checkpoint-15"), 60, 15)
    saves.commit()
    cursor = read_cursor(directory, "run")
    assert cursor is not None
    # At the end of the stream too: a start from an older checkpoint may draw any of its samples.
    assert (cursor.consumed, cursor.chunks_before, cursor.state) == (60, 0, None)
    # Nor does a mark say that what lies before the last sample read is not needed to read on.
    assert not list((directory / "cursors").glob("*.reading.json"))


def test_trace_and_audit_say_that_they_cannot_tell(
    directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "o"
    train("megatron", directory, args_of("megatron", output, train_iters=6))
    why = "the trainer's own sampler grouped by length the whole data set in this run"
    checkpoint = str(output / "checkpoint-3")
    for command in (["trace", "--state", checkpoint, "--sample", "0"], ["audit", checkpoint]):
        assert main([command[0], str(directory), *command[1:]]) != exits.DONE
        told = capfd.readouterr()
        assert why in told.err
        assert not told.out, "an answer"
    assert main(["trace", str(directory), "--sample", "0"]) == exits.REFUSED
    assert "holds no state of its run" in capfd.readouterr().err


def test_position_keeps_what_the_order_follows_from(directory: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("swift", directory, tmp_path / "o")
    file = checkpoint / "lazyshard.json"
    values = orjson.loads(file.read_bytes())
    position = load_position(checkpoint)
    assert position is not None
    assert (values["layout"], values["state"], values["grouping"]) == ("grouped", None, position.grouping)
    assert position.grouping is not None
    del values["grouping"]
    with pytest.raises(PositionInvalid, match="grouping is None, expected a digest"):
        parse(orjson.dumps(values), str(file))
    other = load_position(checkpoint_of("swift", directory, tmp_path / "other", group_by_length=False))
    assert other is not None
    assert "grouping" not in orjson.loads(other.to_bytes())
