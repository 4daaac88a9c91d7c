"""What is mistaken about `LazyShardedSequences` is told as soon as it can be seen, with the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import (
    BlendedDataset,
    ChunkWriter,
    LazyShardedDataset,
    LazyShardedSequences,
    LazyShardedStream,
    Pack,
    Pad,
    Split,
)
from lazyshard.errors import BadSample, LengthsMissing, StateInvalid, StreamMismatch
from lazyshard.format.batch import encode_pack
from lazyshard.stream.retire import retire
from tests.data.sequence_runs import all_written, expected, loader_of, open_sequences, write_rows, written
from tests.data.test_sequences import LENGTHS
from tests.data.workers import DEADLINE_S
from tests.stream.lengths import put_lengths
from tests.stream.streams import produce

# Which torchdata still calls, and torch has given up.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

EVERY_FORM = [Pack(10), Split(10), Pad(10)]


def write_packs(directory: Path, *, end: bool = True) -> Path:
    """Adds a pack of two rows."""
    with ChunkWriter(directory, 1) as writer:
        writer.write(encode_pack([b'{"input_ids":[1]}\n', b'{"input_ids":[2,3]}\n'], [1, 2]), tokens=3)
        if not end:
            writer.close(end=False)
    return directory


@pytest.mark.parametrize("form", EVERY_FORM)
def test_a_stream_of_packs_is_refused(tmp_path: Path, form: Any) -> None:
    directory = write_packs(tmp_path / "s")
    with pytest.raises(StreamMismatch, match=r"its rows are packs already .*`LazyShardedDataset\('.*/s', encode\)`"):
        open_sequences(directory, form)


def test_a_stream_of_encoded_packs_is_refused(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "s", 1, arrays=True, encoding={"by": "hand"}) as writer:
        writer.write({"pack": [{"input_ids": np.arange(3)}], "lengths": [3]}, tokens=3)
    with pytest.raises(StreamMismatch, match="its rows are packs already"):
        open_sequences(tmp_path / "s", Pack(10))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_live_stream_of_packs_is_refused_at_its_first_chunk(tmp_path: Path, workers: int) -> None:
    ChunkWriter(tmp_path / "s", 1).close(end=False)
    sequences = open_sequences(tmp_path / "s", Pack(10), window=9)
    # Nine chunks make a window, but the first one is enough.
    write_packs(tmp_path / "s", end=False)
    with pytest.raises(StreamMismatch, match="its rows are packs already") as refused:
        next(iter(loader_of(sequences, workers)))
    assert refused.value.actual == "packs"


def test_a_first_row_that_is_damaged_says_nothing_yet(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    path = directory / "chunk_00000.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"id":0,', b'"id":7,'))
    assert written(next(iter(open_sequences(directory, Pack(10))))) == [1]


def test_missing_lengths_are_told_at_once_with_every_way_to_have_them(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4)
    with pytest.raises(LengthsMissing) as missing:
        LazyShardedSequences(directory, form=Pack(10), dp_rank=0, dp_size=1)
    for way in ("--measure TOKENIZER", "--encode", "ChunkWriter.write(row, tokens=N)"):
        assert way in str(missing.value)
    assert f"`lazyshard-producer run --source {directory} " in str(missing.value)
    # Only the first chunk is looked at.
    put_lengths(directory, [3, 4])
    sequences = open_sequences(directory, Pack(10), window=2)
    put_lengths(directory, [5, 5], first=1)
    assert list(map(written, sequences)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("form", [Pack(5), Pad(5)])
def test_a_row_of_the_first_chunk_that_is_too_long_is_told_at_once(tmp_path: Path, form: Any) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    says = r"sample 0\): ValueError: it has 6 tokens, a sequence at most 5: take longer .*too_long='drop'"
    with pytest.raises(BadSample, match=says) as bad:
        open_sequences(directory, form)
    assert bad.value.sample == 0
    open_sequences(directory, form, too_long="drop")
    open_sequences(directory, Split(5))


def test_where_the_first_chunks_are_deleted_the_first_that_is_left_is_looked_at(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    run = open_sequences(directory, Pack(10))
    state = run.state_dict(3)
    retire(directory, 2, 5)
    again = open_sequences(directory, Pack(10))
    again.load_state_dict(state)
    assert list(map(written, again)) == expected(LENGTHS, Pack(10), 6)[3:]
    with pytest.raises(BadSample, match="sample 7"):
        open_sequences(directory, Pack(5))


def test_the_first_chunk_stays_open_in_no_process_that_does_not_draw(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    before = set(Path("/proc/self/fd").iterdir())
    sequences = open_sequences(directory, Pack(10))
    opened = [path for path in set(Path("/proc/self/fd").iterdir()) - before if path.exists()]
    assert [path for path in opened if str(directory) in str(path.readlink())] == []
    assert sequences.stats().chunks_opened == 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Pack("10"), "Pack: size is a number of tokens, an int, got '10'"),  # type: ignore[arg-type]
        (lambda: Pack(8.5), "Pack: size is a number of tokens, an int, got 8.5"),  # type: ignore[arg-type]
        (lambda: Pad(None), "Pad: size is a number of tokens, an int, got None"),  # type: ignore[arg-type]
        (lambda: Pad(8, "<pad>"), "Pad: token is a token id, an int, got '<pad>'"),  # type: ignore[arg-type]
        (lambda: Split("10"), "Split: size is a number of tokens, an int, got '10'"),  # type: ignore[arg-type]
        (lambda: Split(10, eos="."), "Split: eos is a token id, an int, got '.'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_number_of_a_form_is_named(make: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(says)}$"):
        make()


def test_a_form_takes_its_size_by_position_and_numbers_of_numpy() -> None:
    assert Split(10) == Split(size=10)
    ten: Any = np.int64(10)
    assert Split(ten, eos=ten) == Split(10, eos=10)
    assert repr(Pad(ten)) == "Pad(size=10, token=0)"
    with pytest.raises(TypeError, match="positional argument"):
        Split(10, 1)  # type: ignore[call-arg]


def test_a_loader_of_another_batch_size_draws_in_another_order_and_loses_nothing(tmp_path: Path) -> None:
    sequences = open_sequences(write_rows(tmp_path / "s", [10] * 12), Pack(10), batch_size=2)
    assert list(loader_of(sequences, 2, 4)) == [[[0], [1], [4], [5]], [[2], [3], [6], [7]], [[8], [9]], [[10], [11]]]


def test_sequences_have_no_index(tmp_path: Path) -> None:
    sequences = open_sequences(write_rows(tmp_path / "s", LENGTHS), Pack(10))
    with pytest.raises(TypeError, match=r"is an iterable.*`for sequence in sequences`.*those of LazyShardedDataset"):
        sequences[0]


def test_states_of_something_else_are_named(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    run = open_sequences(directory, Pack(10))

    def dataset() -> LazyShardedDataset:
        return LazyShardedDataset(directory, dp_rank=0, dp_size=1)

    def loader(workers: int) -> Any:
        waiting: dict[str, Any] = {"timeout": DEADLINE_S, "multiprocessing_context": "fork"} if workers else {}
        return StatefulDataLoader(
            open_sequences(directory, Pack(10)), batch_size=1, num_workers=workers, collate_fn=all_written, **waiting
        )

    with pytest.raises(StateInvalid, match="it is that of LazyShardedSequences"):
        dataset().load_state_dict(run.state_dict(2))
    state = dataset().state_dict(2)
    loaders = [loader(workers) for workers in (0, 1)]
    for one in loaders:
        next(iter(one))
    for found, says in [
        (state, "it is the state of a LazyShardedDataset or LazyShardedStream, and goes on there alone: it counts"),
        (LazyShardedStream(dataset()).state_dict(2), "it is the state of a LazyShardedDataset or LazyShardedStream"),
        (state | {"handed_out": 1}, "it is the state of a LazyShardedStream or LazyShardedIterable, and"),
        (state | {"worker": 0, "workers": 1}, "it is the state of one DataLoader worker of a LazyShardedStream or"),
        (BlendedDataset([(dataset(), 1.0)]).state_dict(2), "it is the state of a blend: give it to a `BlendedDataset`"),
        *((one.state_dict(), "it is the state of a StatefulDataLoader: give it to `loader.load") for one in loaders),
        ({}, "it is empty: give what `state_dict` returned"),
        (torch.nn.Linear(1, 1).state_dict(), "it holds no state of a run but 'weight' and 'bias': give what"),
        ({"step": 3, "data": run.state_dict(2)}, r"'step' and 'data': give `checkpoint\['data'\]`, which looks like"),
        ("last.pt", "it is a path or a text: load the checkpoint"),
        (3, "expected an object, found 3"),
    ]:
        with pytest.raises(StateInvalid, match="the state to go on from: .*" + says):
            run.load_state_dict(found)
    assert run.consumed == 0
