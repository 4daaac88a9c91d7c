"""`position` and `checkpoints`: what a checkpoint holds; the cursor never passes one that can still be resumed from."""

import os
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from lazyshard.errors import CursorTaken, FileRefused
from lazyshard.format.state import Cursor
from lazyshard.store import durable
from lazyshard.stream import CursorOwner, forget_consumer, read_cursor
from lazyshard_swift import checkpoints
from lazyshard_swift.checkpoints import Checkpoints, is_whole, load_position, parse, save_position
from lazyshard_swift.errors import PositionInvalid, ResumeRefused
from lazyshard_swift.run_plan import check_fits
from tests.stream.streams import cursor_of, names, produce, raised, raising
from tests.swift.unit import runs
from tests.swift.unit.runs import SAVED, as_rank, let_go_of_cursors, megatron, plan, position, tells

FILE = "/runs/one/checkpoint-3/lazyshard.json"
CHECKPOINT = "/runs/one/checkpoint-3"
PART: dict[str, Any] = {"dp": 2, "batch_size": 1, "draws": 24, "epoch": None, "trained": True, "skip": []}
STATE: dict[str, Any] = {
    **{"format": 1, "stream_id": "0123456789abcdef0123456789abcdef", "samples_per_chunk": 4, "unit": 4},
    **{"window": 32, "seed": 42, "max_total_samples": None},
    "parts": [PART | {"first_step": 0, "draws_per_step": 8}],
    "consumed": 48,
}
LATEST: dict[str, Any] = {"format": 2, **SAVED, "skipped": [], "state": STATE}
CONSUMER = "run 1"


def changed(**changes: Any) -> bytes:
    return orjson.dumps({**LATEST, **changes})


def format_1(**changes: Any) -> bytes:
    return orjson.dumps({"format": 1, **SAVED, **changes})


def assert_refused(data: bytes, *words: str) -> None:
    tells(raised(PositionInvalid, parse, data, FILE), f"{FILE}: ", *words, file=FILE)


def test_position_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    assert orjson.loads(position().to_bytes()) == LATEST, "the documented one"
    folder = tmp_path / "new" / "checkpoint-3"
    # Each replaces an earlier one.
    for changes in (
        {"consumed": 0, "step": 0, "window": 0, "seed": 0},
        {"seed": 2**63 - 1, "consumed": 2**53},
        {"by_steps": True, "layout": "block"},
        {"skipped": ("steps 3:4", "chunks 0:2")},
        {"directory": '/数据/a"b\\c', "consumer": "é"},
    ):
        saved = position(**changes)
        save_position(saved, folder)
        assert load_position(folder) == saved
        assert os.listdir(folder) == ["lazyshard.json"]


def test_file_cut_at_any_byte_is_refused_and_one_of_a_later_release_with_more_fields_is_read() -> None:
    data = position().to_bytes()
    assert data.endswith(b"}\n")
    # The newline alone says nothing.
    assert parse(data[:-1], FILE) == position()
    for size in range(len(data) - 1):
        assert_refused(data[:size], "a JSON object")
    assert parse(changed(more=[1, 2], saved_at=1795000000), FILE) == position(saved_at=1795000000.0)


