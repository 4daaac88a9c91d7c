"""The record of a rank, followed while it is written."""

from pathlib import Path

from scripts.demonstration.demo_steps import Finish, Step, StepFile, finish_line, step_line

ONE = Step([0, 1], 5.5, 0.25, 100.0, 40)
TWO = Step([2, 3], 5.25, 0.0, 101.0, 60)


def test_a_record_is_followed_line_by_line_and_never_half_of_one(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    record = StepFile(path)
    record.follow()
    assert record.steps == []
    line = step_line(TWO)
    path.write_text(step_line(ONE) + line[:10])
    record.follow()
    assert record.steps == [ONE]
    with path.open("a") as file:
        file.write(line[10:] + finish_line(Finish(3, 102.0)))
    record.follow()
    record.follow()
    assert (record.steps, record.finish, record.samples) == ([ONE, TWO], Finish(3, 102.0), 4)
