"""Rows through ms-swift's template and through encoded streams; in a process of its own, since ms-swift warns.

    python encoded_program.py FOUND.json ROWS.jsonl MODEL WHOLE TEXTS SPLIT PADDED

The streams are those of `test_encode.py`: these rows encoded; and texts encoded, cut, or padded. Templates are made as
training makes its own, by the arguments of `swift sft`. Found is, of the rows: "same": whether each sample is, "kinds":
of their values, "batches": whether collated batches are, "calls": of template.encode while the stream was read,
"refused": what is said of other settings. And of the texts: "lengths": of the documents in two sequences, "borders": of
a batch of these, "sequences": whether batches that are not free of padding hold sequences as they are, "padded":
whether each batch of padded rows begins with that of the rows themselves. And "packs": see `of_packs`.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from swift.arguments import SftArguments
from swift.utils.transformers_utils import get_packed_seq_params

from lazyshard import LazyShardedDataset, StreamReader
from lazyshard.format.arrays import fill_row, pack_row
from lazyshard.format.batch import EncodedRow, encode_encoded_pack, encode_pack
from lazyshard.format.row import check_row, encode_row
from lazyshard_swift.encoding import pack as pack_values
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.rows import EncodedRows, RowEncoder, encoders
from tests.swift.programs import MAX_LENGTH, TEMPLATE
from tests.swift.unit.test_encoded import same

CAPACITY = 300


def make_template(model: str, folder: Path, **options: Any) -> Any:
    own = {"template": TEMPLATE, "max_length": MAX_LENGTH, "model_type": "qwen3", **options}
    fixed: dict[str, Any] = {"dataset": ["unused"], "add_version": False, "check_model": False}
    template = SftArguments(model=model, output_dir=str(folder), **fixed, **own).get_template()
    template.set_mode("train")
    return template


def of_rows(template: Any, lines: list[dict[str, Any]], stream: str, others: list[Any]) -> dict[str, Any]:
    raw = RowEncoder(template)
    expected = [raw(line) for line in lines]
    asked: list[Any] = []
    encode, template.encode = template.encode, asked.append
    (encoder,) = encoders([stream], template, raw)
    assert isinstance(encoder, EncodedRows)
    dataset = LazyShardedDataset(stream, encoder, dp_rank=0, dp_size=1)
    samples = [dataset[number] for number in range(len(lines))]
    template.encode = encode
    batches = []
    for template.padding_free, template.use_megatron in itertools.product((False, True), repeat=2):
        mine, theirs = (template.data_collator([dict(one) for one in some[:4]]) for some in (samples, expected))
        batches.append(same(mine, theirs))
    refused = []
    for other in others:
        try:
            encoders([stream], other, raw)
        except SettingsRefused as error:
            refused.append(str(error))
    return {
        "same": [same(mine, theirs) for mine, theirs in zip(samples, expected, strict=True)],
        "kinds": {name: type(value).__name__ for name, value in expected[0].items()},
        "batches": batches,
        "calls": len(asked),
        "refused": refused,
    }


def samples_of(stream: str, template: Any) -> list[Any]:
    (encoder,) = encoders([stream], template, template.encode)
    return [encoder(row) for row in StreamReader(stream)]


def begins(whole: Any, part: Any) -> bool:
    """Whether rows of tokens begin with these, and go on with nothing that counts."""
    width = part["input_ids"].shape[1]
    alike = all(torch.equal(whole[name][:, :width], part[name]) for name in ("input_ids", "labels"))
    return alike and bool((whole["labels"][:, width:] == -100).all())


def of_texts(template: Any, texts: str, split: str, padded: str) -> dict[str, Any]:
    rows, whole, filled = (samples_of(stream, template) for stream in (texts, split, padded))
    size = len(whole[0]["input_ids"])
    result: dict[str, Any] = {"sequences": [], "padded": []}
    for template.use_megatron in (False, True):
        batch = template.data_collator(copy.deepcopy(whole[:2]))
        result["sequences"].append(batch["input_ids"].tolist() == [one["input_ids"] for one in whole[:2]])
        positions = [list(range(size))] * 2 if template.use_megatron else [one["position_ids"] for one in whole[:2]]
        result["sequences"].append(batch["position_ids"].tolist() == positions)
        for first in range(0, len(rows) - 1, 2):
            long, short = (template.data_collator(copy.deepcopy(some[first : first + 2])) for some in (filled, rows))
            result["padded"].append(begins(long, short))
    template.padding_free = True
    # Padded rows are as long as they are, and the positions with them.
    batch = template.data_collator(copy.deepcopy(filled[:2]))
    result["padded"].append(batch["position_ids"].tolist() == [[*range(size), *range(size)]])
    lists = samples_of(split, template)
    batch = template.data_collator(copy.deepcopy(lists[:2]))
    borders = get_packed_seq_params(batch["position_ids"])["cu_seq_lens_q"].tolist()
    return result | {"lengths": [one["length"] for two in lists[:2] for one in two], "borders": borders}


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def collated(template: Any, samples: list[Any]) -> list[dict[str, Any]]:
    found = []
    for first in range(0, len(samples), 2):
        batch = template.data_collator(copy.deepcopy(samples[first : first + 2]))
        borders = plain(get_packed_seq_params(batch["position_ids"])["cu_seq_lens_q"])
        found.append({name: plain(value) for name, value in batch.items()} | {"cu_seqlens": borders})
    return found


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


def of_packs(template: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The same groups by ms-swift's `PackingDataset`, `RowEncoder` and `EncodedRows`: samples, and micro batches."""
    swift_dataset, datasets = importlib.import_module("swift.dataset"), importlib.import_module("datasets")
    lengths = [template.encode(row, return_length=True)["lengths"] for row in rows]
    table = datasets.Dataset.from_list([row | {"lengths": length} for row, length in zip(rows, lengths, strict=True)])
    encoded = swift_dataset.LazyLLMDataset(table, template.encode, strict=True)
    packing = swift_dataset.PackingDataset(template, encoded, packing_length=CAPACITY)
    encoder = RowEncoder(template, packing_length=CAPACITY)
    packs = [
        encode_pack([encode_row(rows[index]) for index in group], [sum(lengths[index]) for index in group])
        for group in packing.packed_idx
    ]
    ways = {
        "ordinary": [packing[index] for index in range(len(packing))],
        "ours": [encoder(check_row(pack)) for pack in packs],
        "encoded": [EncodedRows(CAPACITY)(row) for row in encoded_packs(template, rows, packing.packed_idx)],
    }
    found = {name: {"samples": some, "batches": collated(template, some)} for name, some in ways.items()}
    return found | {"lengths": [sum(length) for length in lengths], "groups": packing.packed_idx}


def main(found: str, rows: str, model: str, whole: str, *texts: str) -> int:
    folder = Path(found).parent
    lines = [json.loads(line) for line in Path(rows).read_text(encoding="utf-8").splitlines()]
    changes: list[dict[str, Any]] = [{"max_length": 99}, {"loss_scale": "all", "system": "be brief"}]
    others = [make_template(model, folder, **one) for one in changes]
    result = of_rows(make_template(model, folder), lines, whole, others)
    result |= of_texts(make_template(model, folder, loss_scale="all", use_chat_template=False), *texts)
    result["packs"] = of_packs(make_template(model, folder, max_length=CAPACITY), lines[:24])
    Path(found).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
