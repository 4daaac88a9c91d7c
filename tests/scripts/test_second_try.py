"""`second_try`: which failed tests may be run once more, and which failures stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.checks import second_try

ONE, TWO, THREE, FOUR = (f"tests/data/test_a.py::test_{name}" for name in ("four", "one", "three", "two"))


def test_few_failures_are_looked_at_again() -> None:
    assert second_try.may_be_repeated({TWO: True, ONE: True}) == [ONE, TWO]
    assert second_try.may_be_repeated([ONE, TWO, THREE]) == [ONE, TWO, THREE]


def test_many_have_a_cause() -> None:
    assert second_try.may_be_repeated([ONE, TWO, THREE, FOUR]) == []


@pytest.mark.parametrize(
    "name", ["tests/crash/test_run.py::test_mutant[late]", "tests/faults/test_soak.py::test_b", "tests/data/test_a.py"]
)
def test_a_lost_sample_and_a_file_that_does_not_load_stand(name: str) -> None:
    assert second_try.may_be_repeated([ONE, name]) == []


def test_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "v" / "cache"
    assert second_try.main([str(tmp_path)]) == 1
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps({ONE: True}))
    assert second_try.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{ONE}\n"
