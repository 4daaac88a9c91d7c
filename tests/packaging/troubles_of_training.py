"""Troubles of training: waits, bad samples, ranks, lengths, and checkpoints that do not fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

from torch.utils.data import DataLoader

from lazyshard import BadRows, Filter, LazyShardedDataset, load
from lazyshard.errors import SkipSample
from lazyshard.format.records import Head, ProducerState
from lazyshard.stream import pacing
from lazyshard.stream.listing import Published
from lazyshard.stream.retire import retire
from lazyshard_swift.arguments import check_combinations
from lazyshard_swift.checkpoints import load_position
from lazyshard_swift.gate import StepGate
from lazyshard_swift.position import check_fits
from tests.packaging.trouble_words import STREAM, Row, dataset, logged, told, without_rights
from tests.stream.streams import produce
from tests.swift.unit.runs import megatron, position


def fails_at(*ids: int, error: Exception) -> Callable[[Row], Row]:
    def encode(row: Row) -> Row:
        if row["id"] in ids:
            raise error
        return row

    return encode


def waits() -> str:
    first = told(lambda: dataset(max_total_samples=9)[0])
    produce(STREAM, 4, end=False)
    return f"{told(lambda: dataset(max_total_samples=9)[4])}\n{first}"


def states() -> str:
    def waits_for(
        state: ProducerState, rate: float = 0.0, age: float = 1.0, gone: bool = False, note: str = "", open: int = 0
    ) -> str:
        head = Head(4, 8, False, state, rate, "node1", 4711, 1000.0 - age, note, open=open)
        published = Published(4, 8, False, head)
        doing = pacing.describe_producer(published, 10, 1000.0, gone, open_rows=False)
        return f"waiting for chunk 4 of stream: {doing}"

    return "\n".join(
        (
            waits_for("running", rate=2.0, age=0.0),
            waits_for("running", rate=2.0, age=12.0, open=1),
            waits_for("running", rate=2.0, age=12.0),
            waits_for("waiting", note="rows on standard input"),
            waits_for("idle"),
            waits_for("failed", note="stream: No space left on device"),
            waits_for("running", age=90.0, gone=True),
        )
    )


def bad_sample() -> str:
    produce(STREAM, 4)
    encode = fails_at(1, error=KeyError("text"))
    with logged() as lines:
        dataset(encode)[1]
    return "\n".join((told(lambda: dataset(encode, bad_rows=BadRows("raise"))[1]), *lines))


def skipped() -> str:
    produce(STREAM, 4)
    with logged() as lines:
        dataset(fails_at(1, error=SkipSample("longer than 4,096 tokens")))[1]
    return "\n".join(lines)


def nothing_kept() -> None:
    produce(STREAM, 4)
    with mock.patch("lazyshard.data.substitutes.FILL_ROWS", 3), logged():
        dataset(fails_at(0, 1, 2, 3, error=SkipSample("too long")))[1]


def bad_config() -> None:
    Path("train.yaml").write_text("datasets:\n  - path: stream\n")
    load("train.yaml")


def ranks() -> str:
    produce(STREAM, 4)
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "4"}):
        unknown = told(lambda: dataset(dp_rank=None, dp_size=None)[0])
    everything = told(lambda: next(iter(DataLoader(dataset(dp_rank=0, dp_size=2)))))
    return "\n".join((unknown, told(lambda: dataset(dp_rank=2, dp_size=2)), everything))


def other_state() -> str:
    produce(STREAM, 6)
    state, fresh = dataset().state_dict(2), dataset().state_dict(0)
    other = told(lambda: dataset(shuffle_window=2).load_state_dict(state))
    retire(STREAM, 2, 3)

    def behind() -> None:
        again = dataset()
        again.load_state_dict(fresh)
        again[0]

    return f"{other}\n{told(behind)}"


def two_runs() -> None:
    produce(STREAM, 8)
    first, second = dataset(consumer="sft"), dataset(consumer="sft")
    first.commit(2, last_epoch=True)
    second.commit(2, last_epoch=True)


def no_permission() -> None:
    produce(STREAM, 4)
    for path in (Path(), STREAM):
        path.chmod(0o755)
    (STREAM / "cursors").mkdir(mode=0o555)
    with without_rights():
        dataset(consumer="sft").commit(2, last_epoch=True)


def position_torn() -> None:
    Path("checkpoint-10").mkdir()
    Path("checkpoint-10", "lazyshard.json").write_bytes(b"[]")
    load_position("checkpoint-10")


def too_short() -> None:
    produce(STREAM, 3)
    StepGate(dataset(dp_size=2, batch_size=2, layout="strided", num_samples=2**50), True).allows(0, 2)


def live() -> LazyShardedDataset:
    produce(STREAM, 4, end=False)
    return dataset()


def whole(**options: Any) -> LazyShardedDataset:
    produce(STREAM, 4)
    return dataset(**options)


TROUBLES: Final[dict[str, Callable[[], object]]] = {
    "WaitTimeout": waits,
    "What a rank waits for": states,
    "BadSample": bad_sample,
    "TooManyBadSamples": lambda: (
        produce(STREAM, 4),
        dataset(fails_at(0, error=KeyError("text")), bad_rows=BadRows(limit=0))[0],
    ),
    "SkipSample": skipped,
    "RankInvalid": ranks,
    "CursorTaken": two_runs,
    "CursorUnwritable": no_permission,
    "ResumeRefused": lambda: check_fits(position(), position(seed=43), "checkpoint-10"),
}
"""By heading of the page."""

GROUPS: Final[dict[str, dict[str, Callable[[], object]]]] = {
    "Steps, lengths and configuration": {
        "NothingKept": nothing_kept,
        "StepInvalid": lambda: Filter("my_rows:keep"),
        "ConfigInvalid": bad_config,
        "LengthUnknown": lambda: len(live()),
        "LengthsMissing": lambda: whole()["lengths"],
    },
    "States that do not fit": {
        "StateInvalid": lambda: whole().load_state_dict({}),
        "StateMismatch": other_state,
        "PositionInvalid": position_torn,
    },
    "ms-swift": {
        "SettingsRefused": lambda: check_combinations(megatron(streaming=True)),
        "StreamTooShort": too_short,
    },
}
"""By heading and class, for each heading with a table of classes."""
