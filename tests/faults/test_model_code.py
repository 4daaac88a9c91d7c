"""The model does what the code does: call by call, from wherever the code was killed."""

import errno
import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from unittest import mock

import pytest

from lazyshard import ChunkWriter
from lazyshard.errors import StreamEnded
from lazyshard.format.state import Cursor
from lazyshard.store import durable
from lazyshard.stream import CursorOwner, listing, publishing
from lazyshard.stream.listing import read_manifest
from lazyshard_producer.configuration.settings import Limits
from lazyshard_producer.limits import Holdback, Shelf
from lazyshard_producer.run import complete_end, find_end
from tests.harness.model.disk import Content, Step
from tests.harness.model.producer import STREAM, TMP, Consumer, Plan, Producer
from tests.harness.model.recording import PER_CHUNK, Recorder, read_disk, read_record, starred
from tests.harness.model.world import LOOKS, World
from tests.harness.processes.nursery import Nursery
from tests.stream.streams import forked, raising

pytestmark = pytest.mark.full
LOADED: Final = (__name__,)  # By the process that is forked
COMMITTED: Final = 1  # Chunks that the consumer is done with when it commits
_NO_CALLS: Final = (*LOOKS, "checkpoint", "commit", "committed")  # Steps of the model that change no file of the stream


class Code:  # The real producer and consumer in one process, one after the other
    def __init__(self, plan: Plan, commit_at: int) -> None:
        self.plan, self.commit_at = plan, commit_at

    def live(self, root: Path, calls: int = 0) -> list[Step]:
        """Runs until the stream has ended, or is killed after so many calls that change files; returns these."""
        return recorded(root, lambda: self.produce(root / STREAM), self.plan, calls)

    def produce(self, stream: Path) -> None:
        """What the command does, with a consumer in between."""
        end = find_end(str(stream), PER_CHUNK)
        if end is not None:
            complete_end(str(stream), end)
            return
        try:
            writer = ChunkWriter(stream, PER_CHUNK)
        except StreamEnded:
            return
        clock = iter(range(1000))  # So that each look is one: it does not look again within half a second
        limits = Limits(retain="consumed")
        gate = Holdback(limits, Shelf(stream), PER_CHUNK, check=writer.check_owner, clock=lambda: next(clock))
        rows = PER_CHUNK * self.plan.chunks - self.plan.partial
        for row in range(writer.source or 0, rows):
            if writer.room == PER_CHUNK:
                self.between(stream, gate, writer)
            writer.write({"id": row}, source=row + 1)
            if writer.published_samples == rows:
                self.between(stream, gate, writer)
        writer.close()

    def between(self, stream: Path, gate: Holdback, writer: ChunkWriter) -> None:
        if writer.published_chunks == self.commit_at:
            manifest = read_manifest(stream, None)
            assert manifest is not None
            with CursorOwner(stream, "run") as owner:
                owner.put(Cursor("run", manifest.stream_id, PER_CHUNK * COMMITTED, COMMITTED, {}, time.time()))
        assert gate.before_chunk(writer.published_chunks, writer.published_samples) is None


def recorded(root: Path, work: Callable[[], object], plan: Plan, calls: int = 0) -> list[Step]:
    """Does some work in a child that is killed after so many calls, if any; returns which calls it has made."""
    record = root / "record"
    record.unlink(missing_ok=True)

    def child() -> None:
        Recorder(root, record, calls).install()
        work()

    assert forked(child) == (-signal.SIGKILL if calls else 0)
    found = read_record(record, plan)
    record.unlink()
    return found


class Model:
    def __init__(self, plan: Plan, commit_at: int) -> None:
        self.world = World(plan, Producer(plan), Consumer(plan), every_junk=True)
        self.state = self.world.doing(self.world.first(faults=9), "consumer", [])
        self.commit_at, self.committed = commit_at, False

    def live(self, calls: int = 0) -> list[Step]:
        """Runs until the stream has ended, or the next call would be one more; returns what changes files."""
        self.committed = False
        done: list[Step] = []
        while self.state.producer or self.state.consumer:
            who, steps = self._next()
            if calls and len(done) == calls and steps[0][0] not in _NO_CALLS:
                break
            move = next(iter(self.world.produce(self.state) if who == "producer" else self.world.consume(self.state)))
            assert move.broken is None, move.broken
            self.state = move.state
            if steps[0][0] not in _NO_CALLS:
                done.append(tuple(starred(part) if isinstance(part, str) else part for part in steps[0]))
        return done

    def kill(self) -> None:
        kills = [move for move in self.world.kill(self.state, "producer") if len(move.what) == 1]
        state = kills[0].state if kills else self.state
        self.state = self.world.doing(state, "consumer", [])

    def disk(self) -> dict[str, Content]:
        return {starred(path): value for path, value in self.world.disk(self.state).visible().items()}

    def _next(self) -> tuple[str, list[Step]]:
        steps = list(self.world.steps(self.state, "producer"))
        if not self.state.consumer and steps[0][:2] == ("look", self.commit_at) and not self.committed:
            self.committed = True
            self.state = self.world.doing(self.state, "consumer", [("checkpoint", COMMITTED), ("commit", COMMITTED)])
        if self.state.consumer:
            return "consumer", list(self.world.steps(self.state, "consumer"))
        return "producer", steps


