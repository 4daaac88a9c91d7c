"""Runs over small streams: what all ranks of a part draw, step by step."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lazyshard import BlendedDataset, ChunkWriter, LazyShardedDataset, LazyShardedSequences, Pack, Pad, Split
from lazyshard.plan.sequences import pack_samples
from lazyshard.plan.shuffle import permutation
from lazyshard.stream import read_cursor
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S

State = dict[str, Any]


def open_rank(directory: Path, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return LazyShardedDataset(directory, **grouped({"dp_rank": rank, "dp_size": dp, "max_wait": DEADLINE_S, **options}))


def open_steps(directory: Path, *steps: Any, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return open_rank(directory, rank, dp, steps=steps, **options)


def open_ranks(directory: Path, dp: int, state: State | None = None, **options: Any) -> list[LazyShardedDataset]:
    ranks = []
    for rank in range(dp):
        dataset = open_rank(directory, rank, dp, **options)
        if state is not None:
            dataset.load_state_dict(state)
        ranks.append(dataset)
    return ranks


def chunks_before(stream: Path, consumer: str = "run") -> int:
    cursor = read_cursor(stream, consumer)
    assert cursor is not None
    return cursor.chunks_before


def read(ranks: list[LazyShardedDataset], draws: int | None = None) -> list[list[int]]:
    """Returns the ids of the next so many samples of each rank, None for what is left of the epoch."""
    return [[dataset[index]["id"] for index in dataset.rank_indices[:draws]] for dataset in ranks]


def part(dp: int, draws: int, **fields: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"dp": dp, "batch_size": 1, "draws": draws, "epoch": None, "trained": True, "skip": []}
    return known | {"first_step": 0, "draws_per_step": 0} | fields


class Stream(NamedTuple):
    """A stream: its letter, rows, and rows of a chunk."""

    letter: str
    samples: int
    per_chunk: int


def write(directory: Path, stream: Stream, *, end: bool = True, size: int = 0) -> Path:
    """Writes rows such as {"id": "a7"}."""
    writer = ChunkWriter(directory / stream.letter, stream.per_chunk)
    for number in range(writer.published_samples, stream.samples):
        writer.write({"id": f"{stream.letter}{number}"} | ({"blob": "x" * size} if size else {}))
    writer.close(end)
    return directory / stream.letter


def blend(
    directory: Path, weights: dict[str, float], rank: int = 0, dp: int = 1, state: State | None = None, **options: Any
) -> BlendedDataset:
    """Blends streams by their letters; options that a data set has are the data sets'."""
    own = {"encode_fn", "shuffle_window", "seed", "unit", "max_total_samples", "bad_rows", "consumer"}
    each = {"max_wait": DEADLINE_S} | {name: options.pop(name) for name in [*options] if name in own | {"max_wait"}}
    blended = BlendedDataset(
        [
            (LazyShardedDataset(directory / letter, dp_rank=rank, dp_size=dp, **grouped(each)), weight)
            for letter, weight in weights.items()
        ],
        **grouped(options),
    )
    if state is not None:
        blended.load_state_dict(state)
    return blended


def take(blended: BlendedDataset, positions: int, batch: int = 1) -> list[str]:
    indices = list(blended.rank_indices[:positions])
    assert len(indices) == positions
    rows = [row for at in range(0, positions, batch) for row in blended.__getitems__(indices[at : at + batch])]
    return [row["id"] for row in rows]


LENGTHS = [6, 4, 2, 7, 3, 5, 1, 9, 8, 2, 2, 4, 6]

forms = st.sampled_from([
    *(Pack(9), Pack(30), Pad(9, token=-1), Split(size=5), Split(size=7, bos=-1, eos=-2)),
    *(Split(size=30, eos=-2), Split(size=4, overlap=1)),
])  # fmt: skip

Written = list[int]  # A sequence as the ids of its rows (`Pack`), or its tokens


def tokens_of_row(number: int, length: int) -> list[int]:
    """Returns token ids that tell row and place."""
    return list(range(100 * number, 100 * number + length))


def write_rows(directory: Path, lengths: list[int], per_chunk: int = 3, *, end: bool = True) -> Path:
    """Adds rows with their tokens up to as many as there are lengths."""
    writer = ChunkWriter(directory, per_chunk)
    for number in range(writer.published_samples, len(lengths)):
        row = {"id": number, "input_ids": tokens_of_row(number, lengths[number])}
        writer.write(row, tokens=lengths[number])
    writer.close(end)
    return directory


def open_sequences(directory: Path, form: Any, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedSequences:
    return LazyShardedSequences(
        directory, form=form, dp_rank=rank, dp_size=dp, **{"window": 2, "max_wait": DEADLINE_S, **options}
    )


def written(sequence: Any) -> Written:
    """Returns what is to be compared of what was handed out."""
    if isinstance(sequence, list):
        return [row["id"] for row in sequence]
    found: Written = sequence["input_ids"].tolist()
    return found


def all_written(sequences: Iterable[Any]) -> list[Written]:
    return list(map(written, sequences))


def loader_of(sequences: Any, workers: int = 0, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    from tests.data import streams  # which imports this module

    return streams.loader_of(sequences, workers, batch_size, collate_fn=all_written, **options)


def expected(lengths: list[int], form: Any, rows: int, seed: int | None = None, epoch: int = 0) -> list[Written]:
    """Returns all sequences of an epoch in windows of so many rows; of a form without BOS and EOS of every sequence."""
    windows = []
    for first in range(0, len(lengths), rows):
        numbers = list(range(first, min(first + rows, len(lengths))))
        if seed is not None:
            numbers = [numbers[place] for place in permutation(len(numbers), seed, epoch, first // rows)]
        windows.append([number for number in numbers if lengths[number]])
    if isinstance(form, Pack):
        return [
            [window[place] for place in pack]
            for window in windows
            for pack in pack_samples([lengths[number] for number in window], form.size)
        ]
    rows_of = {number: tokens_of_row(number, length) for number, length in enumerate(lengths)}
    if isinstance(form, Pad):
        return [rows_of[n] + [form.token] * (form.size - lengths[n]) for n in itertools.chain(*windows)]
    assert isinstance(form, Split)
    front, behind = [[] if one is None else [one] for one in (form.bos, form.eos)]
    line = [token for n in itertools.chain(*windows) for token in front + rows_of[n] + behind]
    found = [line[at : at + form.size + form.overlap] for at in range(0, len(line), form.size)]
    # One that has nothing but the last token of the one before it is none.
    return [one for number, one in enumerate(found) if not number or len(one) > form.overlap]


def dealt(sequences: list[Written], dp: int, batch_size: int) -> list[list[list[Written]]]:
    micro = dp * batch_size
    starts = range(0, len(sequences) - len(sequences) % micro, micro)
    return [
        [sequences[start + rank * batch_size : start + (rank + 1) * batch_size] for start in starts]
        for rank in range(dp)
    ]
