"""What is advised of a stream: by what is in it, one kind after the other."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from lazyshard.format.records import Manifest
from lazyshard.format.seal import DealtByCost, Made, SourceRows
from lazyshard.format.state import Cursor, RunState
from lazyshard.inspection.inspection import FEW_ROWS, Overview, Training, advise, training_of, unevenness
from lazyshard.inspection.row_facts import Lengths
from lazyshard.part import Part
from lazyshard.stream import Published
from lazyshard.stream.cursor import Consumer

ID: Final = "0" * 32


def counted(*lengths: int) -> Lengths:
    found = Lengths()
    found.add(np.array(lengths))
    return found


def stream(**values: Any) -> Overview:
    """A stream of 100 chunks of 100 full, shuffled rows, of which nothing is to be said."""
    chunks, ended = values.pop("chunks", 100), values.pop("ended", False)
    made = Overview(Path("/data/s"), Manifest(ID, 100, 0.0), 100, Published(chunks, 100 * chunks, ended), 0)
    made.lengths, made.tokens, made.made = counted(*[2000] * 9), counted(*[500] * 9), Made(None, None, True)
    return replace(made, **values)


FULL: Final = Made("pack", 1000, True)
SPREAD: Final = counted(*[40] * 9, 1000)
DEALT: Final = DealtByCost(4, 1, "length", 1, 0)

CASES: Final[dict[str, tuple[Overview, Training, list[str]]]] = {
    "nothing to change": (stream(), Training(), []),
    "few rows": (stream(tokens=Lengths(), chunks=FEW_ROWS // 100 - 1), Training(), []),
    "no lengths": (stream(tokens=Lengths()), Training(), ["--source /data/s --out NEW --measure"]),
    "no lengths of a foreign directory": (stream(tokens=Lengths(), manifest=None), Training(), ["--measure"]),
    "padding": (stream(made=Made("pad", 1000, True)), Training(), ["--pack 1000"]),
    "little padding": (stream(made=Made("pad", 510, True)), Training(), []),
    "packs half full": (stream(made=FULL, packs=9), Training(), ["--pack-buffer"]),
    "full packs": (stream(made=Made("pack", 510, True), packs=9), Training(), []),
    "packs of unknown size": (stream(made=Made("pack", None, True), packs=9), Training(), []),
    "short rows": (stream(tokens=counted(*[300] * 9)), Training(), ["--pack 512"]),
    "packs of another program": (stream(tokens=counted(*[300] * 9), packs=9), Training(), []),
    "uneven rows": (stream(tokens=SPREAD), Training(4, 2, 0), ["--pack 1024", "--balance 4 --micro-batch-size 2"]),
    "dealt by cost": (stream(tokens=SPREAD, dealt=DEALT), Training(), ["--pack 1024"]),
    "one rank": (stream(tokens=SPREAD), Training(1, 1, 0), ["--pack 1024"]),
    "in order": (stream(made=Made()), Training(8, 1, 0), ["shuffle_window=8"]),
    "in order, few chunks a rank": (stream(made=Made()), Training(30), ["shuffle_window=3"]),
    "in order, one chunk a rank": (stream(made=Made()), Training(60), []),
    "in windows": (stream(made=Made()), Training(8, 1, 2), []),
    "in order, dealt by cost": (stream(made=Made(), dealt=DEALT), Training(8, 1, 0), []),
    "fewer chunks than ranks": (stream(chunks=4, ended=True), Training(), ["--samples-per-chunk 25"]),
    "fewer chunks than ranks so far": (stream(chunks=4), Training(), []),
    "large chunks": (stream(lengths=counted(40_000_000)), Training(), ["--samples-per-chunk 6"]),
    "small chunks": (stream(lengths=counted(100), chunks=10_000), Training(), ["--samples-per-chunk 10000"]),
    "few small chunks": (stream(lengths=counted(100), chunks=9999), Training(), []),
    "refused rows": (stream(source_rows=SourceRows(90, 3, True)), Training(), ["quarantine /data/s"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_advised(name: str) -> None:
    found, training, settings = CASES[name]
    advice = advise(found, training)
    assert len(advice) == len(settings)
    for one, setting in zip(advice, settings, strict=True):
        assert one.setting.endswith(setting) or f"{setting} " in one.setting, one


def test_steps_of_even_rows_are_even_and_of_long_and_short_ones_are_not() -> None:
    assert unevenness(counted(700, 700), Training(64)) == 1.0
    assert unevenness(SPREAD, Training(1)) == 1.0
    assert 1 < unevenness(SPREAD, Training(8, 8)) < unevenness(SPREAD, Training(8)) < 8
    assert unevenness(counted(0), Training()) == 1.0


def run(name: str, at: float, ranks: int, window: int) -> Consumer:
    state = RunState(ID, 10, 10, window, 0, None, (Part(ranks, 3, 5),), 5 * ranks)
    return Consumer(name, Cursor(name, ID, 5 * ranks, 0, {}, at, state), None, None)


def test_training_is_that_of_the_newest_checkpoint() -> None:
    assert training_of([run("a", 5.0, 4, 20), run("b", 4.0, 2, 0)], 10) == Training(4, 3, 2)
    assert training_of([Consumer("a", None, None, None)], 10) == training_of([], 10) == Training(8, 1, None)
