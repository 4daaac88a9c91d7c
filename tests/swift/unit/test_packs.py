"""`Packs`: packs of raw rows, made during training: the same ones through any chain of starts, each row in one."""

import itertools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lazyshard import BlendedDataset, ChunkWriter, LazyShardedDataset, LazyShardedSequences
from lazyshard import Pack as PackForm
from lazyshard.errors import BadSample, WaitTimeout
from lazyshard.format.batch import encode_pack
from lazyshard.format.row import check_row, encode_row
from lazyshard.plan.sequences import pack_samples
from lazyshard.plan.shuffle import permutation
from lazyshard.stream import read_cursor
from lazyshard_swift import rows
from lazyshard_swift.checkpoints import Checkpoints, load_position
from lazyshard_swift.errors import SettingsRefused, code_of
from lazyshard_swift.stream import TrainStream
from tests.cli.commands import lazyshard
from tests.stream.streams import publish_rows, raised, sealed
from tests.swift.unit.runs import checkpoint, opened, tells
from tests.swift.unit.test_rescale import Shape, both, shaped
from tests.swift.unit.test_validation import of
from tests.swift.unit.trainers import Trained, train

PER_CHUNK = 3
TOKENS = 16
SEED = 42  # the data_seed of the arguments
Pack = list[int]


def length(number: int) -> int:
    return random.Random(number).randint(1, 12)


def write(directory: Path, total: int, *, end: bool = True, lengths: bool = True) -> Path:
    tokens = [length(number) if lengths else None for number in range(total)]
    return publish_rows(directory, PER_CHUNK, ({"id": number} for number in range(total)), tokens, end=end)


def packs_of(lengths: Sequence[int], tokens: int, rows_of_window: int = 0, epoch: int = 0) -> list[Pack]:
    """All packs of an epoch, window by window, shuffled; without windows all at once and in order."""
    total, found = len(lengths), []
    for number, first in enumerate(range(0, total, rows_of_window or total)):
        rows = list(range(first, min(first + (rows_of_window or total), total)))
        if rows_of_window:
            rows = [rows[place] for place in permutation(len(rows), SEED, epoch, number).tolist()]
        packs = pack_samples([lengths[row] for row in rows], tokens)
        found += [[rows[place] for place in pack] for pack in packs]
    return found


def dealt(found: list[Trained], shape: Shape, steps: list[int]) -> list[list[Pack]]:
    """The packs of each micro batch of all ranks in some steps, in order."""
    batches: list[list[Any]] = []
    for step in steps:
        for first in range(0, len(found[0].steps[step]), shape.batch):
            batches.append([pack for rank in found for pack in rank.steps[step][first : first + shape.batch]])
    return batches


