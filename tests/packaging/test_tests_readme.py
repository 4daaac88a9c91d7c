"""tests/README.md names, for every promise and every kind of fault of docs/reliability.md, tests that there are."""

import ast
import re
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.tiers import TRAININGS, is_full

ROOT: Final = Path(__file__).parents[2]
README: Final = (ROOT / "tests" / "README.md").read_text()
RELIABILITY: Final = (ROOT / "docs" / "reliability.md").read_text()


class Row(NamedTuple):
    what: str
    test: str
    tier: str


def section(text: str, heading: str) -> str:
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows_of(heading: str) -> list[Row]:
    found = [line for line in section(README, heading).splitlines() if re.match(r"\|.*\| `tests/", line)]
    return [Row(*(cell.strip(" `") for cell in line.strip("|").split("|"))) for line in found]


PROMISES: Final = rows_of("Promises and their tests")
FAULTS: Final = rows_of("Faults and the tests that play them")


def marks(decorators: list[ast.expr]) -> set[str]:
    found = (re.match(r"pytest\.mark\.(\w+)", ast.unparse(one)) for one in decorators)
    return {match[1] for match in found if match}


def tier_of(test: str) -> str:
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text()
    module = ast.parse(text)
    found = [one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == name]
    assert len(found) == 1, f"{file} has no test {name}"
    own = marks(found[0].decorator_list)
    if is_full(text):
        own.add("full")
    trains = "make_model" in {argument.arg for argument in found[0].args.args}  # See `tests.tiers.mark_trainings`
    if trains and not any(training.partition("[")[0] == test for training in TRAININGS):
        own.add("full")
    return "full" if "full" in own else "quick"


@pytest.mark.parametrize("row", PROMISES + FAULTS)
def test_named_test_exists_in_its_tier(row: Row) -> None:
    assert tier_of(row.test) == row.tier


def test_every_promise_and_every_kind_of_fault_has_tests() -> None:
    promises = re.findall(r"^\d+\. \*\*(.+?)\.\*\*", section(RELIABILITY, "Promises"), re.MULTILINE)
    assert len(promises) >= 7
    assert list(dict.fromkeys(row.what for row in PROMISES)) == promises
    lines = [line for line in section(RELIABILITY, "How it is tested").splitlines() if line.startswith("| ")]
    kinds = [line.removeprefix("| ") for line in lines[1:]]
    assert len(kinds) >= 10
    named = list(dict.fromkeys(row.what for row in FAULTS))
    assert [len([name for name in named if kind.startswith(name)]) for kind in kinds] == [1] * len(kinds)
    assert [len([kind for kind in kinds if kind.startswith(name)]) for name in named] == [1] * len(named)