WRONG: dict[type, list[Any]] = {
    str: [None, 1, True, ["a"], {}],
    int: [None, "1", 1.0, True, False, -1, [1]],
    bool: [None, 0, 1, "true", [True]],
    float: [None, "1", True, [1.0]],
    type(None): [None, 1, "x", {}, [1]],
}
# What the file holds, and what is named of it.
BAD: list[tuple[bytes, str]] = [
    *((data, "") for data in (b"\0" * 300, b"[]", b"null", b"3", b'"lazyshard"', b"{}", b"[" * 5000 + b"]" * 5000)),
    (b'{"format": 1, "stream": "\xff"}', ""),
    (b'{"format": 1, "saved_at": NaN}', ""),
    (position().to_bytes() * 2, ""),
    *((changed(format=version), "format") for version in (0, 3, 1.5, "1", None, [1], True, 1.0)),
    # A run would continue with it, and whatever is not "strided" would be read as "block".
    *((changed(layout=layout), "'layout'") for layout in ("", "Strided", "striped", "both")),
    *((changed(**{name: value}), f"'{name}'") for name, kind in SAVED.items() for value in WRONG[type(kind)]),
    *((orjson.dumps({key: value for key, value in LATEST.items() if key != name}), f"'{name}'") for name in SAVED),
    # orjson writes no integer past 64 bits; JSON can.
    (changed(step="@").replace(b'"@"', b"18446744073709551616"), "'step'"),
    *((changed(**{name: wrong}), name) for name in ("state", "skipped") for wrong in WRONG[type(None)]),
    (changed(state=STATE | {"format": 2}), "format 2"),
    (changed(state=STATE | {"seed": -1}), "'state.seed'"),
    # The state contradicts the rest.
    (changed(consumed=50), "consumed 48"),
    (changed(dp_size=4), "dp 2"),
    (changed(batch_size=2), "batch_size 1"),
    (changed(window=2), "window 32"),
    (changed(seed=1), "seed 42"),
    (changed(samples_per_chunk=8), "samples_per_chunk 4"),
    (changed(stream="f" * 32), "stream_id"),
    (changed(layout="grouped", window=0), "'grouping'"),
    # Of which no run can be.
    (format_1(consumed=47), "dp_size 2"),
    (format_1(dp_size=0), "dp_size 0"),
]


def test_file_that_is_no_position_is_refused_naming_what_is_wrong() -> None:
    for data, named in BAD:
        assert_refused(data, named)


def test_format_1_is_read_as_a_run_of_one_part() -> None:
    assert parse(format_1(), FILE) == position()
    # 46 samples of 10 steps: the last one of an epoch was smaller, so nothing says how large they are.
    uneven = parse(format_1(consumed=46, step=10), FILE)
    assert uneven.state is not None
    (part,) = uneven.state.parts
    assert (part.draws, part.draws_per_step, uneven.state.consumed) == (23, 0, 46)
    foreign = parse(format_1(stream="first-row-0123456789abcdef"), FILE)
    assert foreign.state is not None and foreign.state.stream_id is None
    assert parse(format_1(layout="block", window=0), FILE).state is None


def test_checkpoint_without_a_position_has_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "not there", tmp_path / "file"):
        assert load_position(folder) is None
    (tmp_path / "lazyshard.json").mkdir()
    raised(FileRefused, load_position, tmp_path)


