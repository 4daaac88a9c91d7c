"""The real command, killed with -9 at requests to a real S3 server and at calls that change files of its spool."""

import random

import pytest

from tests.store.producing import Run, When, check_ended

pytestmark = pytest.mark.full


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_each_change_of_the_store_it_goes_on(run: Run, when: When) -> None:
    # After one change the store is as before the next one: the two kinds together meet it after each.
    for number in range(0, 100, 2):
        one = run.beside(number)
        code, said = one.kill_at(number, when)
        if code == 0:
            assert number >= 10, "fewer objects were put than a stream of three chunks has"
            break
        assert code == -9, said
        moves = number // 2 % 2 == (when == "before")
        if moves:
            one.move()
        said = one.finish()
        assert moves or "is discarded" not in said
        check_ended(one.objects(), 7, 3)
    else:
        pytest.fail("the run never ended by itself")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_spool_is_known_again_after_a_kill_at_the_taking_over(run: Run, when: When) -> None:
    assert run.kill_at(7, "before")[0] == -9
    assert run.kill_at(0, when)[0] == -9
    assert run.changes == [("PUT", "stream.owner")]
    assert "is discarded" not in run.finish()
    assert ("PUT", "chunk_00000.jsonl") not in run.changes
    check_ended(run.objects(), 7, 3)


def test_killed_in_the_spool(run: Run) -> None:
    draw = random.Random("spool")
    code, said = run.beside("all").run(kill_at=0)
    assert code == 0, said
    calls = run.nursery.counted.calls
    assert calls > 50
    for turn, number in enumerate(draw.sample(range(1, calls + 1), 12)):
        one = run.beside(number)
        code, said = one.run(kill_at=number, when=draw.choice(["before", "after"]))
        # The thread's calls are not the same number each time, so the last ones may not be met.
        assert code in (-9, 0), said
        if turn % 2:
            one.move()
        one.finish()
        check_ended(one.objects(), 7, 3)
