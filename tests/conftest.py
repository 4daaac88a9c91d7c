"""What holds for every test: no busy machine and no ignored signal fails one, and what takes longest begins first."""

import gc
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests import tiers
from tests.harness.disks import fast_folder
from tests.harness.processes.nursery import Nursery

sys.dont_write_bytecode = False  # Compiled files are kept, else every child that imports torch or ms-swift compiles
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Time says nothing here: cores are shared, and Hypothesis' first imports count as slow generation.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

EXAMPLES_FACTOR: Final = "PROPERTY_EXAMPLES"
"""Environment variable: so many times the examples of each property, drawn anew; `scripts/test_faults properties`."""

QUICK_EXAMPLES: Final = 5
"""The quick tier tries a quarter of the examples that a property asks for, and at least so many."""

_LONG = ("swift", "store", "packaging", "producer", "crash", "faults")
"""Folders whose files take longest: they begin first, so that in the end no process waits for one that began last."""

_SWIFT_UNIT: Final = "tests/swift/unit"

_OPTIONAL = ("torch", "torchdata", "swift", "megatron", "mcore_bridge", "ray", "mkdocs", "tokenizers", "transformers")
"""What `scripts/environment` may leave out."""


class _OptionalModule(pytest.Module):
    """A test file, skipped with the reason where it imports a part that is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            part = cause.name.partition(".")[0] if isinstance(cause, ModuleNotFoundError) and cause.name else ""
            if part in _OPTIONAL and find_spec(part) is None:
                pytest.skip(f"{part} is not installed", allow_module_level=True)
            raise


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=tiers.TIERS, default="full", help="which tests: see tests/tiers.py")
    parser.addoption("--gate", action="store_true", help="fail by unexpected skips and slow files too")


def pytest_configure(config: pytest.Config) -> None:
    # torchdata still calls what torch has given up; nothing of the product does.
    config.addinivalue_line("filterwarnings", "ignore:'set_vital' is deprecated:UserWarning")
    if config.getoption("--gate") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(
            tiers.Gate(config.getoption("--tier"), config.getoption("numprocesses", None) or 1)
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Has a file stay in one process, and all unit tests of ms-swift, which takes half a minute to import."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    scheduler = LoadFileScheduling(config, log)
    of_file = scheduler._split_scope
    scheduler._split_scope = lambda nodeid: _SWIFT_UNIT if nodeid.startswith(_SWIFT_UNIT) else of_file(nodeid)
    return scheduler


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _OptionalModule.from_parent(parent, path=module_path)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Has the quick tier import no file of which it takes no test."""
    quick = config.getoption("--tier") == "quick" and collection_path.suffix == ".py"
    return True if quick and tiers.is_full(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Has no collection of garbage look through the tests and all that they have imported, ten thousand times."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps those of the tier, the files of those folders first, all else in order; scales what Hypothesis tries."""
    here = Path(__file__).parent
    tiers.mark_trainings(items)
    config.hook.pytest_deselected(items=tiers.select(items, config.getoption("--tier")))
    _scale({item.obj for item in items if isinstance(item, pytest.Function)}, config.getoption("--tier") == "quick")

    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0]
        return _LONG.index(folder) if folder in _LONG else len(_LONG)

    items.sort(key=turn)


@pytest.fixture(scope="session", autouse=True)
def _signals_of_children() -> Iterator[None]:
    """Has no child inherit a signal that is ignored here, as SIGHUP under nohup: a handler is not inherited."""
    numbers = signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        # Ctrl-C is what some tests are about: it is ignored where a shell without job control started them with `&`.
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def _scale(tests: set[Any], quick: bool) -> None:
    factor = int(os.environ.get(EXAMPLES_FACTOR, "1"))
    found = DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples")
    for test in filter(is_hypothesis_test, tests):
        own = test._hypothesis_internal_use_settings  # Of what a test asks for by its decorator no profile has a say
        if factor > 1:
            own = settings(
                own, max_examples=own.max_examples * factor, derandomize=False, database=found, print_blob=True
            )
        elif quick:
            own = settings(own, max_examples=min(own.max_examples, max(QUICK_EXAMPLES, own.max_examples // 4)))
        test._hypothesis_internal_use_settings = own


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder that costs no writes to a disk, where there is one."""
    with fast_folder(tmp_path) as directory:
        yield directory


@pytest.fixture(scope="module")
def forks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """A process that has loaded what the file names as `LOADED` and no other tests: its forks cost milliseconds."""
    with Nursery(tmp_path_factory.mktemp("forks"), *request.module.LOADED) as found:
        yield found
