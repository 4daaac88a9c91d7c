"""`position`: what is in a checkpoint's `lazyshard.json`, whatever has happened to it, and when it is gone on from."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from lazyshard.errors import FileRefused
from lazyshard.store import durable
from lazyshard_swift import position as positions
from lazyshard_swift.checkpoints import load_position, save_position, saved_in
from lazyshard_swift.errors import PositionInvalid, ResumeRefused
from lazyshard_swift.position import Position, check_fits, parse
from tests.swift.unit.runs import position

FILE = "/runs/one/checkpoint-3/lazyshard.json"


def changed(**changes: Any) -> bytes:
    return orjson.dumps({**orjson.loads(position().to_bytes()), **changes})


def refusal(data: bytes) -> str:
    with pytest.raises(PositionInvalid) as refused:
        parse(data, FILE)
    assert refused.value.file == FILE
    text = str(refused.value)
    assert text.startswith(f"{FILE}: ")
    assert "take an older one, or start on the data anew from its weights alone" in text
    return text


def test_file_is_the_documented_one() -> None:
    assert orjson.loads(position().to_bytes()) == {
        "format": 2,
        "stream": "0123456789abcdef0123456789abcdef",
        "directory": "/streams/one",
        "samples_per_chunk": 4,
        "consumed": 48,
        "step": 3,
        "dp_size": 2,
        "batch_size": 1,
        "layout": "strided",
        "window": 8,
        "seed": 42,
        "epoch_samples": 100,
        "by_steps": False,
        "consumer": "one-1234",
        "saved_at": 1795000000.5,
        "skipped": [],
        "state": {
            "format": 1,
            "stream_id": "0123456789abcdef0123456789abcdef",
            "samples_per_chunk": 4,
            "unit": 4,
            "window": 32,
            "seed": 42,
            "max_total_samples": None,
            "parts": [
                {
                    "dp": 2,
                    "batch_size": 1,
                    "draws": 24,
                    "epoch": None,
                    "trained": True,
                    "skip": [],
                    "first_step": 0,
                    "draws_per_step": 8,
                }
            ],
            "consumed": 48,
        },
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"consumed": 0, "step": 0, "window": 0, "seed": 0},
        {"seed": 2**63 - 1, "consumed": 2**53},
        {"by_steps": True, "layout": "block"},
        {"skipped": ("steps 3:4", "chunks 0:2")},
        {"directory": '/数据/a"b\\c', "consumer": "é"},
    ],
)
def test_position_comes_back_as_it_was_saved(tmp_path: Path, changes: dict[str, Any]) -> None:
    saved = position(**changes)
    save_position(saved, tmp_path / "new" / "checkpoint-3")
    assert load_position(tmp_path / "new" / "checkpoint-3") == saved
    assert os.listdir(tmp_path / "new" / "checkpoint-3") == ["lazyshard.json"]


def test_position_is_replaced_by_a_later_one(tmp_path: Path) -> None:
    save_position(position(), tmp_path)
    save_position(position(consumed=64), tmp_path)
    assert load_position(tmp_path) == position(consumed=64)
    assert os.listdir(tmp_path) == ["lazyshard.json"]


def test_position_of_a_later_release_with_more_fields_is_read() -> None:
    assert parse(changed(more=[1, 2]), FILE) == position()


def test_time_in_whole_seconds_is_read() -> None:
    assert parse(changed(saved_at=1795000000), FILE) == position(saved_at=1795000000.0)


def test_file_cut_at_any_byte_is_refused() -> None:
    data = position().to_bytes()
    assert data.endswith(b"}\n")
    # The newline alone says nothing.
    assert parse(data[:-1], FILE) == position()
    for size in range(len(data) - 1):
        assert f"found {size} bytes that are none" in refusal(data[:size])


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\0" * 300, "300 bytes that are none"),
        (b"[]", "list"),
        (b"null", "NoneType"),
        (b"3", "int"),
        (b'"lazyshard"', "str"),
        (b"[" * 5000 + b"]" * 5000, "bytes that are none"),
        (b'{"format": 1, "stream": "\xff"}', "bytes that are none"),
        (b'{"format": 1, "saved_at": NaN}', "bytes that are none"),
        (position().to_bytes() * 2, "bytes that are none"),
    ],
)
def test_file_that_is_no_object_is_refused(data: bytes, found: str) -> None:
    assert found in refusal(data)


@pytest.mark.parametrize("version", [0, 3, 1.5, "1", None, [1]])
def test_other_format_is_refused_naming_both(version: Any) -> None:
    assert f"format is {version!r}, this release reads 1 to 2" in refusal(changed(format=version))


def format_1(**changes: Any) -> bytes:
    values = {name: value for name, value in orjson.loads(position().to_bytes()).items() if name in NAMES}
    return orjson.dumps({"format": 1, **values, **changes})


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


@pytest.mark.parametrize(
    ("changes", "why"), [({"consumed": 47}, "expected a multiple of dp_size 2"), ({"dp_size": 0}, "dp_size 0")]
)
def test_format_1_of_which_no_run_can_be_is_refused(changes: dict[str, Any], why: str) -> None:
    assert why in refusal(format_1(**changes))


@pytest.mark.parametrize("name", ["state", "skipped"])
@pytest.mark.parametrize("wrong", [None, 1, "x", {}, [1]])
def test_state_that_is_none_is_refused(name: str, wrong: Any) -> None:
    assert name in refusal(changed(**{name: wrong}))


def test_field_of_the_state_is_named_once_with_its_file() -> None:
    state = orjson.loads(position().to_bytes())["state"]
    text = refusal(changed(state=state | {"seed": -1}))
    assert "'state.seed'" in text
    assert text.count(FILE) == 1


def test_state_of_a_later_format_is_refused() -> None:
    state = orjson.loads(position().to_bytes())["state"]
    assert "format 2, this release of lazyshard reads format 1" in refusal(changed(state=state | {"format": 2}))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"consumed": 50}, "consumed 48, and the rest of it 50"),
        ({"dp_size": 4}, "dp 2, and the rest of it 4"),
        ({"batch_size": 2}, "batch_size 1"),
        ({"window": 2}, "window 32, and the rest of it 8"),
        ({"seed": 1}, "seed 42"),
        ({"samples_per_chunk": 8}, "samples_per_chunk 4"),
        ({"stream": "f" * 32}, "stream_id"),
    ],
)
def test_state_that_contradicts_the_rest_is_refused(changes: dict[str, Any], name: str) -> None:
    assert name in refusal(changed(**changes))


@pytest.mark.parametrize("version", [True, 1.0])
def test_format_that_only_equals_the_number_is_refused(version: Any) -> None:
    refusal(changed(format=version))


def test_file_without_a_format_is_refused() -> None:
    assert "format is None, this release reads 1" in refusal(b"{}")


NAMES = [
    *["stream", "directory", "layout", "consumer"],
    *["samples_per_chunk", "consumed", "step", "dp_size", "batch_size", "window", "seed", "epoch_samples"],
    *["by_steps", "saved_at"],
]


@pytest.mark.parametrize("name", NAMES)
def test_missing_field_is_refused_naming_it(name: str) -> None:
    values = orjson.loads(position().to_bytes())
    del values[name]
    assert f"{name} is None" in refusal(orjson.dumps(values))


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (NAMES[:4], [None, 1, True, ["a"], {}]),
        (NAMES[4:12], [None, "1", 1.0, True, False, -1, [1], 2**64]),
        (["by_steps"], [None, 0, 1, "true", [True]]),
        (["saved_at"], [None, "1", True, [1.0]]),
    ],
)
def test_field_of_another_type_is_refused_naming_it(names: list[str], wrong: list[Any]) -> None:
    values = orjson.loads(position().to_bytes())
    for name in names:
        for value in wrong:
            # orjson writes no integer past 64 bits; JSON can.
            text = b"18446744073709551616" if value == 2**64 else orjson.dumps(value)
            data = orjson.dumps({**values, name: "@"}).replace(b'"@"', text)
            assert f"{name} is " in refusal(data), (name, value)


@pytest.mark.parametrize("layout", ["", "Strided", "striped", "both"])
def test_unknown_layout_is_refused(layout: str) -> None:
    # A run would go on with it, and whatever is not "strided" would be read as "block".
    refusal(changed(layout=layout))


def test_checkpoint_without_a_position_has_none(tmp_path: Path) -> None:
    assert load_position(tmp_path) is None
    assert load_position(tmp_path / "not there") is None
    (tmp_path / "file").touch()
    assert load_position(tmp_path / "file") is None


def test_position_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "lazyshard.json").mkdir()
    with pytest.raises(FileRefused, match="found a directory"):
        load_position(tmp_path)


@pytest.mark.parametrize("step", ["write_all", "sync", "rename"])
@pytest.mark.parametrize("before", [None, position(consumed=16)])
def test_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, before: Position | None
) -> None:
    if before is not None:
        save_position(before, tmp_path)
    there = os.listdir(tmp_path)
    write_all = durable.write_all

    def fail(*arguments: Any) -> None:
        if step == "write_all":
            write_all(arguments[0], arguments[1][:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, step, fail)
    with pytest.raises(OSError, match="No space left"):
        save_position(position(), tmp_path)
    assert load_position(tmp_path) == before
    # Nor is anything left behind in a folder that is copied, uploaded and listed as a checkpoint.
    assert os.listdir(tmp_path) == there


def test_saved_in_leaves_out_what_cannot_be_read(tmp_path: Path) -> None:
    assert saved_in(tmp_path / "not there") == []
    for step in (1, 2, 10):
        save_position(position(step=step), tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-2" / "lazyshard.json").write_bytes(b"{")
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-4" / "lazyshard.json").mkdir(parents=True)
    save_position(position(step=5), tmp_path / "last")
    assert sorted(found.step for found in saved_in(tmp_path)) == [1, 10]


CHECKPOINT = "/runs/one/checkpoint-3"

REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"samples_per_chunk": 8}, "samples per chunk 4, this run has samples per chunk 8", "4", "8"),
    ({"seed": 43}, "give --data_seed 42", "42", "43"),
    ({"window": 0}, "keep --train_dataloader_shuffle true", "8", "0"),
    ({"window": 2}, "leave out --sharded_lazy_shuffle_window", "8", "2"),
]


@pytest.mark.parametrize(("now", "way_out", "expected", "actual"), REFUSED)
def test_resume_is_refused_naming_what_differs(now: dict[str, Any], way_out: str, expected: str, actual: str) -> None:
    with pytest.raises(ResumeRefused) as refused:
        check_fits(position(), position(**now), CHECKPOINT)
    error = refused.value
    assert str(error).startswith(f"{CHECKPOINT}: ")
    assert way_out in str(error)
    assert (error.checkpoint, error.expected, error.actual) == (CHECKPOINT, expected, actual)


def test_resume_without_shuffle_is_refused_naming_the_way_out() -> None:
    with pytest.raises(ResumeRefused, match="keep --train_dataloader_shuffle false"):
        check_fits(position(window=0), position(window=2), CHECKPOINT)


def test_resume_on_another_stream_is_refused_naming_both() -> None:
    now = position(stream="f" * 32, directory="/streams/two", samples_per_chunk=8, seed=1)
    with pytest.raises(ResumeRefused) as refused:
        check_fits(position(), now, CHECKPOINT)
    text = str(refused.value)
    for part in (CHECKPOINT, "0123456789abcdef" * 2, "/streams/one", "f" * 32, "/streams/two", "--dataset", "weights"):
        assert part in text
    assert (refused.value.expected, refused.value.actual) == ("0123456789abcdef" * 2, "f" * 32)


@pytest.mark.parametrize(
    ("what", "way_out"),
    [("dp_size", "with the number it had"), ("batch_size", "micro batch"), ("epoch_samples", "the same length")],
)
def test_resume_of_ms_swifts_own_shuffle_asks_for_more(what: str, way_out: str) -> None:
    before = position(layout="block", window=0)
    check_fits(before, position(layout="block", window=0), CHECKPOINT)
    with pytest.raises(ResumeRefused, match=way_out) as refused:
        check_fits(before, position(layout="block", window=0, **{what: 200}), CHECKPOINT)
    assert "started without --data_sharding" in str(refused.value)


@pytest.mark.parametrize(
    "now",
    [
        {},
        # The stream has grown, moved or ended; another name of the cursor, another end of the run.
        {"directory": "/streams/moved", "epoch_samples": 200, "consumer": "other", "by_steps": True},
        {"saved_at": 0.0},
        {"dp_size": 3},
        {"batch_size": 2},
        {"dp_size": 1, "batch_size": 8, "consumed": 0, "step": 0},
    ],
)
def test_resume_where_the_next_sample_is_the_next_one_is_accepted(now: dict[str, Any]) -> None:
    check_fits(position(), position(**now), CHECKPOINT)


@pytest.mark.parametrize("layouts", [("strided", "block"), ("block", "strided")])
def test_resume_with_another_layout_is_refused(layouts: tuple[str, str]) -> None:
    before, now = (position(layout=layout, window=0) for layout in layouts)
    with pytest.raises(ResumeRefused, match="layout"):
        check_fits(before, now, CHECKPOINT)


def test_stamp_is_the_time() -> None:
    before = time.time()
    assert before <= positions.stamp() <= time.time()