def in_order(steps: list[Step]) -> list[Step]:
    """Returns steps with the files of `.tmp/` removed in the order of their names: a listing has none."""
    found: list[Step] = []
    cleared: list[Step] = []
    for step in [*steps, ()]:
        if step and step[0] == "remove" and step[1].startswith(f"{TMP}/"):
            cleared.append(step)
        else:
            found += [*sorted(cleared), *([step] if step else [])]
            cleared = []
    return found


SCENARIOS: Final = [pytest.param(Plan(3, partial=True), 2, id="partial"), pytest.param(Plan(2), 2, id="full")]


@pytest.mark.parametrize(("plan", "after"), SCENARIOS)
def test_every_call_of_the_code_is_a_step_of_the_model_in_the_same_order(root: Path, plan: Plan, after: int) -> None:
    code, model = Code(plan, after), Model(plan, after)
    expected = model.live()
    assert in_order(code.live(root)) == in_order(expected)
    assert read_disk(root, plan) == model.disk()
    kinds = {step[0] for step in expected}
    assert kinds == {"mkdir", "create", "write", "sync", "rename", "link", "sync_directory", "remove", "rmdir"}
    assert ("remove", f"{STREAM}/chunk_00000.jsonl.completed") in expected
    assert code.live(root) == []


def kill_after_each_call(root: Path, plan: Plan, after: int) -> int:
    code = Code(plan, after)
    for calls in itertools.count(1):
        home = root / str(calls)
        home.mkdir()
        model = Model(plan, after)
        expected = model.live(calls)
        if len(expected) < calls:
            break
        assert code.live(home, calls) == expected
        model.kill()
        assert read_disk(home, plan) == model.disk(), f"after {calls} calls"
        assert in_order(code.live(home)) == in_order(model.live()), f"after {calls} calls"
        assert read_disk(home, plan) == model.disk(), f"after {calls} calls"
    return calls - 1


@pytest.mark.parametrize(("plan", "after"), SCENARIOS)
def test_killed_after_any_call_the_code_follows_the_model(root: Path, plan: Plan, after: int, forks: Nursery) -> None:
    assert forks.result(kill_after_each_call, root, plan, after) >= 60


def test_mark_of_a_call_that_has_failed_is_made_durable_before_anything_is_deleted(root: Path) -> None:
    """As the model has it; a power cut would otherwise leave a gap above a mark that is gone."""
    plan = Plan(3)
    with ChunkWriter(root / STREAM, PER_CHUNK) as writer:
        for row in range(PER_CHUNK * plan.chunks):
            writer.write({"id": row}, source=row + 1)

    def work() -> None:
        broken = mock.patch.object(durable, "sync_directory", raising(OSError(errno.EIO, "broken")))
        with broken, pytest.raises(OSError, match="broken"):
            listing.retire(root / STREAM, 1, plan.chunks)
        assert listing.retire(root / STREAM, 1, plan.chunks) == 1

    found = recorded(root, work, plan)
    renamed = found.index(("rename", f"{TMP}/retired.json.*", f"{STREAM}/retired.json"))
    assert found[renamed + 1 :] == Producer(plan).retiring(1, 0, 1, "a")


def test_a_change_of_the_code_and_a_file_that_is_written_in_another_way_are_noticed(root: Path) -> None:
    plan = Plan(2)

    def otherwise() -> None:
        publishing.sync = lambda fd: None  # type: ignore[attr-defined]
        Code(plan, 2).produce(root / STREAM)
        (root / STREAM / ".position").write_text("7")

    expected = in_order(Model(plan, 2).live())
    *found, unseen = in_order(recorded(root, otherwise, plan))
    assert found == [step for step in expected if step[0] != "sync" or not step[1].endswith(".jsonl")]
    assert unseen == ("unseen", "open", f"{STREAM}/.position")
