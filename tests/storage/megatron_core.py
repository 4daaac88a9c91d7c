"""Megatron Core's own writer and reader of IndexedDatasets, and what is in a pair of files by that reader."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lazyshard.format.indexed import DTYPES

Document = Sequence[Sequence[float]]
"""Sequences of tokens."""


class Content(NamedTuple):
    """What a data set holds: tokens and modes of each sequence, boundaries of documents."""

    dtype: str
    sequences: list[list[float]]
    boundaries: list[int]
    modes: list[int] | None


def module() -> Any:
    with warnings.catch_warnings():
        # Of Transformer Engine, which is not there.
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)


def build(prefix: Path, dtype: str, documents: Sequence[Document], modes: Sequence[int] | None = None) -> Content:
    """Writes a data set with Megatron Core; returns what it then has to hold."""
    import torch

    builder = module().IndexedDatasetBuilder(f"{prefix}.bin", getattr(np, dtype), modes is not None)
    left = iter(modes or [])
    # torch has no uint16 in some releases, and takes what a wider type holds.
    wide = torch.float64 if DTYPES[dtype].kind == "f" else torch.int64
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=wide), next(left, 0))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    sequences = [list(sequence) for document in documents for sequence in document]
    boundaries = np.cumsum([0, *map(len, documents)]).tolist()
    return Content(dtype, sequences, boundaries, None if modes is None else list(modes)[: len(sequences)])


def read(prefix: Path, *, multimodal: bool = False) -> Content:
    """Reads a data set with Megatron Core."""
    data = module().IndexedDataset(str(prefix), multimodal=multimodal, mmap=False)
    found = [data[number] for number in range(len(data))]
    sequences = [(one[0] if multimodal else one).tolist() for one in found]
    modes = [int(one[1]) for one in found] if multimodal else None
    return Content(np.dtype(data.index.dtype).name, sequences, data.document_indices.tolist(), modes)
