"""The process of `scripts/bench_template`: passes through a DataLoader with one worker, which times its own work.

    python bench_template_process.py SETTINGS

SETTINGS is JSON: `model`, where to make the folder of a model with its tokenizer; `stream`; `samples` and `rounds`. The
last line that it prints is JSON: what each pass found, by order. A process of its own, since ms-swift says much when it
is imported.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from swift import get_processor, get_template
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer

from lazyshard import LazyShardedDataset
from lazyshard_swift.rows import RowEncoder
from scripts.benchmarks.bench_read import BATCH
from tests.swift.cpu import tiny_model

ORDERS: Final = ("in order", "windows of 4 chunks", "at random", "in order, --sharded_lazy true")

_VOCABULARY: Final = 16_000
"""Tokens: enough for four or five bytes of the rows in each, as usual tokenizers have it."""

_LEARNT_ROWS: Final = 1_000

_LONGEST: Final = 1 << 20
"""Tokens of a row; none has as many."""


class Meter:
    """Calls a function of a row and notes its seconds; an `encode_fn`, and a template to those who call `encode`.

    Attributes:
        clock: seconds in the function so far, by the clock.
        processor: the same by the processor, of all threads.
        ids: of the rows, in order; None for a row without.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.clock = self.processor = 0.0
        self.ids: list[int | None] = []

    def __call__(self, row: dict[str, Any], return_length: bool = True) -> Any:
        """Returns what the function returns."""
        self.ids.append(row.get("id"))
        processor, clock = time.process_time(), time.perf_counter()
        try:
            return self._function(row, return_length=return_length)
        finally:
            self.clock += time.perf_counter() - clock
            self.processor += time.process_time() - processor

    encode = __call__


class Metered(Dataset[Any]):
    """A data set whose batches are what it took to make them."""

    def __init__(self, dataset: LazyShardedDataset, encoder: Meter, template: Meter) -> None:
        self._dataset = dataset
        self._meters = encoder, template

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the same for one sample."""
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        """Returns seconds (clock and processor): `whole`, of it `encoder`, of it `template`; and what was made."""
        before = [(meter.clock, meter.processor) for meter in self._meters]
        processor, clock = time.process_time(), time.perf_counter()
        samples = self._dataset.__getitems__(indices)
        whole = time.perf_counter() - clock, time.process_time() - processor
        encoder, template = (
            (meter.clock - was[0], meter.processor - was[1]) for meter, was in zip(self._meters, before, strict=True)
        )
        tokens = [len(sample["input_ids"]) for sample in samples]
        ids = self._meters[0].ids[-len(samples) :]
        return {"whole": whole, "encoder": encoder, "template": template, "ids": ids, "tokens": tokens}


def make_model(model: Path, stream: Path) -> None:
    """Makes the folder of a model whose tokenizer has learnt the words of the rows."""
    tiny_model.main([str(model), "qwen3", "1"])
    with (stream / "chunk_00000.jsonl").open("rb") as file:
        rows = [json.loads(line) for line in itertools.islice(file, _LEARNT_ROWS)]
    texts = [message["content"] for row in rows for message in row["messages"]]
    AutoTokenizer.from_pretrained(model).train_new_from_iterator(texts, _VOCABULARY).save_pretrained(model)


def load_template(model: Path) -> Any:
    """Returns ms-swift's template, as it is in training."""
    template = get_template(get_processor(str(model), model_type="qwen3"), template_type="qwen2_5", max_length=_LONGEST)
    template.set_mode("train")
    return template


def _as_it_is(batch: Any) -> Any:
    return batch


def one_pass(order: str, template: Any, stream: Path, samples: int) -> dict[str, Any]:
    """Lets a worker make so many samples in an order.

    Returns:
        Seconds over the pass (clock and processor), `whole`, of it `encoder`, of it `template`; and `tokens` by id.

    Raises:
        RuntimeError: it made others than those that the indices draw, or bad ones.
    """
    inner = Meter(template.encode)
    encoder = Meter(RowEncoder(inner) if order == ORDERS[3] else inner)
    window = 4 if order == ORDERS[1] else 0
    dataset = LazyShardedDataset(
        stream, encoder, dp_rank=0, dp_size=1, batch_size=BATCH, shuffle_window=window, on_bad_sample="raise"
    )
    indices = list(dataset.rank_indices)
    if order == ORDERS[2]:
        random.Random(0).shuffle(indices)
    indices = indices[:samples]
    loader: DataLoader[Any] = DataLoader(
        Metered(dataset, encoder, inner), BATCH, sampler=indices, num_workers=1, collate_fn=_as_it_is
    )
    batches = list(loader)
    ids = [number for batch in batches for number in batch["ids"]]
    if ids != [dataset.draw(index).sample for index in indices]:
        raise RuntimeError(f"{order}: the rows that were encoded are not those that the indices draw")
    tokens = dict(zip(ids, (count for batch in batches for count in batch["tokens"]), strict=True))
    sums = {
        name: [sum(batch[name][clock] for batch in batches) for clock in (0, 1)]
        for name in ("whole", "encoder", "template")
    }
    return {**sums, "tokens": tokens}


def main() -> int:
    """Does what the first argument says."""
    settings = json.loads(sys.argv[1])
    model, stream = Path(settings["model"]), Path(settings["stream"])
    make_model(model, stream)
    template = load_template(model)
    found: dict[str, list[dict[str, Any]]] = {order: [] for order in ORDERS}
    tokens: dict[int, int] = {}
    for number in range(settings["rounds"] + 1):
        for order in ORDERS:
            one = one_pass(order, template, stream, settings["samples"])
            for sample, count in one.pop("tokens").items():
                if count < 1 or tokens.setdefault(sample, count) != count:
                    raise RuntimeError(f"{order}: sample {sample} has {count} tokens, expected {tokens.get(sample)}")
            if number:
                found[order].append(one)
    print(json.dumps({"passes": found, "tokens": sum(tokens.values()) / len(tokens)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
