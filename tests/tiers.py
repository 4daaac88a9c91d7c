"""Which tests a run takes, and what makes a run fail in which none has failed.

- *quick*, `scripts/test`: what has no marker, and `TRAININGS`; minutes, enough to trust a change.
- *full*, `scripts/test_all` and whoever names a file: that and what is marked `full`; of a test that is marked
  `few(n)` all parameters, of which the quick tier takes n, evenly spread.
- *sweep*, `scripts/sweep_swift`: what is marked `sweep`, in no other tier.

With `--gate` a run also fails where a test is skipped that `SKIPS` does not name. A run of the quick tier also fails
where the tests of a file take more than `QUICK_S` on average, or as many times that as tests share a processor: such a
file belongs to the full tier. In the full tier trainings run beside them, so times tell nothing there.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import pytest

Tier = Literal["quick", "full", "sweep"]
TIERS: Final[tuple[Tier, ...]] = ("quick", "full", "sweep")

QUICK_S: Final = 5.0
"""Seconds that a test of a file of the quick tier takes on average at the most, with a processor of its own."""

TRAININGS: Final = frozenset(
    {
        "tests/swift/test_rescale.py::test_swift_with_4_then_2_then_3_processes",
        "tests/swift/test_resume.py::test_megatron_live_trainer_and_producer_killed",
        "tests/swift/test_same_losses.py::test_swift",
        "tests/swift/test_waiting.py::test_swift_ends_with_75_and_a_checkpoint",
    }
)
"""The real trainings with ms-swift of the quick tier, a minute each. All other tests that train its model are full."""

SKIPS: Final[Mapping[str, str]] = {
    "the lowest torch is not at hand": "3 GB to download: `scripts/test_pythons torch` does, and runs the same tests"
}
"""Regular expressions of the reasons of tests that may be skipped, and why that is so."""


def is_taken(tier: Tier, markers: Iterable[str]) -> bool:
    """Whether a run of a tier takes a test with these markers."""
    own: Tier = next((one for one in ("sweep", "full") if one in markers), "quick")
    return own == tier or (tier == "full" and own == "quick")


_FILE_MARKS: Final = re.compile(r"^pytestmark = (\[\n.*?^\]|[^\n]*)", re.MULTILINE | re.DOTALL)


def is_full(text: str) -> bool:
    """Whether all tests of a file with this text are marked as full."""
    marks = _FILE_MARKS.search(text)
    return marks is not None and "pytest.mark.full" in marks[1]


def full(*values: object) -> list[Any]:
    """Values of a parameter, or tuples of values of several, that only the full tier takes."""
    return [pytest.param(*one if isinstance(one, tuple) else (one,), marks=pytest.mark.full) for one in values]


def mark_trainings(items: Iterable[pytest.Item]) -> None:
    """Marks the tests that train a model with the real ms-swift as full, but for `TRAININGS`."""
    for item in items:
        if "make_model" in getattr(item, "fixturenames", ()) and item.nodeid not in TRAININGS:
            item.add_marker("full")


def select(items: list[pytest.Item], tier: Tier) -> list[pytest.Item]:
    """Keeps those of the tier; returns the others."""
    taken = [item for item in items if is_taken(tier, {mark.name for mark in item.iter_markers()})]
    kept = set(taken) - (_beyond_few(taken) if tier == "quick" else set())
    left = [item for item in items if item not in kept]
    items[:] = [item for item in items if item in kept]
    return left


def _beyond_few(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Returns what the quick tier leaves out of tests that are marked `few(n)`."""
    by_test: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        for mark in item.iter_markers("few"):
            by_test[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    left: set[pytest.Item] = set()
    for (_, count), all_of in by_test.items():
        taken = {number * len(all_of) // count for number in range(count)}
        left |= {item for number, item in enumerate(all_of) if number not in taken}
    return left


def unexpected_skips(skips: Iterable[tuple[str, str]]) -> list[str]:
    """Returns what is skipped without a reason on the list, as lines; of (test, reason)."""
    known = [re.compile(pattern) for pattern in SKIPS]
    return [f"{test}: skipped: {reason}" for test, reason in skips if not any(one.search(reason) for one in known)]


def slow_files(seconds: Mapping[str, float], beside: float = 1.0) -> list[str]:
    """Returns lines on slow files of the quick tier; `seconds` is by test, `beside` how many share a processor."""
    by_file: dict[str, list[float]] = defaultdict(list)
    for test, taken in seconds.items():
        by_file[test.partition("::")[0]].append(taken)
    means = {file: sum(taken) / len(taken) for file, taken in by_file.items()}
    return [f"{file}: {mean:.1f} s a test" for file, mean in sorted(means.items()) if mean > QUICK_S * beside]


GATE_KEY: Final = "lazyshard/gate"
"""Where pytest's cache keeps what the gate found, for scripts/checks/second_try.py."""


class Gate:
    """Watches a run, and fails it in the end. For the process that gathers the reports."""

    def __init__(self, tier: Tier, workers: int) -> None:
        self._tier = tier
        self._beside = max(1.0, workers / (os.cpu_count() or 1))
        self._skips: list[tuple[str, str]] = []
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note_skip(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note_skip(report)
        if self._tier == "quick" and report.nodeid not in TRAININGS:
            self._seconds[report.nodeid] += report.duration

    def _note_skip(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skips.append((report.nodeid, report.longrepr[2]))

    def _found(self) -> list[str]:
        return unexpected_skips(self._skips) + slow_files(self._seconds, self._beside)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.pluginmanager.hasplugin("cacheprovider"):
            session.config.cache.set(GATE_KEY, self._found())
        if self._found() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if found := self._found():
            terminalreporter.section("gate: see tests/tiers.py")
            terminalreporter.write_line("\n".join(found))
