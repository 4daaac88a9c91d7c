"""Cursors in `checkpoints`: one run writes the cursor of a name; another one is refused, or takes over if told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import CursorTaken
from lazyshard.format import Cursor
from lazyshard.storage import CursorOwner, read_cursor
from lazyshard_swift import parallel
from lazyshard_swift.checkpoints import Checkpoints, let_go_of_cursors
from tests.storage.streams import produce
from tests.swift.unit.runs import megatron, plan

NAME = "run"


def checkpoints(directory: Path, **changes: Any) -> Checkpoints:
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
        checkpoints(directory).register()
    assert "--sharded_lazy_consumer NAME" in str(refused.value)
    assert "--sharded_lazy_take_over true" in str(refused.value)
    assert read_cursor(directory, NAME) is None
    # Once that one has ended.
    checkpoints(directory).register()
    assert anew(directory).consumed == 0


def test_every_rank_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = produce(tmp_path / "s", 24, 3)
    monkeypatch.setattr(parallel, "is_first", lambda: False)
    monkeypatch.setattr(parallel, "agree", lambda mine: "process 7 on node1 is running as 'run'")
    with pytest.raises(CursorTaken, match="process 7 on node1"):
        checkpoints(directory).register()


def test_second_run_takes_over_where_it_is_told_and_the_first_one_writes_no_more(
    tmp_path: Path, cautions: list[str]
) -> None:
    directory, output = produce(tmp_path / "s", 24, 3), tmp_path / "output"
    first = checkpoints(directory)
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
        checkpoints(directory, sharded_lazy_take_over=True).register()
        mine = anew(directory)
        with pytest.raises(RuntimeError):
            first.write(mine)


def test_cursor_holds_the_state_of_the_run(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 24, 3), tmp_path / "output"
    run = checkpoints(directory)
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
    checkpoints(directory).register()
    with pytest.raises(CursorTaken):
        other_run(directory)
    let_go_of_cursors()
    other_run(directory).close()
