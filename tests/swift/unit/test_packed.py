"""Rows that are packs become what ms-swift's own `PackingDataset` yields; packs need --packing, and it needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter
from lazyshard.errors import SkipSample
from lazyshard.format.batch import encode_pack
from lazyshard.format.row import check_row, encode_row
from lazyshard_swift import rows
from lazyshard_swift.errors import SettingsRefused
from tests.stream.streams import produce
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
