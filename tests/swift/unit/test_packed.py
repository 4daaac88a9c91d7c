"""Rows that are packs become what ms-swift's own `PackingDataset` yields; packs need --packing, and it needs them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import SkipSample
from lazyshard.format.batch import encode_pack
from lazyshard.format.row import check_row, encode_row
from lazyshard.stream.retire import retire
from lazyshard_swift import rows
from lazyshard_swift.errors import SettingsRefused
from tests.stream.streams import produce
from tests.swift.conftest import ModelMaker
from tests.swift.programs import found_by
from tests.swift.streams import write_jsonl
from tests.swift.unit.runs import Template, hugging_face, megatron, opened, refused

ROWS = 24


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


@pytest.fixture(scope="module")
def found(make_model: ModelMaker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("packing")
    model, rows = make_model("qwen3", 2), write_jsonl(folder / "rows.jsonl", 0, ROWS)
    program = Path(__file__).with_name("packing_program.py")
    result: dict[str, Any] = found_by(program, folder, model, rows)
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


@pytest.mark.parametrize(
    ("row", "most", "error", "message"),
    [
        ({"id": 3, "tokens": 1}, 4, ValueError, "--pack"),
        (pack({"id": 3}), None, ValueError, "--packing true"),
        (pack({"id": 3}, {"id": 4, "long": True}), 4, SkipSample, "row 1 of its pack"),
        (pack({"id": 3, "bad": True}, {"id": 4}), 4, ValueError, "row 0 of its pack"),
        (pack({"id": 3}, {"id": 4}), 3, ValueError, r"\[2, 2\]"),
    ],
)
def test_what_cannot_be_trained_says_why(row: Any, most: int | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rows.encode_packs(row, most, encode)


@pytest.mark.parametrize("make", [megatron, hugging_face])
def test_a_stream_of_packs_and_packing_need_each_other(make: Any, tmp_path: Path) -> None:
    packs, template, options = write_packs(tmp_path / "packs", 40), Template(), {"num_train_epochs": 1}
    with refused(SettingsRefused, argument="packing"):
        opened(packs, make, **options)
    with refused(SettingsRefused, argument="packing"):
        opened(produce(tmp_path / "rows", 40, 2), make, packing=True, packing_length=64, **options)
    # The template is made to take packs as PackingDataset makes it.
    opened(packs, make, template, packing=True, packing_length=None, **options)
    assert (template.packing, template.padding_free) == (True, True)


def test_a_stream_whose_first_chunks_are_gone_is_known_by_its_last_row(tmp_path: Path) -> None:
    directory = write_packs(tmp_path / "packs", 6)
    retire(directory, 1, 3)
    with refused(SettingsRefused, argument="packing"):
        rows.check_packs(megatron(dataset=[str(directory)]), StreamReader(directory), 6)
