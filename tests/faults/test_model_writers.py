"""The model of writers and sequencers keeps every promise, finds each known mistake, and does what the code does."""

import time
from pathlib import Path
from typing import Final
from unittest import mock

import pytest

from lazyshard import ChunkWriter
from lazyshard.format.records import END, OWNER, SEAL_SUFFIX, End, Owner, parse_chunk_name
from lazyshard.format.row import parse_row
from lazyshard.format.seal import Seal
from lazyshard.format.writers import Committed, Sequenced
from lazyshard.stream.sequencer import Sequencing
from lazyshard.stream.share import Share
from lazyshard.stream.writer import open_sequenced
from tests.faults.test_model_code import in_order
from tests.harness.model import producer, recording
from tests.harness.model.disk import Content, Step
from tests.harness.model.sequencing import NAMES, Plan
from tests.harness.model.sequencing_world import World
from tests.harness.model.sweep import explore
from tests.harness.planted.sequencing import MUTANTS, Mutant
from tests.stream.streams import forked
from tests.tiers import full

_QUICK: Final = ("CommitsTwice", "RetiresWhenVisible")
_PIECES_AND_REST: Final = Plan(rows=(3, 1), takeovers=0)


@pytest.mark.parametrize(
    ("plan", "faults", "states"),
    [
        (_PIECES_AND_REST, 0, 800),
        *full(
            (_PIECES_AND_REST, 1, 20_000),
            (Plan(rows=(1, 0), takeovers=1), 0, 2000),
            (Plan(rows=(2, 2), size=3, takeovers=0), 1, 2000),
            (Plan(rows=(3, 0), size=1, takeovers=0), 1, 2000),
            (Plan(rows=(1, 0), takeovers=0, request=True), 1, 2000),
            (Plan(rows=(1, 0), takeovers=0), 2, 2000),
        ),
    ],
    ids=str,
)
def test_each_row_is_in_the_stream_once_and_in_order_wherever_faults_come(plan: Plan, faults: int, states: int) -> None:
    found = explore(World(plan), faults)
    assert found.broken is None, str(found)
    assert found.finished > 0
    assert found.states > states


@pytest.mark.parametrize(
    "mutant",
    [*(one for one in MUTANTS if one.name in _QUICK), *full(*(one for one in MUTANTS if one.name not in _QUICK))],
    ids=lambda mutant: mutant.name,
)
def test_model_finds_a_sequencer_or_writer_that_makes_a_mistake(mutant: Mutant) -> None:
    found = explore(mutant.world(), len(mutant.kinds))
    assert found.broken is not None, f"{mutant.name} was not found in {found.states} states"
    assert mutant.finds in found.broken
    assert sum(line.startswith(("KILL", "POWER CUT", "ERROR")) for line in found.history) == len(mutant.kinds)


def publish_pieces(stream: Path, plan: Plan) -> None:
    """Each writer publishes all its rows and ends, and nobody sequences."""
    alone = mock.patch.multiple(Share, _run=lambda self: None, make_room=mock.DEFAULT, finish=mock.DEFAULT)
    for name, rows in zip(NAMES, plan.rows, strict=True):
        with alone, ChunkWriter(stream, plan.size, writer=name, writers=NAMES) as writer:
            for row in range(rows):
                writer.write({"id": row, "writer": name}, source=row + 1)


def content(path: str, data: bytes) -> Content:
    """Returns what the model calls this content of a file."""
    name = path.rpartition("/")[2]
    if not data or parse_chunk_name(name) is None:
        if data and name == Committed.NAME:
            told = Committed.decode(data)
            return ("committed", told.chunks, _taken(told.taken), tuple(told.refused))
        if data and name == OWNER:
            return ("owner", Owner.decode(data).epoch, "a")
        if data and name == END:
            end = End.decode(data)
            return ("end", end.chunks, end.samples)
        return recording.content(path, data, producer.Plan())
    if name.endswith(SEAL_SUFFIX):
        seal = Seal.decode(data, parse_chunk_name(name)[0])  # type: ignore[index]
        found = Sequenced.read_source(seal.source)
        assert found is not None
        return (
            "seal",
            seal.chunk,
            _taken(found.taken),
            tuple((one.writer, one.first, one.count) for one in found.rows),
        )
    rows = [parse_row(line) for line in data.splitlines(keepends=True)]
    firsts = {name: next(row["id"] for row in rows if row["writer"] == name) for name in {r["writer"]: 0 for r in rows}}
    return ("rows", tuple((name, first, sum(row["writer"] == name for row in rows)) for name, first in firsts.items()))


def _taken(taken: object) -> tuple[tuple[int, int], ...]:
    assert hasattr(taken, "get")
    return tuple(tuple(taken.get(name, (0, 0))) for name in NAMES)


def expected_calls(plan: Plan) -> list[Step]:
    """Returns what a sequencer of the model does when both writers have ended."""
    world = World(plan, every_order=True)
    state = world.first(faults=0)
    calls: list[Step] = []
    for process in (2, 3, 0):
        while moves := list(world.go_on(state, process)):
            move = moves[-1]  # Of two orders of the writers, that of the code's first turn
            assert move.broken is None, move.broken
            step = move.what[1] if move.what[0] == "try" else move.what
            if process == 0 and (move.state.disk != state.disk or step[0] == "sync_directory"):
                calls.append(tuple(recording.starred(part) if isinstance(part, str) else part for part in step))
            state = move.state
    return calls


@pytest.mark.full
@pytest.mark.parametrize("plan", [Plan((3, 1)), Plan((2, 1)), Plan((4, 2)), Plan((2, 2), size=3)], ids=str)
def test_every_call_of_the_sequencer_is_a_step_of_the_model_in_the_same_order(root: Path, plan: Plan) -> None:
    stream = root / producer.STREAM
    publish_pieces(stream, plan)

    def sequence() -> None:
        recording.Recorder(root, root / "record").install()
        sequencing = Sequencing(stream, lambda: open_sequenced(stream, time.time, False, None))
        while not sequencing.ended:
            sequencing.step()

    assert forked(sequence) == 0
    assert in_order(recording.read_record(root / "record", content)) == in_order(expected_calls(plan))