@pytest.mark.parametrize("step", ["write_all", "sync", "rename"])
def test_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    save_position(position(consumed=16), tmp_path)
    write_all = durable.write_all

    def fail(*arguments: Any) -> None:
        if step == "write_all":
            write_all(arguments[0], arguments[1][:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, step, fail)
    raised(OSError, save_position, position(), tmp_path)
    assert load_position(tmp_path) == position(consumed=16)
    # Nor is anything left behind in a folder that is copied, uploaded and listed as a checkpoint.
    assert os.listdir(tmp_path) == ["lazyshard.json"]


BLOCK = {"layout": "block", "window": 0}
# What was saved, what this run has, and of a refusal the way out and the two values that differ.
RESUMES: list[tuple[dict[str, Any], dict[str, Any], tuple[str, str, str] | None]] = [
    ({}, {"samples_per_chunk": 8}, ("another chunk", "4", "8")),
    ({}, {"seed": 43}, ("--data_seed 42", "42", "43")),
    ({}, {"window": 0}, ("--train_dataloader_shuffle true", "8", "0")),
    ({"window": 0}, {"window": 2}, ("--train_dataloader_shuffle false", "0", "2")),
    ({"window": 0}, BLOCK, ("--data_sharding", "strided", "block")),
    # ms-swift's own shuffle asks for more.
    (BLOCK, BLOCK | {"dp_size": 200}, ("without --data_sharding", "2", "200")),
    (BLOCK, BLOCK | {"batch_size": 200}, ("without --data_sharding", "1", "200")),
    (BLOCK, BLOCK | {"epoch_samples": 200}, ("without --data_sharding", "100", "200")),
    # Another stream, whatever else differs.
    ({}, {"stream": "f" * 32, "directory": "/two", "seed": 1}, ("/two", "0123456789abcdef" * 2, "f" * 32)),
    ({}, {}, None),
    # The stream has grown, moved or ended; another name of the cursor, another end of the run.
    ({}, {"directory": "/streams/moved", "epoch_samples": 200, "consumer": "other", "by_steps": True}, None),
    ({}, {"dp_size": 3, "batch_size": 8, "saved_at": 0.0}, None),
    (BLOCK, BLOCK, None),
]


def test_resume_is_refused_where_the_next_sample_would_not_be_the_next_one() -> None:
    for before, now, differs in RESUMES:
        if differs is None:
            check_fits(position(**before), position(**now), CHECKPOINT)
            continue
        way_out, expected, actual = differs
        error = raised(ResumeRefused, check_fits, position(**before), position(**now), CHECKPOINT)
        tells(error, way_out, checkpoint=CHECKPOINT, expected=expected, actual=actual)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """16 chunks of 3."""
    return produce(tmp_path / "s", 48, 3)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


def args_of(output: Path, resumed: Path | None = None, **changes: Any) -> Any:
    """Arguments of 12 steps of 4 samples, on two ranks."""
    common: dict[str, Any] = {"train_iters": 12, "global_batch_size": 4, "sharded_lazy_consumer": CONSUMER}
    common |= {"output_dir": str(output), "sharded_lazy_shuffle_window": 0}
    if resumed is not None:
        common |= {"finetune": False, "mcore_model": runs.checkpoint(resumed)}
    return megatron(**{**common, **changes})


def kept(directory: Path, output: Path, resumed: Path | None = None, **changes: Any) -> Checkpoints:
    return Checkpoints(plan(args_of(output, resumed, **changes), directory, 0, 2), str(output))


def save(saves: Checkpoints, output: Path, step: int) -> None:
    """As ms-swift saves: the position first, the weights, then the cursor."""
    folder = output / f"checkpoint-{step}"
    saves.begin(step * 4, step)
    (folder / "weights").write_bytes(b"0" * 10)
    saves.commit()


def cursor(directory: Path) -> Cursor:
    return cursor_of(directory, CONSUMER)


def told(directory: Path) -> tuple[int, int]:
    """Samples that the cursor says are trained, and chunks that it gives up."""
    return cursor(directory).consumed, cursor(directory).chunks_before


def test_cursor_says_what_the_newest_checkpoint_holds(directory: Path, output: Path) -> None:
    run = plan(args_of(output), directory, 0, 2)
    save(Checkpoints(run, str(output)), output, 5)
    found = cursor(directory)
    # Positions 0 to 9 of two lanes are done: chunks 0 to 5, and a row of 6 and 7 each.
    assert (found.consumer, found.stream_id, told(directory)) == (CONSUMER, run.stream, (20, 6))
    assert found.plan == {"dp_size": 2, "unit": 3, "window": 0, "seed": 42, "batch_size": 1}
    assert found.state is not None and found.owner
    (part,) = found.state.parts
    assert (part.dp, part.draws, part.draws_per_step) == (2, 10, 2)
    where = load_position(output / "checkpoint-5")
    assert where is not None
    assert (where.consumed, where.step, where.stream) == (20, 5, run.stream)


@pytest.mark.parametrize(("window", "live", "limit"), [(0, False, 1), (2, False, 3), (0, True, 3), (2, True, 1)])
def test_no_chunk_is_given_up_that_is_needed(tmp_path: Path, output: Path, window: int, live: bool, limit: int) -> None:
    directory = produce(tmp_path / "s", 46, 3, end=not live)
    run = plan(args_of(output, sharded_lazy_shuffle_window=window), directory, 0, 2)
    saves, given_up = Checkpoints(run, str(output)), []
    for step in range(1, 12):
        # save_total_limit: ms-swift deletes before it returns.
        shutil.rmtree(output / f"checkpoint-{step - limit}", ignore_errors=True)
        save(saves, output, step)
        oldest, chunks = max(1, step - limit + 1), cursor(directory).chunks_before
        for total in (46, 47, 60) if live else (46,):
            places = range(oldest * 2, run.course.begin(total).length)
            needed = {run.course.draw(lane, place, total).sample for lane in range(2) for place in places}
            assert min(needed) >= chunks * 3, (step, total)
        given_up.append(chunks)
    assert given_up == sorted(given_up)
    assert given_up[-1] > 0, "it does move"


def test_checkpoints_of_the_starts_before_count(tmp_path: Path) -> None:
    # ms-swift gives each start a folder of its own (--add_version true, its default); the cursor is that of the run.
    for folders in (("v0-20261121-010200", "v1-20261121-010201"), ("out", "other")):
        directory = produce(tmp_path / f"of {folders[0]}", 48, 3)
        first, second = (tmp_path / name for name in folders)
        save(kept(directory, first), first, 3)
        save(kept(directory, second, first / "checkpoint-3"), second, 9)
        # The first one's checkpoint is still there.
        assert told(directory) == (36, 4)


def test_checkpoint_that_is_saved_over_counts_as_torn_until_it_is_whole(directory: Path, output: Path) -> None:
    saves, folder = kept(directory, output), output / "checkpoint-3"
    for before in (["trainer_state.json"], ["latest_checkpointed_iteration.txt", "iter_0000003/metadata.json"]):
        for name in before:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        assert is_whole(folder)
        saves.begin(12, 3)
        assert not is_whole(folder)
        assert not any((folder / name).exists() for name in before)


def test_checkpoint_is_due_once_a_step_was_trained(directory: Path, output: Path) -> None:
    saves = kept(directory, output)
    assert [saves.is_due(step) for step in (0, 1, 3)] == [False, True, True]
    # One of another stream does not count, nor one that cannot be read.
    save_position(position(stream="f" * 32, consumed=4), output / "checkpoint-1")
    save_position(position(), output / "checkpoint-2")
    (output / "checkpoint-2" / "lazyshard.json").write_bytes(b"{")
    save(saves, output, 6)
    assert [saves.is_due(step) for step in (6, 7)] == [False, True]
    assert told(directory) == (24, 8)
    assert [kept(directory, output, output / "checkpoint-6").is_due(step) for step in (6, 7)] == [False, True]


def test_stream_is_given_up_at_its_end(tmp_path: Path, output: Path) -> None:
    shuffled = {"data_sharding": True, "sharded_lazy_shuffle_window": None}
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 16),
        # Unless another epoch may follow.
        ({"sharded_lazy_on_end": "repeat"}, 0),
        ({"train_iters": None, "num_train_epochs": 2}, 0),
        # Or in ms-swift's own shuffle.
        ({"train_iters": None, "num_train_epochs": 1, **shuffled}, 0),
        (shuffled, 0),
    ]
    for number, (changes, given_up) in enumerate(cases):
        directory = produce(tmp_path / str(number), 48, 3)
        save(kept(directory, output / str(number), **changes), output / str(number), 12)
        assert told(directory) == (48, given_up)
        assert (cursor(directory).state is None) == ("data_sharding" in changes)


