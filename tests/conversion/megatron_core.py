"""IndexedDatasets written and read by Megatron Core, and by ourselves."""

import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from lazyshard.conversion.indexed import DTYPES, MAGIC, IndexedReader, bounds_of

Document = Sequence[Sequence[float]]  # Sequences of tokens


class Content(NamedTuple):
    """What a data set holds: tokens of each sequence, boundaries of documents."""

    dtype: str
    sequences: list[list[float]]
    boundaries: list[int]


def module() -> Any:
    with warnings.catch_warnings():
        # Of Transformer Engine, which is not there.
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)


def build(prefix: Path, dtype: str, documents: Sequence[Document], *, modes: bool = False) -> Content:
    """Writes a data set with Megatron Core; returns what it then has to hold."""
    import torch

    builder = module().IndexedDatasetBuilder(f"{prefix}.bin", getattr(np, dtype), modes)
    # torch has no uint16 in some releases, and takes what a wider type holds.
    wide = torch.float64 if DTYPES[dtype].kind == "f" else torch.int64
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=wide))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    sequences = [list(sequence) for document in documents for sequence in document]
    boundaries = np.cumsum([0, *map(len, documents)]).tolist()
    return Content(dtype, sequences, boundaries)


def read(prefix: Path) -> Content:
    data = module().IndexedDataset(str(prefix), mmap=False)
    sequences = [data[number].tolist() for number in range(len(data))]
    return Content(np.dtype(data.index.dtype).name, sequences, data.document_indices.tolist())


def content(prefix: Path) -> Content:
    """What our own reader finds."""
    reader = IndexedReader(f"{prefix}.idx")
    header = reader.header
    found = reader.sequences(0, header.sequences)
    pairs = zip(found.pointers.tolist(), found.lengths.tolist(), strict=True)
    sequences = [reader.tokens(begin, count).tolist() for begin, count in pairs]
    boundaries: list[int] = reader.boundaries(0, header.documents).tolist()
    reader.close()
    return Content(header.token.name, sequences, boundaries)


def write(prefix: Path, dtype: str, documents: Any, *, modes: bool = False) -> None:
    """Writes a data set without Megatron Core; what it has to be, byte for byte, is what `build` makes."""
    wide = np.float64 if dtype[0] == "f" else np.int64
    data = [np.array(sequence, wide).astype(DTYPES[dtype]) for document in documents for sequence in document]
    lengths = np.array([len(one) for one in data], "<i4")
    ends = np.cumsum(lengths, dtype="<i8") * DTYPES[dtype].itemsize
    pointers = np.concatenate([np.zeros(1, "<i8"), ends])[: len(data)]
    boundaries = np.cumsum([0, *map(len, documents)], dtype="<i8")
    head = struct.pack("<9sQBQQ", MAGIC, 1, list(DTYPES).index(dtype) + 1, len(data), len(boundaries))
    parts = (head, lengths.tobytes(), pointers.tobytes(), boundaries.tobytes(), bytes(modes * len(data)))
    Path(f"{prefix}.bin").write_bytes(b"".join(one.tobytes() for one in data))
    Path(f"{prefix}.idx").write_bytes(b"".join(parts))


@st.composite
def corpora(draw: st.DrawFn) -> tuple[str, list[list[list[float]]], bool]:
    """A type of tokens, documents with empty ones and empty sequences among them, whether there are modes."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    if dtype[0] == "f":
        token: Any = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.integers(-1000, 1000)
    else:
        token = st.integers(*bounds_of(dtype))
    documents = draw(st.lists(st.lists(st.lists(token, max_size=5), max_size=3), max_size=6))
    return dtype, documents, draw(st.booleans())
