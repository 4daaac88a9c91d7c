"""Rows through ms-swift's template and through encoded streams; in a process of its own, since ms-swift warns.

    python encoded_program.py ROWS.jsonl MODEL WHOLE TEXTS SPLIT PADDED

The streams are those of `test_encode.py`: these rows encoded; and texts encoded, cut, or padded. Templates are made as
training makes its own, by the arguments of `swift sft`. An assertion that does not hold ends it.
"""

import copy
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from swift.arguments import SftArguments
from swift.utils.transformers_utils import get_packed_seq_params

from lazyshard import LazyShardedDataset, StreamReader
from lazyshard.format.arrays import fill_row, pack_row
from lazyshard.format.batch import EncodedRow, encode_encoded_pack, encode_pack
from lazyshard.format.row import check_row, encode_row
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.rows import EncodedRows, RowEncoder, encoders
from lazyshard_swift.rows import pack as pack_values
from tests.data.test_encode import same
from tests.swift.programs import MAX_LENGTH, TEMPLATE

CAPACITY = 300


def make_template(model: str, **options: Any) -> Any:
    own = {"template": TEMPLATE, "max_length": MAX_LENGTH, "model_type": "qwen3", **options}
    fixed: dict[str, Any] = {"dataset": ["unused"], "add_version": False, "check_model": False}
    template = SftArguments(model=model, output_dir="output", **fixed, **own).get_template()
    template.set_mode("train")
    return template


def check_rows(template: Any, lines: list[dict[str, Any]], stream: str, others: dict[str, Any]) -> None:
    raw = RowEncoder(template)
    expected = [raw(line) for line in lines]
    kinds = {name: type(value).__name__ for name, value in expected[0].items()}
    assert kinds == {"input_ids": "list", "labels": "list", "length": "int", "lengths": "list"}
    asked: list[Any] = []
    encode, template.encode = template.encode, asked.append
    (encoder,) = encoders([stream], template, raw)
    assert isinstance(encoder, EncodedRows)
    dataset = LazyShardedDataset(stream, encoder, dp_rank=0, dp_size=1)
    samples = [dataset[number] for number in range(len(lines))]
    template.encode = encode
    assert asked == [], "asked while the stream was read"
    assert [same(mine, theirs) for mine, theirs in zip(samples, expected, strict=True)] == [True] * len(lines)
    for template.padding_free, template.use_megatron in itertools.product((False, True), repeat=2):
        mine, theirs = (template.data_collator([dict(one) for one in some[:4]]) for some in (samples, expected))
        assert same(mine, theirs)
    for words, other in others.items():
        with pytest.raises(SettingsRefused, match=words):
            encoders([stream], other, raw)


def samples_of(stream: str, template: Any) -> list[Any]:
    (encoder,) = encoders([stream], template, template.encode)
    return [encoder(row) for row in StreamReader(stream)]


def check_texts(template: Any, texts: str, split: str, padded: str) -> None:
    rows, whole, filled = (samples_of(stream, template) for stream in (texts, split, padded))
    size = len(whole[0]["input_ids"])
    for template.use_megatron in (False, True):
        # Batches that are not free of padding hold sequences as they are.
        batch = template.data_collator(copy.deepcopy(whole[:2]))
        assert batch["input_ids"].tolist() == [one["input_ids"] for one in whole[:2]]
        positions = [list(range(size))] * 2 if template.use_megatron else [one["position_ids"] for one in whole[:2]]
        assert batch["position_ids"].tolist() == positions
        for first in range(0, len(rows) - 1, 2):
            # Those of padded rows begin with those of the rows themselves, and continue with nothing that counts.
            long, short = (template.data_collator(copy.deepcopy(some[first : first + 2])) for some in (filled, rows))
            width = short["input_ids"].shape[1]
            assert all(torch.equal(long[name][:, :width], short[name]) for name in ("input_ids", "labels"))
            assert (long["labels"][:, width:] == -100).all()
    template.padding_free = True
    # Padded rows are as long as they are, and the positions with them.
    batch = template.data_collator(copy.deepcopy(filled[:2]))
    assert batch["position_ids"].tolist() == [[*range(size), *range(size)]]
    # Of two sequences of several documents each, none of which attends to another.
    lists = samples_of(split, template)[:2]
    lengths = [one["length"] for two in lists for one in two]
    batch = template.data_collator(copy.deepcopy(lists))
    borders = get_packed_seq_params(batch["position_ids"])["cu_seq_lens_q"].tolist()
    assert borders == [0, *itertools.accumulate(lengths)]
    assert len(lengths) > 4


