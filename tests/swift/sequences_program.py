"""What ms-swift's collator makes of sequences and padded rows; in a process of its own, since ms-swift warns.

    python sequences_program.py FOUND.json ENCODED SPLIT PADDED MODEL [NAME=VALUE ...]

Three streams of the same rows: encoded, and cut or padded besides; options as of `encoded_program`. Found is
{"apart": whether the samples of sequences are the lists of documents that the rows give, "borders": of a batch of two
of them, "lengths": of the documents in these, "whole": whether batches that are not free of padding hold sequences as
they are, "padded": whether each batch of padded rows begins with that of the rows themselves}.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from swift.utils.transformers_utils import get_packed_seq_params

from lazyshard import StreamReader
from lazyshard_swift.rows import encoders
from tests.swift.encoded_program import make_template


def documents(samples: list[dict[str, Any]], size: int) -> list[list[dict[str, Any]]]:
    """The documents of each sequence, as samples of their own."""
    found: list[list[dict[str, Any]]] = [[]]
    for sample in samples:
        tokens, labels = sample["input_ids"], sample["labels"]
        while tokens:
            room = size - sum(one["length"] for one in found[-1])
            if not room:
                found.append([])
                room = size
            # As ms-swift has it of any sample: its first token is nobody's label.
            piece = {"input_ids": tokens[:room], "labels": [-100, *labels[1:room]], "length": len(tokens[:room])}
            found[-1].append(piece)
            tokens, labels = tokens[room:], labels[room:]
    return found


def samples_of(stream: str, template: Any) -> list[Any]:
    (encoder,) = encoders([stream], template, template.encode)
    return [encoder(row) for row in StreamReader(stream)]


def begins(whole: Any, part: Any) -> bool:
    """Whether rows of tokens begin with these, and go on with nothing that counts."""
    width = part["input_ids"].shape[1]
    alike = all(torch.equal(whole[name][:, :width], part[name]) for name in ("input_ids", "labels"))
    return alike and bool((whole["labels"][:, width:] == -100).all())


def main(found: str, encoded: str, split: str, padded: str, model: str, *options: str) -> int:
    given = dict(option.split("=", 1) for option in options)
    template = make_template(model, given, Path(found).parent, use_chat_template=False)
    rows, whole, filled = (samples_of(stream, template) for stream in (encoded, split, padded))
    size = len(whole[0]["input_ids"])
    expected = documents(rows, size)
    result: dict[str, Any] = {
        "whole": [],
        "padded": [],
        "lengths": [one["length"] for two in expected[:2] for one in two],
    }
    for megatron in (False, True):
        template.use_megatron = megatron
        batch = template.data_collator(copy.deepcopy(whole[:2]))
        result["whole"].append(batch["input_ids"].tolist() == [one["input_ids"] for one in whole[:2]])
        positions = [list(range(size))] * 2 if megatron else [one["position_ids"] for one in whole[:2]]
        result["whole"].append(batch["position_ids"].tolist() == positions)
        for first in range(0, len(rows) - 1, 2):
            long, short = (template.data_collator(copy.deepcopy(some[first : first + 2])) for some in (filled, rows))
            result["padded"].append(begins(long, short))
    template.padding_free = True
    # Padded rows are as long as they are, and the positions with them.
    batch = template.data_collator(copy.deepcopy(filled[:2]))
    result["padded"].append(batch["position_ids"].tolist() == [[*range(size), *range(size)]])
    lists = samples_of(split, template)
    for one in itertools.chain.from_iterable(lists):
        assert one.pop("lengths") == [one["length"]]
    result["apart"] = lists == expected
    batch = template.data_collator(copy.deepcopy(lists[:2]))
    result["borders"] = get_packed_seq_params(batch["position_ids"])["cu_seq_lens_q"].tolist()
    Path(found).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
