"""`checkpoints`: the cursor follows the checkpoints, and never passes one that can still be gone on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lazyshard.data.rank import Rank
from lazyshard.errors import CursorTaken
from lazyshard.format import Cursor
from lazyshard.plan import Course
from lazyshard.stream import CursorOwner, forget_consumer, list_consumers, read_cursor, read_retired
from lazyshard.stream.retire import retire
from lazyshard_swift import checkpoints, parallel
from lazyshard_swift.checkpoints import Checkpoints, is_whole, let_go_of_cursors, load_position, save_position
from lazyshard_swift.parallel import Facts
from lazyshard_swift.planning import decide
from tests.stream.streams import foreign, names, produce
from tests.swift.unit.runs import facts_of, hugging_face, megatron, open_stream, plan, position

PER_CHUNK = 3
CONSUMER = "run 1"

NAME = "run"


def args_of(output_dir: Path, **changes: Any) -> Any:
    common: dict[str, Any] = {
        "train_iters": 12,
        "global_batch_size": 4,
        "sharded_lazy_consumer": CONSUMER,
        "output_dir": str(output_dir),
        "sharded_lazy_shuffle_window": 0,
        "sharded_lazy_shuffle_distance": None,
    }
    return megatron(**{**common, **changes})


def checkpoint(kept: Checkpoints, output_dir: Path, step: int) -> None:
    """As ms-swift saves: the position first, the weights, then the cursor."""
    folder = output_dir / f"checkpoint-{step}"
    kept.begin(str(folder), step * 4, step)
    (folder / "weights").write_bytes(b"0" * 10)
    kept.commit()


def cursor(directory: Path) -> Cursor:
    found = read_cursor(directory, CONSUMER)
    assert found is not None
    return found


def drawn_from(course: Course, position_: int, total: int) -> set[int]:
    """The samples that all lanes draw from a position to the end of the epoch."""
    return {
        course.draw(lane, place, total).sample
        for lane in range(course.dp)
        for place in range(position_, course.epoch_length(total))
    }


def test_cursor_says_what_the_newest_checkpoint_holds(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    run = plan(args_of(output), directory, 0, 2)
    checkpoint(Checkpoints(run, str(output)), output, 5)
    found = cursor(directory)
    # Positions 0 to 9 of two lanes are done: chunks 0 to 5, and a row of 6 and 7 each.
    assert (found.consumer, found.stream_id, found.consumed, found.chunks_before) == (CONSUMER, run.facts.stream, 20, 6)
    assert found.plan == {"dp_size": 2, "unit": 3, "window": 0, "seed": 42, "batch_size": 1}
    where = load_position(output / "checkpoint-5")
    assert where is not None
    assert (where.consumed, where.step, where.stream) == (20, 5, run.facts.stream)


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("kept", [1, 3])
def test_no_chunk_is_given_up_that_a_checkpoint_still_needs(tmp_path: Path, window: int, live: bool, kept: int) -> None:
    directory, output = produce(tmp_path / "s", 46, PER_CHUNK, end=not live), tmp_path / "out"
    run = plan(args_of(output, sharded_lazy_shuffle_window=window), directory, 0, 2)
    saves = Checkpoints(run, str(output))
    given_up = []
    for step in range(1, 12):
        # save_total_limit: ms-swift deletes before it returns.
        shutil.rmtree(output / f"checkpoint-{step - kept}", ignore_errors=True)
        checkpoint(saves, output, step)
        oldest = max(1, step - kept + 1)
        chunks = cursor(directory).chunks_before
        for total in (46,) if not live else (46, 47, 60):
            needed = drawn_from(run.course, oldest * 2, total)
            assert min(needed) >= chunks * PER_CHUNK, (step, total)
        given_up.append(chunks)
    assert given_up == sorted(given_up)
    # And it does move.
    assert given_up[-1] > 0


def test_cursor_waits_for_the_oldest_checkpoint_and_moves_once_it_is_gone(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    saves = Checkpoints(plan(args_of(output), directory, 0, 2), str(output))
    moves = []
    for step in (3, 6, 9):
        checkpoint(saves, output, step)
        moves.append(cursor(directory).chunks_before)
    shutil.rmtree(output / "checkpoint-3")
    checkpoint(saves, output, 10)
    moves.append(cursor(directory).chunks_before)
    assert moves == [4, 4, 4, 8]
    assert cursor(directory).consumed == 40


def test_checkpoints_of_the_starts_before_count(tmp_path: Path) -> None:
    # ms-swift gives each start a folder of its own (--add_version true, its default); the cursor is that of the run.
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    first, second = (output / f"v{start}-20261121-01020{start}" for start in range(2))
    checkpoint(Checkpoints(plan(args_of(first), directory, 0, 2), str(first)), first, 3)
    resumed = args_of(second, finetune=False, mcore_model=str(first / "checkpoint-3"))
    (first / "checkpoint-3" / "latest_checkpointed_iteration.txt").write_text("3")
    run = plan(resumed, directory, 0, 2)
    assert run.saved is not None
    checkpoint(Checkpoints(run, str(second)), second, 9)
    # v0's checkpoint is still there.
    assert (cursor(directory).consumed, cursor(directory).chunks_before) == (36, 4)


def test_checkpoint_that_was_resumed_from_counts_wherever_it_is(tmp_path: Path) -> None:
    directory, output, other = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out", tmp_path / "other"
    checkpoint(Checkpoints(plan(args_of(output), directory, 0, 2), str(output)), output, 3)
    (output / "checkpoint-3" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = args_of(other, finetune=False, mcore_model=str(output / "checkpoint-3"))
    checkpoint(Checkpoints(plan(resumed, directory, 0, 2), str(other)), other, 9)
    assert (cursor(directory).consumed, cursor(directory).chunks_before) == (36, 4)


def test_checkpoint_that_is_saved_over_counts_as_torn_until_it_is_whole(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    kept, folder = Checkpoints(plan(args_of(output), directory, 0, 2), str(output)), output / "checkpoint-3"
    for before in (["trainer_state.json"], ["latest_checkpointed_iteration.txt", "iter_0000003/metadata.json"]):
        for name in before:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        assert is_whole(folder)
        kept.begin(str(folder), 12, 3)
        assert not is_whole(folder)
        assert not any((folder / name).exists() for name in before)


def test_checkpoint_is_due_once_a_step_was_trained(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    kept = Checkpoints(plan(args_of(output), directory, 0, 2), str(output))
    assert [kept.is_due(step) for step in (0, 1, 3)] == [False, True, True]
    checkpoint(kept, output, 3)
    (output / "checkpoint-3" / "latest_checkpointed_iteration.txt").touch()
    assert [kept.is_due(step) for step in (3, 4)] == [False, True]
    resumed = plan(args_of(output, finetune=False, mcore_model=str(output / "checkpoint-3")), directory, 0, 2)
    assert [Checkpoints(resumed, str(output)).is_due(step) for step in (3, 4)] == [False, True]


def test_checkpoints_of_another_stream_do_not_count(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    save_position(position(stream="f" * 32, consumed=4), output / "checkpoint-1")
    checkpoint(Checkpoints(plan(args_of(output), directory, 0, 2), str(output)), output, 6)
    assert cursor(directory).chunks_before == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"sharded_lazy_on_end": "repeat"},
        {"train_iters": None, "num_train_epochs": 2},
        {"train_iters": None, "num_train_epochs": 1, "data_sharding": True, "sharded_lazy_shuffle_window": None},
        {"data_sharding": True, "sharded_lazy_shuffle_window": None},
    ],
)
def test_nothing_is_given_up_where_another_epoch_may_follow(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    saves = Checkpoints(plan(args_of(output, **changes), directory, 0, 2), str(output))
    checkpoint(saves, output, 11)
    assert (cursor(directory).consumed, cursor(directory).chunks_before) == (44, 0)


def test_stream_is_given_up_as_a_whole_at_its_end(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    checkpoint(Checkpoints(plan(args_of(output), directory, 0, 2), str(output)), output, 12)
    assert (cursor(directory).consumed, cursor(directory).chunks_before) == (48, 16)


def test_cursor_of_the_hugging_face_trainer(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    args = hugging_face(
        max_steps=12,
        gradient_accumulation_steps=2,
        output_dir=str(output),
        sharded_lazy_consumer=CONSUMER,
        train_dataloader_shuffle=False,
    )
    checkpoint(Checkpoints(plan(args, directory, 0, 2), str(output)), output, 5)
    assert (cursor(directory).consumed, cursor(directory).chunks_before) == (20, 6)


def test_position_is_there_before_the_weights_and_the_cursor_after_them(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    saves = Checkpoints(plan(args_of(output), directory, 0, 2), str(output))
    assert (saves.pending, saves.last_step) == (False, -1)
    saves.begin(str(output / "checkpoint-5"), 20, 5)
    assert names(output / "checkpoint-5") == ["lazyshard.json"]
    assert (saves.pending, saves.last_step) == (True, 5)
    assert read_cursor(directory, CONSUMER) is None
    saves.commit()
    assert not saves.pending
    assert cursor(directory).consumed == 20


def test_nothing_is_written_without_a_checkpoint(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 48, PER_CHUNK)
    Checkpoints(plan(args_of(tmp_path / "out"), directory, 0, 2), str(tmp_path / "out")).commit()
    assert not (directory / "cursors").exists()


def test_start_registers_the_run_before_it_has_trained(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    run = plan(args_of(output), directory, 0, 2)
    Checkpoints(run, str(output)).register()
    found = cursor(directory)
    assert (found.stream_id, found.consumed, found.chunks_before) == (run.facts.stream, 0, 0)
    assert found.plan == {"dp_size": 2, "unit": 3, "window": 0, "seed": 42, "batch_size": 1}
    assert not output.exists()


def test_start_from_the_beginning_takes_back_the_cursor_of_the_run_before(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    checkpoint(Checkpoints(plan(args_of(output), directory, 0, 2), str(output)), output, 5)
    assert cursor(directory).chunks_before == 6
    # --finetune true: the checkpoint is there, and not gone on from.
    Checkpoints(plan(args_of(output), directory, 0, 2), str(output)).register()
    assert (cursor(directory).consumed, cursor(directory).chunks_before) == (0, 0)


def test_resumed_start_puts_the_cursor_where_it_goes_on(tmp_path: Path) -> None:
    directory, output, other = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out", tmp_path / "other"
    saves = Checkpoints(plan(args_of(output), directory, 0, 2), str(output))
    for step in (3, 9):
        checkpoint(saves, output, step)
        (output / f"checkpoint-{step}" / "latest_checkpointed_iteration.txt").write_text(str(step))
    before = cursor(directory)
    assert (before.consumed, before.chunks_before) == (36, 4)
    for forgotten in (False, True):
        if forgotten:
            assert forget_consumer(directory, CONSUMER)
        resumed = args_of(output, finetune=False, mcore_model=str(output / "checkpoint-9"))
        Checkpoints(plan(resumed, directory, 0, 2), str(output)).register()
        assert (cursor(directory).consumed, cursor(directory).chunks_before) == (36, 4)
    # From an older one, whose folder was moved: it goes back.
    shutil.copytree(output / "checkpoint-3", other / "kept")
    shutil.rmtree(output / "checkpoint-3")
    checkpoint(saves, output, 9)
    assert cursor(directory).chunks_before == 12
    resumed = args_of(output, finetune=False, mcore_model=str(other / "kept"))
    Checkpoints(plan(resumed, directory, 0, 2), str(output)).register()
    assert (cursor(directory).consumed, cursor(directory).chunks_before) == (12, 4)


def test_start_that_cannot_register_is_told_and_goes_on(tmp_path: Path, cautions: list[str]) -> None:
    directory = produce(tmp_path / "s", 48, PER_CHUNK)
    (directory / "cursors").touch()
    Checkpoints(plan(args_of(tmp_path / "out"), directory, 0, 2), str(tmp_path / "out")).register()
    assert len(cautions) == 1
    assert "the cursor could not be written" in cautions[0]


def test_newest_of_several_that_were_begun_counts(tmp_path: Path) -> None:
    # --async_save: more than one may be under way.
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    saves = Checkpoints(plan(args_of(output), directory, 0, 2), str(output))
    for step in (3, 6):
        saves.begin(str(output / f"checkpoint-{step}"), step * 4, step)
    saves.commit()
    assert (cursor(directory).consumed, cursor(directory).chunks_before) == (24, 4)


def test_only_the_first_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    monkeypatch.setattr(parallel, "is_first", lambda: False)
    saves = Checkpoints(plan(args_of(output), directory, 1, 2), str(output))
    saves.register()
    saves.begin(str(output / "checkpoint-5"), 20, 5)
    saves.commit()
    # But every rank knows that there is one, or they would not all save at the end.
    assert (saves.last_step, saves.pending) == (5, False)
    assert not output.exists()
    assert not (directory / "cursors").exists()


@pytest.mark.parametrize("failure", ["no folder", "no stream", "no space"])
def test_cursor_that_cannot_be_written_is_told_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cautions: list[str], failure: str
) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    saves = Checkpoints(plan(args_of(output), directory, 0, 2), str(output))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if failure == "no folder":
        (directory / "cursors").touch()
    elif failure == "no stream":
        directory.rename(tmp_path / "moved")
    else:
        monkeypatch.setattr(checkpoints, "put_cursor", fail)
    checkpoint(saves, output, 5)
    assert len(cautions) == 1
    assert "the cursor could not be written" in cautions[0]
    assert load_position(output / "checkpoint-5") is not None
    # The next one is tried again.
    if failure == "no folder":
        (directory / "cursors").unlink()
    elif failure == "no stream":
        (tmp_path / "moved").rename(directory)
    else:
        monkeypatch.undo()
    checkpoint(saves, output, 6)
    assert cursor(directory).consumed == 24


def test_checkpoint_that_is_gone_again_is_told_and_not_raised(tmp_path: Path, cautions: list[str]) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    saves = Checkpoints(plan(args_of(output), directory, 0, 2), str(output))
    saves.begin(str(output / "checkpoint-5"), 20, 5)
    shutil.rmtree(output)
    saves.commit()
    assert len(cautions) == 1


def test_directory_that_another_program_fills_has_a_cursor_too(tmp_path: Path) -> None:
    directory = foreign(tmp_path / "s", *[b'{"id": 1}\n{"id": 2}\n'] * 8, end=True)
    output = tmp_path / "out"
    args = args_of(output, sharded_lazy_samples_per_chunk=2)
    facts = Facts("first-row-0123456789abcdef", 2, 16, True)
    run = decide(args, str(directory), facts, Rank(0, 2))
    checkpoint(Checkpoints(run, str(output)), output, 2)
    found = cursor(directory)
    assert (found.stream_id, found.consumed, found.chunks_before) == (None, 8, 4)


def test_checkpoint_that_the_cursor_has_seen_is_gone_on_from_after_the_chunks_before_are_gone(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 48, PER_CHUNK), tmp_path / "out"
    args = args_of(output, sharded_lazy_shuffle_window=2)
    whole = [open_stream(plan(args, directory, rank, 2)) for rank in range(2)]
    expected = [[stream[rank + 2 * place] for place in range(14, 24)] for rank, stream in enumerate(whole)]
    checkpoint(Checkpoints(whole[0].plan, str(output)), output, 7)
    chunks = cursor(directory).chunks_before
    assert chunks == 8
    (consumer,) = list_consumers(directory, 16)
    assert retire(directory, consumer.chunks_before, 16) == 8 == read_retired(directory)
    (output / "checkpoint-7" / "latest_checkpointed_iteration.txt").write_text("7")
    resumed = args_of(output, sharded_lazy_shuffle_window=2, finetune=False, mcore_model=str(output / "checkpoint-7"))
    streams = [open_stream(plan(resumed, directory, rank, 2)) for rank in range(2)]
    for rank, stream in enumerate(streams):
        stream.check_resume(28, 7)
        assert [stream[rank + 2 * place] for place in range(14, 24)] == expected[rank]
    assert facts_of(directory).samples == 48


def checkpoints_of(directory: Path, **changes: Any) -> Checkpoints:
    args = megatron(
        train_iters=12, global_batch_size=4, sharded_lazy_consumer=NAME, sharded_lazy_shuffle_window=0, **changes
    )
    return Checkpoints(plan(args, directory, 0, 2), str(directory.parent / "output"))


def other_run(directory: Path, *, take_over: bool = False) -> CursorOwner:
    """The cursor in the hands of another process; locks of one process are as apart as those of two."""
    return CursorOwner(directory, NAME, take_over=take_over)


def anew(directory: Path) -> Cursor:
    found = read_cursor(directory, NAME)
    assert found is not None
    return found


def test_second_run_of_a_name_is_refused_naming_the_holder_and_the_ways_out(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 24, 3)
    with other_run(directory), pytest.raises(CursorTaken, match=r"process \d+ on .* is running as 'run'") as refused:
        checkpoints_of(directory).register()
    assert "--sharded_lazy_consumer NAME" in str(refused.value)
    assert "--sharded_lazy_take_over true" in str(refused.value)
    assert read_cursor(directory, NAME) is None
    # Once that one has ended.
    checkpoints_of(directory).register()
    assert anew(directory).consumed == 0


def test_every_rank_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = produce(tmp_path / "s", 24, 3)
    monkeypatch.setattr(parallel, "is_first", lambda: False)
    monkeypatch.setattr(parallel, "agree", lambda mine: "process 7 on node1 is running as 'run'")
    with pytest.raises(CursorTaken, match="process 7 on node1"):
        checkpoints_of(directory).register()


def test_second_run_takes_over_where_it_is_told_and_the_first_one_writes_no_more(
    tmp_path: Path, cautions: list[str]
) -> None:
    directory, output = produce(tmp_path / "s", 24, 3), tmp_path / "output"
    first = checkpoints_of(directory)
    first.register()
    with other_run(directory, take_over=True) as second:
        second.begin(anew(directory))
        for step in (1, 2):
            first.begin(str(output / f"checkpoint-{step}"), 4 * step, step)
            first.commit()
        assert anew(directory).consumed == 0
    # Told once, and not raised: training goes on.
    assert len(cautions) == 1
    assert "has taken over the cursor of 'run'; this run does not write it any more" in cautions[0]


def test_run_that_is_told_to_takes_over(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 24, 3)
    with other_run(directory) as first:
        checkpoints_of(directory, sharded_lazy_take_over=True).register()
        mine = anew(directory)
        with pytest.raises(RuntimeError):
            first.write(mine)


def test_cursor_holds_the_state_of_the_run(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 24, 3), tmp_path / "output"
    run = checkpoints_of(directory)
    run.register()
    run.begin(str(output / "checkpoint-3"), 12, 3)
    run.commit()
    found = anew(directory)
    assert found.state is not None
    (part,) = found.state.parts
    assert (found.consumed, part.dp, part.draws, part.draws_per_step) == (12, 2, 6, 2)
    assert found.owner


def test_under_ms_swifts_own_shuffle_it_holds_none(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 24, 3)
    args = megatron(train_iters=12, global_batch_size=4, sharded_lazy_consumer=NAME, data_sharding=True)
    Checkpoints(plan(args, directory, 0, 2), str(tmp_path / "output")).register()
    assert anew(directory).state is None


def test_name_is_free_once_let_go(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 24, 3)
    checkpoints_of(directory).register()
    with pytest.raises(CursorTaken):
        other_run(directory)
    let_go_of_cursors()
    other_run(directory).close()
