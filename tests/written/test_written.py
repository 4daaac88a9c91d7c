"""Files that earlier code has written: this code reads them, and goes on from them, as that code would have.

That of commit 5c9efa2 has written `by_5c9efa2`: streams of both formats, cursors, states of runs, and producers that
were stopped midway. `expected.json` holds what that code drew after each state, and published where it was not stopped;
`files.json` a digest of each file. Tests that write do so in a copy. The program that wrote them runs on that commit
alone: `git show da30c1fe:tests/written/by_5c9efa2/write.py`.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import xxhash

import lazyshard
from lazyshard import LazyShardedDataset, LazyShardedSequences, LazyShardedStream, Pack, StreamReader, streaming_shard
from lazyshard.cli.main import main
from lazyshard.errors import ChunkRetired
from lazyshard.stream import list_consumers, read_cursor, read_reading, read_retired
from lazyshard_producer.cli import main as produce
from lazyshard_swift.checkpoints import load_position
from tests.data.options import grouped

WRITTEN: Final = Path(__file__).parent / "by_5c9efa2"
STREAMS: Final = WRITTEN / "streams"
RETAINED: Final = WRITTEN / "producers" / "retained" / "out"
RETIRED: Final = 12  # Samples of it that were deleted, in chunks 0 to 2: its consumer has trained 14
EXPECTED: Final = json.loads((WRITTEN / "expected.json").read_bytes())
FILES: Final = json.loads((WRITTEN / "files.json").read_bytes())

Row = dict[str, Any]
ROWS: Final[list[Row]] = [{"id": number, "text": f"row {number} ü\u2028"} for number in range(1100)]
TOKENS: Final[list[Row]] = [{"id": n, "input_ids": [100 * n + i for i in range(n * 7 % 9 + 1)]} for n in range(24)]


def digests() -> dict[str, str]:
    paths = [path for path in WRITTEN.rglob("*") if path.is_file() and path.name != "files.json"]
    return {str(path.relative_to(WRITTEN)): xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in paths}


@pytest.fixture(scope="module", autouse=True)
def _left_as_it_was() -> Iterator[None]:
    yield
    assert digests() == FILES


def rows_of(directory: Path, per_chunk: int | None = None, first: int = 0) -> list[Row]:
    reader = StreamReader(directory, per_chunk, max_wait=0)
    return [reader.read(sample) for sample in range(first, reader.refresh().samples)]


def chunks_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("chunk_*")}


STREAM_ROWS: Final[dict[str, list[Row]]] = {
    **{"ended": ROWS[:54], "other": ROWS[1000:1020], "open": ROWS[:12], "measured": ROWS[:4]},
    **{"lengths": TOKENS[:20], "foreign": [*ROWS[:8], {"id": 8}]},
}


@pytest.mark.parametrize("name", STREAM_ROWS)
def test_rows_of_a_stream(name: str) -> None:
    per_chunk = 4 if name == "foreign" else None
    assert rows_of(STREAMS / name, per_chunk) == STREAM_ROWS[name]
    ended = StreamReader(STREAMS / name, per_chunk, max_wait=0).refresh().ended
    assert ended == (name not in ("open", "measured"))


def test_arrays_of_a_stream_of_format_2() -> None:
    found = rows_of(STREAMS / "arrays")
    assert [[*row] for row in found] == [["input_ids", "more", "half"]] * 10
    for n, row in enumerate(found):
        features, mask = row["more"][0], row["more"][1]["mask"]
        assert (row["input_ids"].dtype, row["input_ids"].tolist()) == (np.int32, TOKENS[n]["input_ids"])
        assert (features.dtype, features.tolist()) == (np.float16, [[n / 2] * n] * 2)
        assert (mask.dtype, mask.shape, bool(mask)) == (np.bool_, (), n % 2 == 0)
        assert (row["half"].dtype, row["half"].view(np.uint16).tolist()) == (lazyshard.BFLOAT16, [0x3F80, n])


@pytest.mark.parametrize("stream", sorted({path.rpartition("/")[0] for path in FILES if path.endswith(".completed")}))
def test_verify_finds_no_damage(stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--samples-per-chunk", "4"] if stream == "streams/foreign" else []
    assert main(["verify", str(WRITTEN / stream), "--jobs", "1", "--json", *size]) == 0
    found = json.loads(capsys.readouterr().out)
    # Of a producer that was killed.
    leftovers = 1 if stream in ("producers/text/out", "producers/follow/out") else 0
    assert (found["damage"], found["unchecked"], found["leftovers"]) == (0, 0, leftovers)


def test_open_stream_takes_further_rows(tmp_path: Path) -> None:
    stream = shutil.copytree(STREAMS / "open", tmp_path / "open")
    before = chunks_of(stream)
    with lazyshard.ChunkWriter(stream, 4) as writer:
        assert (writer.published_samples, writer.source) == (12, None)
        for row in ROWS[12:22]:
            writer.write(row)
    assert rows_of(stream) == ROWS[:22]
    assert before.items() <= chunks_of(stream).items()


@pytest.mark.parametrize("name", EXPECTED["producers"])
def test_stopped_producer_goes_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(WRITTEN / "producers" / name, tmp_path / name)
    monkeypatch.chdir(folder)
    if Path("later").exists():
        shutil.copytree("later", "inbox", dirs_exist_ok=True)
    out, before, expected = folder / "out", chunks_of(folder / "out"), EXPECTED["producers"][name]
    assert produce(expected["command"].split()) == 0
    first = RETIRED if name == "retained" else 0
    assert rows_of(out, first=first) == expected["rows"][first:]
    assert before.items() <= chunks_of(out).items()
    assert StreamReader(out, max_wait=0).refresh().ended
    assert not list(out.glob(".tmp/*/*"))
    if name == "shuffled":
        refused = [json.loads(line) for line in (out / "quarantine.jsonl").read_bytes().splitlines()]
        assert [(one["line"], one["row"]) for one in refused] == [(8, '{"id": 7'), (29, "[]")]


def test_deleted_chunks_are_known_as_such() -> None:
    assert read_retired(RETAINED) == 3
    assert min(chunks_of(RETAINED)) == "chunk_00003.jsonl"
    with pytest.raises(ChunkRetired):
        StreamReader(RETAINED, max_wait=0).read(RETIRED - 1)


@pytest.mark.parametrize(
    ("directory", "name", "consumed", "chunks_before", "needs_chunks"),
    [
        ("streams/ended", "run", 20, 5, 14),
        ("streams/ended", "one", 12, 0, 14),
        ("streams/ended", "two", 9, 2, 2),
        ("streams/other", "two", 3, 0, 2),
        ("streams/foreign", "run", 5, 1, 1),
        ("producers/retained/out", "run", 14, 3, 1),
    ],
)
def test_cursors(directory: str, name: str, consumed: int, chunks_before: int, needs_chunks: int) -> None:
    stream = WRITTEN / directory
    cursor, reading = read_cursor(stream, name), read_reading(stream, name)
    assert cursor is not None and cursor.state is not None and reading is not None
    assert (cursor.consumed, cursor.chunks_before, cursor.state.consumed) == (consumed, chunks_before, consumed)
    assert (reading.needs_chunks, reading.stream_id) == (needs_chunks, cursor.stream_id)
    assert {one.name: one.problem for one in list_consumers(stream)}[name] is None


def ended(stream: Path = STREAMS / "ended", **options: Any) -> LazyShardedDataset:
    given = {"batch_size": 2, "shuffle_window": 1, "seed": 5, "max_wait": 0, **options}
    return LazyShardedDataset(stream, **grouped(given))


def blend(weights: tuple[float, float] = (3, 1), window: int = 1, seed_of_other: int = 0, **options: Any) -> Any:
    one = ended(batch_size=1, shuffle_window=window, **options)
    two = ended(STREAMS / "other", batch_size=1, shuffle_window=window, **{**options, "seed": seed_of_other})
    return lazyshard.BlendedDataset([(one, weights[0]), (two, weights[1])], batch_size=2)


def test_run_goes_on_with_its_cursor(tmp_path: Path) -> None:
    stream = shutil.copytree(STREAMS / "ended", tmp_path / "ended")
    run = ended(stream, dp_rank=0, dp_size=1, micro_batches_per_step=2, consumer="run")
    batches = run.batches(epochs=2, collate_fn=list)
    batches.load_state_dict(json.loads((WRITTEN / "states" / "batches.json").read_bytes()))
    assert (batches.epoch, batches.step) == (1, 5)
    assert batches.commit()
    left, expected = [row["id"] for batch in batches for row in batch], EXPECTED["states"]["batches"]
    assert left == expected["left"][0]
    assert sorted([*expected["trained"], *left]) == [*range(52)]
    assert batches.commit()
    cursor = read_cursor(stream, "run")
    assert cursor is not None
    assert (cursor.consumed, cursor.chunks_before) == (52, 13)


RUNS: Final[dict[str, Callable[..., Any]]] = {
    "dataset": ended,
    "blend": blend,
    "foreign": partial(ended, STREAMS / "foreign", batch_size=1, shuffle_window=0, seed=0, samples_per_chunk=4),
    "retained": partial(ended, RETAINED, batch_size=1, shuffle_window=0, seed=0, max_total_samples=60),
    "stream": lambda **rank: LazyShardedStream(ended(batch_size=4, **rank), at_end="loop"),
    "stream_over": lambda **rank: LazyShardedStream(ended(batch_size=4, **rank), at_end="loop"),
    "sequences": partial(LazyShardedSequences, STREAMS / "lengths", form=Pack(12), window=3, seed=3, max_wait=0),
    "streaming_shard": lambda **rank: streaming_shard(range(23), 2, 1, 3),
    "checkpoint one": partial(ended, shuffle_window=8, seed=42),
    "checkpoint two": partial(blend, (0.75, 0.25), 2, 42, seed=42),
}
"""What goes on from each state."""

LIMITS: Final = {"retained": 22, "checkpoint one": 36, "checkpoint two": 36}
"""Where what is published, or what was kept of the order, ends before the run does."""

SAMPLES: Final = {"dataset": {*range(40), *range(44, 54)} - {51, 52}, "foreign": {*range(9)}, "retained": {*range(36)}}
"""What was trained and what is left, each once. Of "dataset" 40 to 43 are skipped, and 51 and 52 left over."""


def drawn(run: Any, count: int | None = None) -> list[Any]:
    """What is left for a rank: ids, those of a pack in a list."""
    samples = run if not hasattr(run, "rank_indices") else [run[index] for index in run.rank_indices[:count]]
    packs = isinstance(run, LazyShardedSequences)
    return [[row["id"] for row in one] if packs else one["id"] if isinstance(one, dict) else one for one in samples]


@pytest.mark.parametrize("name", RUNS)
def test_run_goes_on_from_a_state(name: str) -> None:
    kind, _, run = name.partition(" ")
    file = f"checkpoints/{run}/checkpoint-3/lazyshard.json" if run else f"states/{kind}.json"
    state, count = json.loads((WRITTEN / file).read_bytes()), LIMITS.get(name)
    left = [rank[:count] for rank in EXPECTED["states"][name]["left"]]
    runs = [RUNS[name](dp_rank=rank, dp_size=len(left)) for rank in range(len(left))]
    for one in runs:
        one.load_state_dict(state["state"] if run else state)
    found = [drawn(one, count) for one in runs]
    assert found == left
    if name == "stream_over":
        assert runs[0].consumed == 56  # with two samples once more in the completed micro batch
    if run:
        at = load_position(WRITTEN / "checkpoints" / run / "checkpoint-3")
        assert at is not None
        assert (at.consumed, at.step, at.dp_size, at.batch_size, at.seed) == (12, 3, 1, 2, 42)
        assert (at.consumer, at.layout, at.blend is None) == (run, "strided", run == "one")
    if name in SAMPLES:
        assert sorted([*EXPECTED["states"][name]["trained"], *chain(*found)]) == sorted(SAMPLES[name])


@pytest.mark.parametrize("key", EXPECTED["orders"])
def test_order_of_an_epoch(key: str) -> None:
    unit, window, epoch, dp = key.split()
    make = blend if unit == "blend" else partial(ended, unit=unit, shuffle_window=int(window))
    runs = [make(dp_rank=rank, dp_size=int(dp)) for rank in range(int(dp))]
    for run in runs:
        run.set_epoch(int(epoch))
    assert [drawn(run) for run in runs] == EXPECTED["orders"][key]
