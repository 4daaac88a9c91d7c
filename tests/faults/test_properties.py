"""The sweep of the properties: it tries as many examples as it says, and shows what it finds."""

from pathlib import Path

import pytest

from tests.harness.planted import properties as properties_mutants
from tests.harness.properties import sweep
from tests.harness.tally import Tally


@pytest.mark.full
def test_what_few_examples_do_not_show_is_found_among_many(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    properties_mutants.test_does_not_hold()
    tally = Tally("properties")
    sweep(tally, tmp_path, 0, 0.5, tests=["tests/harness/planted/properties.py"])
    assert tally.points == 2
    assert tally.trials > 500
    assert ["test_does_not_hold" in violation for violation in tally.violations] == [True]
    shown = capfd.readouterr().out
    assert "test_does_not_hold(" in shown
    assert f"number={properties_mutants.WRONG}," in shown
