"""The real command, killed with -9 at requests to a real S3 server and at calls that change files of its spool."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lazyshard.store.urls import UrlPath
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import rows
from tests.store.producing import Run, When, check_ended
from tests.store.server import Server

pytestmark = pytest.mark.full

ROWS = 7
PER_CHUNK = 3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(rows(0, ROWS))
    return path


@pytest.fixture
def run(nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path, source: Path) -> Run:
    return Run(nursery, server, bucket, tmp_path, "--source", source, "--samples-per-chunk", PER_CHUNK)


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_each_change_of_the_store_it_goes_on(
    nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path, source: Path, when: When
) -> None:
    for number in range(100):
        for_this = (nursery, server, bucket / str(number), tmp_path / str(number))
        run = Run(*for_this, "--source", source, "--samples-per-chunk", PER_CHUNK)
        code, said = run.kill_at(number, when)
        if code == 0:
            assert number >= 10, "fewer objects were put than a stream of three chunks has"
            break
        assert code == -9, said
        # Each change on one of the two, and with the other `when` on the other one.
        moves = number % 2 == (when == "before")
        if moves:
            run.move()
        said = run.finish()
        assert moves or "is not gone on with" not in said
        check_ended(run.objects(), ROWS, PER_CHUNK)
    else:
        pytest.fail("the run never ended by itself")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_spool_is_known_again_after_a_kill_at_the_taking_over(run: Run, when: When) -> None:
    assert run.kill_at(7, "before")[0] == -9
    assert run.kill_at(0, when)[0] == -9
    assert run.changes == [("PUT", "stream.owner")]
    assert "is not gone on with" not in run.finish()
    assert ("PUT", "chunk_00000.jsonl") not in run.changes
    check_ended(run.objects(), ROWS, PER_CHUNK)


def test_killed_again_and_again_on_changing_machines_it_comes_to_its_end(run: Run) -> None:
    draw = random.Random("machines")
    for _ in range(8):
        code, said = run.kill_at(draw.randrange(1, 6), draw.choice(["before", "after"]))
        assert code in (-9, 0), said
        if draw.random() < 0.5:
            run.move()
    run.finish()
    check_ended(run.objects(), ROWS, PER_CHUNK)
