"""Saved states: in checkpoints of ms-swift, alone, in cursors; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import StateInvalid, VersionUnsupported
from lazyshard.format import Cursor
from lazyshard.format.state import PartState
from lazyshard.storage.tracing_states import checkpoint_files, read_state, state_of_cursor
from tests.storage.test_tracing import ID, run_state

STATE = run_state(PartState(2, 1, 6, draws_per_step=2))

FORMAT_1 = {
    "format": 1,
    "stream": ID,
    "samples_per_chunk": 3,
    "consumed": 12,
    "step": 3,
    "dp_size": 2,
    "batch_size": 1,
    "layout": "strided",
    "window": 2,
    "seed": 7,
    "consumer": "sft",
    "saved_at": 5.0,
}


def save(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lazyshard.json").write_text(json.dumps(values))
    return folder


def test_a_checkpoint_tells_its_step_and_consumer(tmp_path: Path) -> None:
    values = {
        "state": STATE.to_dict(),
        "step": 3,
        "consumed": 12,
        "consumer": "sft",
        "saved_at": 5,
        "layout": "strided",
    }
    folder = save(tmp_path / "checkpoint-3", values)
    for path in (folder, folder / "lazyshard.json"):
        found = read_state(path)
        assert (found.state, found.step, found.consumer, found.saved_at) == (STATE, 3, "sft", 5.0)
        assert (found.folder_step, found.file) == (3, folder / "lazyshard.json")


def test_a_state_alone(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(STATE.encode())
    found = read_state(tmp_path / "state.json")
    assert (found.state, found.step, found.consumer, found.folder_step) == (STATE, None, None, None)
    assert found.saved_at == (tmp_path / "state.json").stat().st_mtime


def test_the_state_of_format_1_follows_from_its_numbers(tmp_path: Path) -> None:
    state = read_state(save(tmp_path, FORMAT_1)).state
    assert state == run_state(PartState(2, 1, 6, draws_per_step=2), window=6, seed=7)
    # Seven steps cannot have taken as many positions each: one at an epoch's end was shorter.
    save(tmp_path, FORMAT_1 | {"step": 4})
    assert read_state(tmp_path).state.parts[0].draws_per_step == 0
    save(tmp_path, FORMAT_1 | {"stream": "first-row-0123", "step": 0, "consumed": 0})
    assert read_state(tmp_path).state.stream_id is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"state": STATE.to_dict(), "consumed": 11}, "expected consumed = 12 as in the state, found 11"),
        ({"state": STATE.to_dict() | {"consumed": 11}}, "field 'state.consumed': expected 12"),
        ({"state": STATE.to_dict(), "layout": "block"}, "the trainer's own sampler shuffled the whole data set"),
        ({"state": None, "layout": "grouped"}, "the trainer's own sampler grouped by length the whole data set"),
        ({"step": 3, "model": 1}, "in its field 'state' \\(or 'data'\\), found the fields model, step; write it with"),
        ({}, "found the fields none; write it with json.dump"),
        (FORMAT_1 | {"consumed": 11}, "consumed: a multiple of dp_size = 2, found 11"),
        (FORMAT_1 | {"seed": None}, "seed: an integer from 0, found None"),
    ],
)
def test_files_without_a_state_are_refused(tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    with pytest.raises(StateInvalid, match=expected):
        read_state(save(tmp_path, values))


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b'{"state": {"form', "found 16 bytes that are torn"), (b"[]", "found list"), (None, "there is no such file")],
)
def test_files_that_are_torn_or_gone_are_refused(tmp_path: Path, data: bytes | None, expected: str) -> None:
    if data is not None:
        (tmp_path / "lazyshard.json").write_bytes(data)
    with pytest.raises(StateInvalid, match=expected):
        read_state(tmp_path)


def test_files_of_torch_save_are_told_what_to_do(tmp_path: Path) -> None:
    for data in (b"PK\x03\x04rest", b"\x80\x02}q\x00."):
        (tmp_path / "state.pt").write_bytes(data)
        with pytest.raises(StateInvalid, match="this is a file of torch") as raised:
            read_state(tmp_path / "state.pt")
        assert str(raised.value).endswith(
            'json.dump({"state": dataset.state_dict(consumed)}, file), as checkpoint-N/lazyshard.json'
        )


def test_a_state_under_data(tmp_path: Path) -> None:
    assert read_state(save(tmp_path, {"data": STATE.to_dict(), "step": 3})).state == STATE


def test_a_state_of_a_later_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VersionUnsupported, match="format 2, this release of lazyshard reads format 1"):
        read_state(save(tmp_path, {"state": STATE.to_dict() | {"format": 2}}))


def test_cursors(tmp_path: Path) -> None:
    cursor = Cursor("sft", ID, 12, 0, {}, 5.0, STATE)
    found = state_of_cursor(tmp_path, cursor)
    assert found is not None
    assert (found.state, found.consumer, found.file) == (STATE, "sft", tmp_path / "cursors" / "sft.json")
    assert state_of_cursor(tmp_path, Cursor("sft", ID, 12, 0, {}, 5.0)) is None


def test_checkpoints_are_found_in_a_run_and_in_its_versions(tmp_path: Path) -> None:
    for name in (
        "checkpoint-10",
        "checkpoint-9",
        "v0-20251121-101500/checkpoint-3",
        ".hidden/checkpoint-1",
        "a/b/checkpoint-2",
    ):
        save(tmp_path / name, {})
    (tmp_path / "checkpoint-11").mkdir()
    names = [str(file.parent.relative_to(tmp_path)) for file in checkpoint_files(tmp_path)]
    assert names == ["checkpoint-9", "checkpoint-10", "v0-20251121-101500/checkpoint-3"]
    assert checkpoint_files(tmp_path / "checkpoint-9") == [tmp_path / "checkpoint-9" / "lazyshard.json"]
    assert checkpoint_files(tmp_path / "checkpoint-9" / "lazyshard.json") == [
        tmp_path / "checkpoint-9" / "lazyshard.json"
    ]
