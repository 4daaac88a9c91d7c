"""The real command, killed with -9 at requests to a real S3 server and at calls that change files of its spool."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lazyshard.store.urls import UrlPath
from tests.harness.processes.commands import Commands
from tests.store.producing import Run, When, check_ended
from tests.store.server import Server

pytestmark = pytest.mark.full


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_each_change_of_the_store_it_goes_on(
    nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path, source: Path, when: When
) -> None:
    for number in range(100):
        place = bucket / str(number), tmp_path / str(number)
        run = Run(nursery, server, *place, "--source", source, "--samples-per-chunk", 3)
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
        check_ended(run.objects(), 7, 3)
    else:
        pytest.fail("the run never ended by itself")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_spool_is_known_again_after_a_kill_at_the_taking_over(run: Run, when: When) -> None:
    assert run.kill_at(7, "before")[0] == -9
    assert run.kill_at(0, when)[0] == -9
    assert run.changes == [("PUT", "stream.owner")]
    assert "is not gone on with" not in run.finish()
    assert ("PUT", "chunk_00000.jsonl") not in run.changes
    check_ended(run.objects(), 7, 3)


@pytest.mark.parametrize("machine", ["same", "other"])
def test_killed_at_changes_of_the_spool_it_goes_on(
    nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path, source: Path, machine: str
) -> None:
    draw = random.Random(f"spool {machine}")
    options = ("--source", source, "--samples-per-chunk", 3)
    code, said = Run(nursery, server, bucket / "all", tmp_path / "all", *options).run(kill_at=0)
    assert code == 0, said
    calls = nursery.counted.calls
    assert calls > 50
    for number in sorted(draw.sample(range(1, calls + 1), 10)):
        run = Run(nursery, server, bucket / str(number), tmp_path / str(number), *options)
        code, said = run.run(kill_at=number, when=draw.choice(["before", "after"]))
        # The thread's calls are not the same number each time, so the last ones may not be met.
        assert code in (-9, 0), said
        if machine == "other":
            run.move()
        run.finish()
        check_ended(run.objects(), 7, 3)
