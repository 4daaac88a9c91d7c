"""Rows through ms-swift's template and through an encoded stream; in a process of its own, since ms-swift warns.

    python encoded_program.py FOUND.json STREAM ROWS.jsonl MODEL [NAME=VALUE ...]

The stream was made of these rows with `--encode swift --model MODEL`. The template is made as training makes its own,
by the arguments of `swift sft`. Found is {"same": whether each sample is, "kinds": of their values, "batches": whether
collated batches are, "calls": of template.encode while the stream was read, "refused": what is said of other settings}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from swift.arguments import SftArguments

from lazyshard import LazyShardedDataset
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.rows import EncodedRows, RowEncoder, encoders
from tests.swift.unit.test_encoded import same


def make_template(model: str, options: dict[str, str], folder: Path, **more: Any) -> Any:
    args = SftArguments(
        model=model,
        dataset=["unused"],
        output_dir=str(folder),
        add_version=False,
        check_model=False,
        **{name: int(value) if value.isdigit() else value for name, value in options.items()},
        **more,
    )
    template = args.get_template()
    template.set_mode("train")
    return template


def main(found: str, stream: str, rows: str, model: str, *options: str) -> int:
    given = dict(option.split("=", 1) for option in options)
    folder = Path(found).parent
    template = make_template(model, given, folder)
    raw = RowEncoder(template)
    lines = [json.loads(line) for line in Path(rows).read_text(encoding="utf-8").splitlines()]
    expected = [raw(line) for line in lines]
    calls = 0

    def counted(*rest: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        raise AssertionError("the template was asked")

    encode, template.encode = template.encode, counted
    (encoder,) = encoders([stream], template, raw)
    assert isinstance(encoder, EncodedRows)
    dataset = LazyShardedDataset(stream, encoder, dp_rank=0, dp_size=1)
    samples = [dataset[number] for number in range(len(lines))]
    template.encode = encode
    batches = []
    for padding_free in (False, True):
        template.padding_free = padding_free
        for megatron in (False, True):
            template.use_megatron = megatron
            mine, theirs = (template.data_collator([dict(one) for one in some[:4]]) for some in (samples, expected))
            batches.append(same(mine, theirs))
    refused = []
    for other in ({**given, "max_length": "99"}, {**given, "loss_scale": "all", "system": "be brief"}):
        try:
            encoders([stream], make_template(model, other, folder), raw)
        except SettingsRefused as error:
            refused.append(str(error))
    Path(found).write_text(
        json.dumps(
            {
                "same": [same(mine, theirs) for mine, theirs in zip(samples, expected, strict=True)],
                "kinds": {name: type(value).__name__ for name, value in expected[0].items()},
                "batches": batches,
                "calls": calls,
                "refused": refused,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
