"""`position`: what is in a checkpoint's `lazyshard.json`, whatever has happened to it, and when it is gone on from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from lazyshard.errors import FileRefused
from lazyshard.store import durable
from lazyshard_swift.checkpoints import load_position, save_position
from lazyshard_swift.errors import PositionInvalid, ResumeRefused
from lazyshard_swift.position import Position, check_fits, parse
from tests.swift.unit.runs import SAVED, position, refused

FILE = "/runs/one/checkpoint-3/lazyshard.json"
CHECKPOINT = "/runs/one/checkpoint-3"

PART: dict[str, Any] = {"dp": 2, "batch_size": 1, "draws": 24, "epoch": None, "trained": True, "skip": []}
STATE: dict[str, Any] = {
    "format": 1,
    "stream_id": "0123456789abcdef0123456789abcdef",
    "samples_per_chunk": 4,
    "unit": 4,
    "window": 32,
    "seed": 42,
    "max_total_samples": None,
    "parts": [PART | {"first_step": 0, "draws_per_step": 8}],
    "consumed": 48,
}
LATEST: dict[str, Any] = {"format": 2, **SAVED, "skipped": [], "state": STATE}


def changed(**changes: Any) -> bytes:
    return orjson.dumps({**LATEST, **changes})


def format_1(**changes: Any) -> bytes:
    return orjson.dumps({"format": 1, **SAVED, **changes})


def assert_refused(data: bytes, *words: str) -> None:
    with refused(PositionInvalid, f"{FILE}: ", *words, file=FILE):
        parse(data, FILE)


@pytest.mark.parametrize(
    "changes",
    [
        {"consumed": 0, "step": 0, "window": 0, "seed": 0},
        {"seed": 2**63 - 1, "consumed": 2**53},
        {"by_steps": True, "layout": "block"},
        {"skipped": ("steps 3:4", "chunks 0:2")},
        {"directory": '/数据/a"b\\c', "consumer": "é"},
    ],
)
def test_position_comes_back_as_it_was_saved(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert orjson.loads(position().to_bytes()) == LATEST, "the documented one"
    folder = tmp_path / "new" / "checkpoint-3"
    # The second time it replaces an earlier one.
    for saved in (position(consumed=16), position(**changes)):
        save_position(saved, folder)
        assert load_position(folder) == saved
        assert os.listdir(folder) == ["lazyshard.json"]


def test_file_cut_at_any_byte_is_refused_and_one_of_a_later_release_with_more_fields_is_read() -> None:
    data = position().to_bytes()
    assert data.endswith(b"}\n")
    # The newline alone says nothing.
    assert parse(data[:-1], FILE) == position()
    for size in range(len(data) - 1):
        assert_refused(data[:size], f"{size} bytes")
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
    *((changed(format=version), "format is ") for version in (0, 3, 1.5, "1", None, [1], True, 1.0)),
    # A run would go on with it, and whatever is not "strided" would be read as "block".
    *((changed(layout=layout), "layout is ") for layout in ("", "Strided", "striped", "both")),
    *((changed(**{name: value}), f"{name} is ") for name, kind in SAVED.items() for value in WRONG[type(kind)]),
    *((orjson.dumps({key: value for key, value in LATEST.items() if key != name}), f"{name} is ") for name in SAVED),
    # orjson writes no integer past 64 bits; JSON can.
    (changed(step="@").replace(b'"@"', b"18446744073709551616"), "step is "),
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
    with pytest.raises(FileRefused):
        load_position(tmp_path)


@pytest.mark.parametrize("step", ["write_all", "sync", "rename"])
@pytest.mark.parametrize("before", [None, position(consumed=16)])
def test_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, before: Position | None
) -> None:
    if before is not None:
        save_position(before, tmp_path)
    there, write_all = os.listdir(tmp_path), durable.write_all

    def fail(*arguments: Any) -> None:
        if step == "write_all":
            write_all(arguments[0], arguments[1][:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, step, fail)
    with pytest.raises(OSError):
        save_position(position(), tmp_path)
    assert load_position(tmp_path) == before
    # Nor is anything left behind in a folder that is copied, uploaded and listed as a checkpoint.
    assert os.listdir(tmp_path) == there


BLOCK = {"layout": "block", "window": 0}

# What was saved, what this run has, and of a refusal the way out and the two values that differ.
RESUMES: list[tuple[dict[str, Any], dict[str, Any], tuple[str, str, str] | None]] = [
    ({}, {"samples_per_chunk": 8}, ("another chunk", "4", "8")),
    ({}, {"seed": 43}, ("--data_seed 42", "42", "43")),
    ({}, {"window": 0}, ("--train_dataloader_shuffle true", "8", "0")),
    ({"window": 0}, {"window": 2}, ("--train_dataloader_shuffle false", "0", "2")),
    (BLOCK, {"window": 0}, ("--data_sharding", "block", "strided")),
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


@pytest.mark.parametrize(("before", "now", "differs"), RESUMES)
def test_resume_is_refused_where_the_next_sample_would_not_be_the_next_one(
    before: dict[str, Any], now: dict[str, Any], differs: tuple[str, str, str] | None
) -> None:
    if differs is None:
        check_fits(position(**before), position(**now), CHECKPOINT)
        return
    way_out, expected, actual = differs
    with refused(ResumeRefused, way_out, checkpoint=CHECKPOINT, expected=expected, actual=actual):
        check_fits(position(**before), position(**now), CHECKPOINT)