def test_position_is_there_before_the_weights_and_the_cursor_after_them(directory: Path, output: Path) -> None:
    saves = kept(directory, output)
    saves.commit()
    assert not (directory / "cursors").exists(), "written without a checkpoint"
    assert (bool(saves.pending), saves.last_step) == (False, -1)
    saves.begin(20, 5)
    assert names(output / "checkpoint-5") == ["lazyshard.json"]
    assert (bool(saves.pending), saves.last_step) == (True, 5)
    assert read_cursor(directory, CONSUMER) is None
    # --async_save: more than one may be under way, and the newest counts.
    saves.begin(24, 6)
    saves.commit()
    assert not saves.pending
    assert cursor(directory).consumed == 24


def test_start_puts_the_cursor_where_it_goes_on(tmp_path: Path, directory: Path, output: Path) -> None:
    saves = kept(directory, output)
    saves.register()
    assert told(directory) == (0, 0)
    assert not output.exists()
    for step in (3, 9):
        save(saves, output, step)
    assert told(directory) == (36, 4)
    for forgotten in (False, True):
        assert not forgotten or forget_consumer(directory, CONSUMER)
        kept(directory, output, output / "checkpoint-9").register()
        assert told(directory) == (36, 4)
    # From an older one, whose folder was moved: it goes back.
    (output / "checkpoint-3").rename(tmp_path / "moved")
    save(saves, output, 9)
    assert told(directory) == (36, 12)
    kept(directory, output, tmp_path / "moved").register()
    assert told(directory) == (12, 4)
    # --finetune true: the checkpoint is there, and not continued from.
    kept(directory, output).register()
    assert told(directory) == (0, 0)