@both
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("window", [0, 2, 5])
def test_each_row_is_in_one_pack_through_any_starts(kind: str, epochs: int, window: int, tmp_path: Path) -> None:
    total, output = 61, tmp_path / "out"
    stream = write(tmp_path / "stream", total)
    choose = random.Random(f"{kind} {epochs} {window}")
    options: dict[str, Any] = {"packing": True, "packing_length": TOKENS, "num_train_epochs": epochs}
    options |= {"sharded_lazy_shuffle_window": window, "sharded_lazy_consumer": "run", "output_dir": str(output)}
    lengths = [length(number) for number in range(total)]
    made = (packs_of(lengths, TOKENS, window * PER_CHUNK, epoch) for epoch in itertools.count())
    left, expected, trained = next(made), list[list[Pack]](), list[list[Pack]]()
    begin, position, ended = None, None, False
    shapes = [Shape(choose.randint(1, 3), choose.randint(1, 2), choose.randint(1, 2)) for _ in range(4)]
    for shape, steps in zip(shapes, (2, 3, 2, None), strict=True):
        begun = 0 if position is None else position.step
        args = shaped(kind, shape, begin, **options)
        _, found = train(kind, stream, args, shape.dp, kill=None if steps is None else begun + steps)
        batches = dealt(found, shape, sorted(found[0].steps))
        for _ in batches:
            if len(left) < shape.dp * shape.batch:
                left = next(made)
            expected.append(left[: shape.dp * shape.batch])
            left = left[shape.dp * shape.batch :]
        trained += batches
        ended = found[0].ended
        if ended:
            break
        begin = output / f"checkpoint-{begun + (steps or 0)}"
        position = load_position(begin)
        assert position is not None and position.consumed == sum(map(len, trained))
    assert ended
    assert trained == expected
    assert all(sum(map(length, pack)) <= TOKENS for batch in trained for pack in batch)
    first = packs_of(lengths, TOKENS, window * PER_CHUNK)
    if epochs == 1:
        drawn = [row for batch in trained for pack in batch for row in pack]
        assert len(drawn) == len(set(drawn))
        assert len(first) - sum(map(len, trained)) < max(shape.step for shape in shapes)


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments under which rows, encoded to their ids, are packed."""
    monkeypatch.setattr(rows, "encoder_of", lambda *_: lambda row: row["id"])
    return {"packing": True, "packing_length": TOKENS, "packing_strategy": "binpack", "train_iters": 100}


def read(stream: TrainStream) -> list[Pack]:
    """What one rank trains, up to the end that its gate finds."""
    return [stream[index] for index in itertools.takewhile(lambda i: stream.gate.allows(i, i + 1), itertools.count())]


def test_a_blend_makes_the_packs_of_the_library(packing: dict[str, Any], tmp_path: Path) -> None:
    streams = [write(tmp_path / "a", 40), write(tmp_path / "b", 25)]
    options = {**packing, "dataset": list(map(str, streams)), "interleave_prob": [0.75, 0.25]}
    found = read(opened(tmp_path, **options, stopping_strategy="all_exhausted", sharded_lazy_shuffle_window=4))
    blend = BlendedDataset(
        [(LazyShardedDataset(one, dp_rank=0, dp_size=1), weight) for one, weight in zip(streams, (3, 1), strict=True)],
        stopping="all_exhausted",
    )
    library = LazyShardedSequences(blend, form=PackForm(TOKENS), dp_rank=0, dp_size=1, window=4, seed=SEED)
    assert found == [[row["id"] for row in pack] for pack in library]
    assert {row for pack in found for row in pack} == set(range(40))


def test_the_cursor_releases_whole_windows_and_trace_knows_the_steps(packing: dict[str, Any], tmp_path: Path) -> None:
    directory = write(tmp_path / "stream", 61)
    stream = opened(directory, **packing, sharded_lazy_shuffle_window=4, sharded_lazy_consumer="run")
    packs = packs_of([length(number) for number in range(61)], TOKENS, 12)
    windows = [len(packs_of([length(number) for number in range(12)], TOKENS, 12))]
    checkpoints = Checkpoints(stream.plan, str(tmp_path / "out"))
    for trained, chunks in ((windows[0] - 1, 0), (windows[0] + 1, 4), (len(packs), 20)):
        assert stream.gate.allows(trained - 1, trained)
        folder = Path(checkpoint(checkpoints.folder(trained)))
        checkpoints.begin(trained, trained)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(trained))
        for older in (tmp_path / "out").glob("checkpoint-*"):
            if older != folder:
                shutil.rmtree(older)
        checkpoints.commit()
        cursor = read_cursor(directory, "run")
        assert cursor is not None and (cursor.chunks_before, cursor.state) == (chunks, None)
        done = lazyshard("trace", directory, "--state", folder, "--step", trained, "--json")
        assert sorted(json.loads(line)["sample"] for line in done.stdout.splitlines()) == sorted(packs[trained - 1])


def test_what_cannot_be_packed_is_refused(packing: dict[str, Any], tmp_path: Path) -> None:
    measured, unknown = write(tmp_path / "measured", 8), write(tmp_path / "unknown", 8, lengths=False)
    with ChunkWriter(tmp_path / "packs", 2) as packs:
        packs.write(check_row(encode_pack([encode_row({"id": 1})], [1])))
    for argument, directory, options in (
        ("packing", unknown, {}),
        ("packing", measured, {"dataset": [str(measured), str(packs.directory)], "interleave_prob": [1, 1]}),
        ("sharded_lazy_unit", measured, {"sharded_lazy_unit": "batch"}),
        ("sharded_lazy_skip", measured, {"sharded_lazy_skip": "samples 1:2"}),
        ("sharded_lazy_shuffle_distance", measured, {"sharded_lazy_shuffle_distance": 5}),
    ):
        more = {"stopping_strategy": "first_exhausted", **packing, **options}
        error = raised(SettingsRefused, opened, directory, **more)
        tells(error, argument=argument)
        assert code_of(error) == 2
    assert "--measure" in str(raised(SettingsRefused, opened, unknown, **packing))


def test_a_live_stream_without_rows_is_waited_for(packing: dict[str, Any], tmp_path: Path) -> None:
    assert code_of(raised(WaitTimeout, opened, write(tmp_path / "stream", 0, end=False), **packing)) == 75


def test_rows_that_are_longer_than_sealed_are_left_out_or_raised(packing: dict[str, Any], tmp_path: Path) -> None:
    stream = sealed(tmp_path / "stream", [8, 8, 8, TOKENS + 1])
    encode = {"id": 0, "length": 8}, {"id": 1, "length": 9}, {"id": 2, "length": 8}
    with mock.patch.object(rows, "encoder_of", lambda *_: lambda row: encode[row["id"]]):
        found = read(opened(stream, **packing, sharded_lazy_shuffle_window=0))
        assert [[row["id"] for row in pack] for pack in list[Any](found)] == [[0], [2]]
        strict = opened(stream, **packing, sharded_lazy_shuffle_window=0, sharded_lazy_on_bad_sample="raise")
        assert code_of(raised(BadSample, read, strict)) == 5


def test_the_train_split_alone_is_packed(packing: dict[str, Any], tmp_path: Path) -> None:
    ratio = {"split_dataset_ratio": 0.3, "sharded_lazy_shuffle_window": 4}
    stream = opened(write(tmp_path / "stream", 61), **packing, **ratio)
    assert {row for pack in read(stream) for row in pack} == set(of(0, 61))
    held_out = stream.validation
    assert held_out is not None
    assert [held_out[at] for at in range(len(held_out))] == of(1, 61)