def encoded_packs(template: Any, rows: list[Any], groups: list[list[int]]) -> list[dict[str, Any]]:
    """Returns the rows of a stream of encoded packs, as readers give them."""
    encode, found = RowEncoder(template), []
    for group in groups:
        packed = [pack_row(pack_values(encode(rows[index]))) for index in group]
        samples = [EncodedRow(one.line, one.arrays) for one in packed]
        made = encode_encoded_pack(samples, [encode(rows[index])["length"] for index in group])
        row = check_row(made.line)
        fill_row(row, np.frombuffer(made.arrays, np.uint8))
        found.append(row)
    return found


def check_packs(template: Any, rows: list[dict[str, Any]]) -> None:
    """The same groups by ms-swift's `PackingDataset`, `RowEncoder` and `EncodedRows`: samples, and micro batches."""
    swift_dataset, datasets = importlib.import_module("swift.dataset"), importlib.import_module("datasets")
    told = [template.encode(row, return_length=True)["lengths"] for row in rows]
    table = datasets.Dataset.from_list([row | {"lengths": length} for row, length in zip(rows, told, strict=True)])
    encoded = swift_dataset.LazyLLMDataset(table, template.encode, strict=True)
    packing = swift_dataset.PackingDataset(template, encoded, packing_length=CAPACITY)
    groups, lengths = packing.packed_idx, list(map(sum, told))
    assert sorted(itertools.chain(*groups)) == list(range(len(rows)))
    assert any(len(group) > 2 for group in groups)
    ordinary = [packing[index] for index in range(len(packing))]
    lines = [encode_pack([encode_row(rows[i]) for i in group], [lengths[i] for i in group]) for group in groups]
    ours = [RowEncoder(template, packing_length=CAPACITY)(check_row(line)) for line in lines]
    assert same(ours, ordinary)
    assert same([EncodedRows(CAPACITY)(row) for row in encoded_packs(template, rows, groups)], ordinary)
    for first in range(0, len(groups), 2):
        mine, theirs = (template.data_collator(copy.deepcopy(some[first : first + 2])) for some in (ours, ordinary))
        assert same(mine, theirs)
        # Positions and borders of every row.
        sizes = [lengths[row] for group in groups[first : first + 2] for row in group]
        assert mine["position_ids"].tolist() == [list(itertools.chain(*map(range, sizes)))]
        borders = get_packed_seq_params(mine["position_ids"])["cu_seq_lens_q"]
        assert borders.tolist() == [0, *itertools.accumulate(sizes)]
        assert len(mine["input_ids"][0]) == len(mine["labels"][0]) == sum(sizes)


def main(rows: str, model: str, whole: str, *texts: str) -> None:
    lines = [json.loads(line) for line in Path(rows).read_text(encoding="utf-8").splitlines()]
    others = {
        "max_length is 512 there and 99 here": make_template(model, max_length=99),
        "loss_scale is 'default' there and 'all' here": make_template(model, loss_scale="all"),
        "system is": make_template(model, system="be brief"),
    }
    check_rows(make_template(model), lines, whole, others)
    check_texts(make_template(model, loss_scale="all", use_chat_template=False), *texts)
    check_packs(make_template(model, max_length=CAPACITY), lines[:24])


if __name__ == "__main__":
    main(*sys.argv[1:])
