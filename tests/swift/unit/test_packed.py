"""Rows that are packs become what ms-swift's own `PackingDataset` yields; packs need --packing, and it needs them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import SkipSample
from lazyshard.format import check_row, encode_pack, encode_row
from lazyshard.stream.retire import retire
from lazyshard_swift import rows
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.opening import open_train_stream
from tests.stream.streams import produce
from tests.swift.conftest import ModelMaker
from tests.swift.streams import write_jsonl
from tests.swift.unit.programs import environment
from tests.swift.unit.runs import hugging_face, megatron

ROWS = 24


class Template:
    """Stands for ms-swift's."""

    packing = padding_free = False


def encode(row: dict[str, Any]) -> dict[str, Any]:
    if row.get("long"):
        raise SkipSample("Current length of row(9) is larger")
    if row.get("bad"):
        raise ValueError("no such image")
    return {"input_ids": [row["id"]] * row["tokens"], "lengths": [row["tokens"]]}


def pack(*rows: dict[str, Any]) -> dict[str, Any]:
    given = [{"tokens": 2, **row} for row in rows]
    return check_row(encode_pack([encode_row(row) for row in given], [row["tokens"] for row in given]))


def write_packs(directory: Path, count: int) -> Path:
    with ChunkWriter(directory, 2) as writer:
        for number in range(count):
            writer.write(pack({"id": number}))
    return directory


def arguments(directory: Path, make: Any = megatron, **changes: Any) -> Any:
    common = {
        "dataset": [str(directory)],
        "columns": None,
        "strict": False,
        "remove_unused_columns": True,
        "sharded_lazy_max_wait": 0.01,
        "max_length": 64,
        "num_train_epochs": 1,
    }
    return make(**{**common, **changes})


@pytest.fixture(scope="module")
def found(make_model: ModelMaker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("packing")
    model, rows = make_model("qwen3", 2), write_jsonl(folder / "rows.jsonl", 0, ROWS)
    program = Path(__file__).with_name("packing_program.py")
    variables = {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, str(program), model, rows, folder / "found.json"],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


def test_samples_are_the_lists_of_ms_swifts_packing_dataset(found: dict[str, Any]) -> None:
    groups = found["groups"]
    assert sorted(itertools.chain(*groups)) == list(range(ROWS))
    assert any(len(group) > 2 for group in groups)
    assert found["ours"]["samples"] == found["ordinary"]["samples"]
    assert found["encoded"]["samples"] == found["ordinary"]["samples"]
    assert [len(sample) for sample in found["ours"]["samples"]] == [len(group) for group in groups]


def test_batches_have_the_positions_and_borders_of_every_row(found: dict[str, Any]) -> None:
    assert found["ours"]["batches"] == found["ordinary"]["batches"]
    assert found["encoded"]["batches"] == found["ordinary"]["batches"]
    for number, batch in enumerate(found["ours"]["batches"]):
        lengths = [found["lengths"][row] for group in found["groups"][2 * number : 2 * number + 2] for row in group]
        assert batch["position_ids"] == [list(itertools.chain(*map(range, lengths)))]
        assert batch["cu_seqlens"] == [0, *itertools.accumulate(lengths)]
        assert len(batch["input_ids"][0]) == len(batch["labels"][0]) == sum(lengths)


def test_packs_made_while_training_are_lists_of_the_same_rows_with_their_borders(found: dict[str, Any]) -> None:
    groups = found["groups_at_run_time"]
    assert sorted(itertools.chain(*groups)) == list(range(ROWS))
    assert any(len(group) > 1 for group in groups)
    encoded = {
        row: sample
        for group, pack in zip(found["groups"], found["ordinary"]["samples"], strict=True)
        for row, sample in zip(group, pack, strict=True)
    }
    assert found["at_run_time"]["samples"] == [[encoded[row] for row in group] for group in groups]
    for number, batch in enumerate(found["at_run_time"]["batches"]):
        lengths = [found["lengths"][row] for group in groups[2 * number : 2 * number + 2] for row in group]
        assert batch["position_ids"] == [list(itertools.chain(*map(range, lengths)))]
        assert batch["cu_seqlens"] == [0, *itertools.accumulate(lengths)]


def test_a_pack_becomes_the_list_of_its_rows() -> None:
    found = rows.encode_packs(pack({"id": 3}, {"id": 5}), 4, encode)
    assert found == [{"input_ids": [3, 3], "lengths": [2]}, {"input_ids": [5, 5], "lengths": [2]}]


def test_a_row_is_what_it_was_without_packing() -> None:
    assert rows.encode_packs({"id": 3, "tokens": 1}, None, encode) == {"input_ids": [3], "lengths": [1]}


@pytest.mark.parametrize(
    ("row", "most", "error", "message"),
    [
        ({"id": 3, "tokens": 1}, 4, ValueError, "its rows are no packs, .* `lazyshard-producer run --pack TOKENS`"),
        (pack({"id": 3}), None, ValueError, "its rows are packs .*: give --packing true"),
        (pack({"id": 3}, {"id": 4, "long": True}), 4, SkipSample, r"row 1 of its pack: Current length of row\(9\)"),
        (pack({"id": 3, "bad": True}, {"id": 4}), 4, ValueError, "row 0 of its pack: ValueError: no such image"),
        (pack({"id": 3}, {"id": 4}), 3, ValueError, r"has 4 tokens, more than the 3 of .* \[2, 2\] as encoded"),
    ],
)
def test_what_cannot_be_trained_says_why(row: Any, most: int | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rows.encode_packs(row, most, encode)


@pytest.mark.parametrize("make", [megatron, hugging_face])
def test_a_stream_of_packs_needs_packing(make: Any, tmp_path: Path) -> None:
    directory = write_packs(tmp_path / "packs", 40)
    with pytest.raises(SettingsRefused, match=r"packs: its rows are packs .*: give --packing true") as refused:
        open_train_stream(arguments(directory, make), Template())
    assert refused.value.argument == "packing"


@pytest.mark.parametrize("make", [megatron, hugging_face])
def test_packing_needs_a_stream_of_packs(make: Any, tmp_path: Path) -> None:
    directory = produce(tmp_path / "rows", 40, 2)
    with pytest.raises(SettingsRefused, match=r"rows: its rows are no packs, .*or leave out --packing"):
        open_train_stream(arguments(directory, make, packing=True, packing_length=64), Template())


@pytest.mark.parametrize("make", [megatron, hugging_face])
def test_the_template_is_made_to_take_packs_as_packing_dataset_makes_it(make: Any, tmp_path: Path) -> None:
    template = Template()
    stream = open_train_stream(
        arguments(write_packs(tmp_path / "packs", 40), make, packing=True, packing_length=None), template
    )
    assert (template.packing, template.padding_free) == (True, True)
    assert "40 samples published" in repr(stream)


def test_a_stream_whose_first_chunks_are_gone_is_known_by_its_last_row(tmp_path: Path) -> None:
    directory = write_packs(tmp_path / "packs", 6)
    retire(directory, 1, 3)
    with pytest.raises(SettingsRefused, match="give --packing true"):
        rows.check_packs(arguments(directory), StreamReader(directory), 6)