def test_only_the_first_rank_writes(directory: Path, output: Path) -> None:
    with as_rank(1):
        saves = kept(directory, output)
        saves.register()
        saves.begin(20, 5)
        saves.commit()
    # But every rank knows that there is one, or they would not all save at the end.
    assert (saves.last_step, bool(saves.pending)) == (5, False)
    assert not output.exists()
    assert not (directory / "cursors").exists()


@pytest.mark.parametrize("failure", ["no folder", "no space", "no checkpoint"])
def test_cursor_that_cannot_be_written_is_told_and_not_raised(
    directory: Path, output: Path, monkeypatch: pytest.MonkeyPatch, cautions: list[str], failure: str
) -> None:
    saves = kept(directory, output)
    if failure == "no folder":
        (directory / "cursors").touch()
        saves.register()
        assert cautions.pop() and not cautions
    elif failure == "no space":
        monkeypatch.setattr("lazyshard.stream.cursor.CursorOwner.put", raising(OSError(28, "No space left on device")))
    saves.begin(20, 5)
    if failure == "no checkpoint":
        shutil.rmtree(output)
    saves.commit()
    assert len(cautions) == 1
    # The next one is tried again.
    if failure == "no folder":
        (directory / "cursors").unlink()
    monkeypatch.undo()
    save(saves, output, 6)
    assert cursor(directory).consumed == 24


def other_run(directory: Path, *, take_over: bool = False) -> CursorOwner:
    """The cursor in the hands of another process; locks of one process are as apart as those of two."""
    return CursorOwner(directory, CONSUMER, take_over=take_over)


def test_second_run_of_a_name_is_refused(directory: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways_out = "--sharded_lazy_consumer NAME", "--sharded_lazy_take_over true"
    with other_run(directory):
        tells(raised(CursorTaken, kept(directory, output).register), *ways_out, consumer=CONSUMER)
    assert read_cursor(directory, CONSUMER) is None
    # Once that one has ended; then this one has the name, until it lets go.
    kept(directory, output).register()
    assert told(directory) == (0, 0)
    raised(CursorTaken, other_run, directory)
    let_go_of_cursors()
    other_run(directory).close()
    monkeypatch.setattr(checkpoints, "agree", lambda mine: "process 7 on node1 is running as 'run'")
    with as_rank(1):
        tells(raised(CursorTaken, kept(directory, output).register), "process 7 on node1")


def test_first_run_writes_no_more_once_another_takes_over(directory: Path, output: Path, cautions: list[str]) -> None:
    first = kept(directory, output)
    first.register()
    with other_run(directory, take_over=True) as second:
        second.begin(cursor(directory))
        for step in (1, 2):
            save(first, output, step)
        assert cursor(directory).consumed == 0
        # Told once, and not raised: training continues.
        assert len(cautions) == 1 and "taken over" in cautions[0]
        let_go_of_cursors()
        kept(directory, output, sharded_lazy_take_over=True).register()
        raised(RuntimeError, second.write, cursor(directory))
