"""The same groups of rows through ms-swift's `PackingDataset` and, as rows that are packs, raw ones through our
`RowEncoder` and encoded ones through our `EncodedRows`; and packed as they are read.

    python packing_program.py FOUND.json MODEL ROWS.jsonl

A process of its own, since importing ms-swift warns. Found is, for each way, the samples, and what ms-swift's collator
makes of micro batches of two of them, with the `cu_seqlens` that follow: {"lengths", "groups", "ordinary", "ours",
"encoded", "groups_at_run_time", "at_run_time"}.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lazyshard import ChunkWriter, LazyShardedSequences, Pack
from lazyshard.format.arrays import fill_row, pack_row
from lazyshard.format.batch import EncodedRow, encode_encoded_pack, encode_pack
from lazyshard.format.row import check_row, encode_row
from lazyshard.plan.splitting import pack_samples
from lazyshard_swift.encoding import pack as pack_values
from lazyshard_swift.rows import EncodedRows, RowEncoder

CAPACITY = 300


def make_template(model: str) -> Any:
    swift_model, swift_template = importlib.import_module("swift.model"), importlib.import_module("swift.template")
    processor = swift_model.get_processor(model, model_type="qwen3")
    template = swift_template.get_template(processor, max_length=CAPACITY, template_type="qwen2_5")
    template.set_mode("train")
    return template


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def collated(template: Any, samples: list[Any]) -> list[dict[str, Any]]:
    cu_seqlens = importlib.import_module("swift.utils.transformers_utils").get_packed_seq_params
    found = []
    for first in range(0, len(samples), 2):
        batch = template.data_collator(copy.deepcopy(samples[first : first + 2]))
        borders = plain(cu_seqlens(batch["position_ids"])["cu_seq_lens_q"])
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


def main() -> int:
    target, model, source = sys.argv[1:]
    swift_dataset, datasets = importlib.import_module("swift.dataset"), importlib.import_module("datasets")
    template = make_template(model)
    rows = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    lengths = [template.encode(row, return_length=True)["lengths"] for row in rows]
    table = datasets.Dataset.from_list([row | {"lengths": length} for row, length in zip(rows, lengths, strict=True)])
    encoded = swift_dataset.LazyLLMDataset(table, template.encode, strict=True)
    packing = swift_dataset.PackingDataset(template, encoded, packing_length=CAPACITY)
    ordinary = [packing[index] for index in range(len(packing))]
    encoder = RowEncoder(template, packing_length=CAPACITY)
    packs = [
        encode_pack([encode_row(rows[index]) for index in group], [sum(lengths[index]) for index in group])
        for group in packing.packed_idx
    ]
    ours = [encoder(check_row(pack)) for pack in packs]
    # Shorter packs, so that others come together, of a raw stream by the template itself.
    shorter = CAPACITY * 2 // 3
    with ChunkWriter(Path(target).with_name("raw"), 5) as writer:
        for row, length in zip(rows, lengths, strict=True):
            writer.write(row, tokens=sum(length))
    read = list(LazyShardedSequences(writer.directory, template.encode, form=Pack(shorter), dp_rank=0, dp_size=1))
    stored = [EncodedRows(CAPACITY)(row) for row in encoded_packs(template, rows, packing.packed_idx)]
    found = {
        "lengths": [sum(length) for length in lengths],
        "groups": packing.packed_idx,
        "ordinary": {"samples": ordinary, "batches": collated(template, ordinary)},
        "ours": {"samples": ours, "batches": collated(template, ours)},
        "encoded": {"samples": stored, "batches": collated(template, stored)},
        "groups_at_run_time": pack_samples([sum(length) for length in lengths], shorter),
        "at_run_time": {"samples": read, "batches": collated(template, read)},
    }
    Path(target).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
