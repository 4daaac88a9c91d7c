"""Runs over small streams: what all ranks of a part draw, step by step."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lazyshard import BlendedDataset, ChunkWriter, LazyShardedDataset, LazyShardedSequences, Pack, Pad, Split
from lazyshard.plan.sequences import pack_samples
from lazyshard.plan.shuffle import permutation
from lazyshard.stream.listing import retire
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S
from tests.stream.streams import cursor_of

State = dict[str, Any]


class Stateful(Protocol):
    def load_state_dict(self, state: Any, /) -> None: ...


S = TypeVar("S", bound=Stateful)


def continued(opened: S, state: Any) -> S:
    if state is not None:
        opened.load_state_dict(state)
    return opened


def open_rank(directory: Path, rank: int = 0, dp: int = 1, state: Any = None, **options: Any) -> LazyShardedDataset:
    given = grouped({"dp_rank": rank, "dp_size": dp, "max_wait": DEADLINE_S, **options})
    return continued(LazyShardedDataset(directory, **given), state)


def open_steps(directory: Path, *steps: Any, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return open_rank(directory, rank, dp, steps=steps, **options)


def open_ranks(directory: Path, dp: int, state: State | None = None, **options: Any) -> list[LazyShardedDataset]:
    return [open_rank(directory, rank, dp, state, **options) for rank in range(dp)]


def chunks_before(stream: Path, consumer: str = "run") -> int:
    return cursor_of(stream, consumer).chunks_before


def free(stream: Path) -> int:
    """Deletes all chunks that the cursor frees, as a producer does; returns how many are gone."""
    done = chunks_before(stream)
    retire(stream, done, 50)
    return done


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
    writer = ChunkWriter(directory / stream.letter, stream.per_chunk)
    for number in range(writer.published_samples, stream.samples):
        writer.write({"id": f"{stream.letter}{number}"} | ({"blob": "x" * size} if size else {}))
    writer.close(end)
    return directory / stream.letter


def blend(
    directory: Path, weights: dict[str, float], rank: int = 0, dp: int = 1, state: State | None = None, **options: Any
) -> BlendedDataset:
    """Blends streams by their letters; options that a data set has are the data sets'."""
    own = {"encode_fn", "shuffle_window", "seed", "unit", "max_total_samples", "bad_rows", "consumer", "max_wait"}
    each = {name: options.pop(name) for name in [*options] if name in own}
    members = [(open_rank(directory / letter, rank, dp, **each), weight) for letter, weight in weights.items()]
    return continued(BlendedDataset(members, **grouped(options)), state)


def take(blended: BlendedDataset, positions: int, batch: int = 1) -> list[str]:
    indices = list(blended.rank_indices[:positions])
    assert len(indices) == positions
    rows = [row for at in range(0, positions, batch) for row in blended.__getitems__(indices[at : at + batch])]
    return [row["id"] for row in rows]


LENGTHS = [6, 4, 2, 7, 3, 5, 1, 9, 8, 2, 2, 4, 6]

STAGE = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 3))  # Ranks, sequences of a micro batch, steps
forms = st.sampled_from([
    *(Pack(9), Pack(30), Pad(9, token=-1), Split(size=5), Split(size=7, bos=-1, eos=-2)),
    *(Split(size=30, eos=-2), Split(size=4, overlap=1)),
])  # fmt: skip

Written = list[int]  # A sequence as the ids of its rows (`Pack`), or its tokens


def tokens_of_row(number: int, length: int) -> list[int]:
    return list(range(100 * number, 100 * number + length))


def write_rows(directory: Path, lengths: list[int], *, end: bool = True) -> Path:
    """Adds rows with their tokens up to as many as there are lengths, in chunks of three."""
    writer = ChunkWriter(directory, 3)
    for number in range(writer.published_samples, len(lengths)):
        row = {"id": number, "input_ids": tokens_of_row(number, lengths[number])}
        writer.write(row, tokens=lengths[number])
    writer.close(end)
    return directory


def open_sequences(
    source: Any, form: Any, rank: int = 0, dp: int = 1, state: Any = None, **options: Any
) -> LazyShardedSequences:
    given: dict[str, Any] = {"form": form, "dp_rank": rank, "dp_size": dp, "window": 2, "max_wait": DEADLINE_S}
    return continued(LazyShardedSequences(source, **given | options), state)


def written(sequence: Any) -> Written:
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
        packed = ((window, pack_samples([lengths[number] for number in window], form.size)) for window in windows)
        return [[window[place] for place in pack] for window, packs in packed for pack in packs]
    rows_of = {number: tokens_of_row(number, length) for number, length in enumerate(lengths)}
    if isinstance(form, Pad):
        return [rows_of[n] + [form.token] * (form.size - lengths[n]) for n in itertools.chain(*windows)]
    assert isinstance(form, Split)
    front, behind = [[] if one is None else [one] for one in (form.bos, form.eos)]
    line = [token for n in itertools.chain(*windows) for token in front + rows_of[n] + behind]
    found = [line[at : at + form.size + form.overlap] for at in range(0, len(line), form.size)]
    # One that has nothing but the last token of the one before it is none.
    return [one for number, one in enumerate(found) if not number or len(one) > form.overlap]


def check_any_ranks_go_on(opened: Any, left: list[Written], stages: list[tuple[int, int, int]]) -> None:
    """Stages of so many ranks, sequences of a micro batch, and micro batches each draw what is left in turn, and one
    rank the rest. `opened` takes rank, ranks and state."""
    state, consumed = None, 0
    for dp, size, steps in [*stages, (1, 1, len(left))]:
        runs = [opened(rank, dp, state, batch_size=size) for rank in range(dp)]
        assert [run.consumed for run in runs] == [consumed] * dp
        steps = min(steps, len(left) // (dp * size))
        for run, micro_batches in zip(runs, dealt(left, dp, size), strict=True):
            assert all_written(itertools.islice(run, steps * size)) == list(itertools.chain(*micro_batches[:steps]))
        consumed += steps * dp * size
        left = left[steps * dp * size :]
        states = [run.state_dict(consumed) for run in runs]
        assert states == [states[0]] * dp
        if steps:
            assert [run.state_dict() for run in runs] == states
        state = json.loads(json.dumps(states[0]))


def dealt(sequences: list[Written], dp: int, batch_size: int) -> list[list[list[Written]]]:
    micro = dp * batch_size
    starts = range(0, len(sequences) - len(sequences) % micro, micro)
    firsts = [[start + rank * batch_size for start in starts] for rank in range(dp)]
    return [[sequences[first : first + batch_size] for first in own] for own in firsts]
