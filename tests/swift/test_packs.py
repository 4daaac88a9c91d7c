"""Raw rows with lengths in their seals, packed while ms-swift trains, in real runs: each row is in one pack."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.stream import read_cursor
from tests.cli.commands import lazyshard
from tests.stream.streams import lengths_of
from tests.swift.commands import Batch, Run, megatron_sft, start_swift_sft, swift_sft
from tests.swift.consumption import SIZE, position_of
from tests.swift.programs import encode, write
from tests.swift.streams import producing, write_jsonl
from tests.swift.unit.test_packs import packs_of

pytestmark = [pytest.mark.timeout(1000), pytest.mark.full]
ROWS: Final = 160
TOKENS: Final = 512
WINDOW: Final = 10  # chunks
OPTIONS: Final[dict[str, Any]] = {
    **{"sharded_lazy": True, "packing": True, "packing_length": TOKENS, "sharded_lazy_shuffle_window": WINDOW},
    **{"sharded_lazy_consumer": "run"},
}


# `swift` packs only with flash attention, which needs a GPU.
ANY_ATTENTION: Final = """
from swift.arguments.sft_args import SftArguments


def check(self):
    self.padding_free = True


SftArguments._check_padding_free = check
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    source = write_jsonl(folder / "rows.jsonl", 0, ROWS)
    return encode(model, folder, {"measured": (source, SIZE, ("--measure", "swift"))})["measured"]


def trained(run: Run, first: int = 0, last: int = 1000) -> list[list[int]]:
    """The packs of the steps after `first` up to `last`, in order, of runs whose micro batch is one pack."""

    def order(batch: Batch) -> tuple[int, int, int]:
        return batch.step, batch.micro, batch.dp

    batches = sorted((one for one in run.batches if first < one.step <= last), key=order)
    assert all(batch.tokens <= TOKENS for batch in batches)
    return [list(batch.ids) for batch in batches]


def test_swift_live_killed_and_resumed_with_other_ranks(tmp_path: Path, model: Path, measured: Path) -> None:
    stream, lengths = tmp_path / "stream", lengths_of(measured)
    expected = packs_of(lengths, TOKENS, WINDOW * SIZE)
    options: dict[str, Any] = {**OPTIONS, "dataset": stream, "max_steps": 100, "per_device_train_batch_size": 1}
    options |= {"save_strategy": "steps", "save_steps": 2, "plugins": [write(tmp_path / "any.py", ANY_ATTENTION)]}
    with start_swift_sft(tmp_path / "run1", model, **options) as training:
        training.wait_for(lambda: len(list(training.trace.glob("rank_*.jsonl"))) == 2, "all processes")
        with producing(stream, measured, SIZE, 8) as producer:
            killed = training.killed_after(5)
            producer.kill()
    assert not (stream / "stream.end").exists()
    with producing(stream, measured, SIZE, 8):
        more = {"resume_from_checkpoint": killed.output_dir / "checkpoint-4", "gradient_accumulation_steps": 2}
        resumed = swift_sft(tmp_path / "run2", model, processes=1, **options, **more)
    packs = [*trained(killed, 0, 4), *trained(resumed, 4)]
    whole = len(expected) // 2 * 2
    assert packs == expected[:whole]
    rows = [row for pack in packs for row in pack]
    assert len(rows) == len(set(rows))
    assert set(range(ROWS)) - set(rows) == {row for pack in expected[whole:] for row in pack}
    last = resumed.output_dir / f"checkpoint-{whole // 2}"
    assert position_of(last).consumed == whole
    cursor = read_cursor(stream, "run")
    # The oldest checkpoint, the one that was resumed from, continues within the second window.
    assert cursor is not None and (cursor.consumed, cursor.chunks_before) == (ROWS, WINDOW)
    # The first step of the second start.
    done = lazyshard("trace", stream, "--state", last, "--step", 5, "--json")
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(line)["sample"] for line in done.stdout.splitlines()) == sorted(expected[8] + expected[9])


def test_megatron_an_epoch(tmp_path: Path, model: Path, measured: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "dataset": measured, "num_train_epochs": 1, "processes": 2}
    run = megatron_sft(tmp_path / "run", model, **options, micro_batch_size=1, global_batch_size=4)
    expected = packs_of(lengths_of(measured), TOKENS, WINDOW * SIZE)
    assert trained(run) == expected[: len(expected) // 4 * 4]
