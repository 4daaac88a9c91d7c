"""The finder on stand-in packages, and what an extension that fails comes to.

That the finder is in place once installed: tests/packaging/test_publishing.py.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import pickle
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard_swift import hook, ms_swift
from lazyshard_swift.ms_swift import wrap
from tests.stream.streams import raised, refusal_of
from tests.swift.programs import make_packages, package_folder, python, write
from tests.swift.warm import ROOT

SOURCE: Final = "value = 1\ndef double(number):\n    return 2 * number\n"
EXTENSION: Final = "def extend(module):\n    module.value += 1\n"
PTH: Final = ROOT / "integrations" / "swift" / "lazyshard_swift.pth"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(ms_swift, "outcomes", {})
    monkeypatch.setattr(ms_swift, "version", lambda: "4.6.0")
    # Set first: what the code under test sets is then taken back as well.
    for name in (ms_swift.WARNED, *ms_swift._RANKS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in {"engine", "engine_extension"}:
            del sys.modules[name]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose module `engine.main` is to be extended, and its extension."""
    make_packages(tmp_path, ["engine.main", "engine.other"], SOURCE)
    write(tmp_path / "engine_extension.py", EXTENSION)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hook, "EXTENSIONS", {"engine.main": "engine_extension"})
    sys.meta_path.insert(0, hook)
    return tmp_path


def load(name: str = "main") -> Any:
    return importlib.import_module(f"engine.{name}")


def test_extended_module_looks_like_others_and_is_extended_once(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, other = load(), load("other")
    assert (module.value, other.value, ms_swift.outcomes, caplog.messages) == (2, 1, {"engine.main": ""}, [])
    assert type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert module.__loader__ is module.__spec__.loader
    assert vars(module).keys() == vars(other).keys()
    assert module.__file__ == str(engine / "engine" / "main.py")
    assert inspect.getsource(module) == SOURCE
    assert pickle.loads(pickle.dumps(module.double)) is module.double
    found: Any = importlib.util.find_spec("engine.main")
    assert found is module.__spec__
    assert importlib.reload(module).value == 2
    assert type(module.__spec__.loader) is type(module.__loader__) is importlib.machinery.SourceFileLoader
    del sys.modules["engine.main"]
    assert load().value == 2


def test_module_run_as_main_is_left_alone(engine: Path) -> None:
    assert runpy.run_module("engine.main")["value"] == 1
    assert "engine_extension" not in sys.modules


def test_error_of_the_module_is_its_own(engine: Path) -> None:
    source = engine / "engine" / "main.py"
    write(source, "raise LookupError('its own')")
    raised(LookupError, load)
    assert "engine.main" not in sys.modules
    assert ms_swift.outcomes == {}
    write(source, SOURCE * 2)
    importlib.invalidate_caches()
    assert load().value == 2


def extension(engine: Path, text: str) -> None:
    write(engine / "engine_extension.py", text)
    sys.modules.pop("engine_extension", None)
    importlib.invalidate_caches()


def test_extension_that_fails_harms_nothing(engine: Path) -> None:
    (engine / "engine_extension.py").unlink()
    assert load().value == 1
    assert ms_swift.outcomes == {"engine.main": "ModuleNotFoundError: No module named 'engine_extension'"}
    # The last outcome counts. Of different lengths, so that no compiled one passes for another.
    for text, value, reason in (
        ("def extend(module):\n    raise KeyError('gone')", 1, "KeyError: 'gone'"),
        ("def extend(module):\n    module.gone", 1, "AttributeError: it has no gone"),
        ("extent = 1", 1, "AttributeError: module 'engine_extension' has no attribute 'extend'"),
        ("def extend(", 1, "SyntaxError: '(' was never closed (engine_extension.py, line 1)"),
        (EXTENSION * 2, 2, ""),
    ):
        extension(engine, text)
        assert importlib.reload(load()).value == value
        assert ms_swift.outcomes == {"engine.main": reason}


def test_finders_that_are_odd_and_specification_before_the_import(engine: Path) -> None:
    # Before Python 3.12 a finder without find_spec was no error; and the finder itself must not ask itself.
    finder, odd = sys.meta_path[0], types.SimpleNamespace()
    sys.meta_path.insert(0, odd)
    spec = finder.find_spec("engine.main", [str(engine / "engine")])
    assert spec is not None
    sys.meta_path.remove(odd)
    loader: Any = spec.loader
    assert loader.get_source("engine.main") == SOURCE
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert (module.value, type(spec.loader)) == (2, importlib.machinery.SourceFileLoader)
    assert finder.find_spec("engine.other", None) is None, "other modules are none of its business"


def test_package_that_goes_while_it_is_used_and_module_that_is_not_there(engine: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "lazyshard_swift.ms_swift", None)
    assert load().value == 1
    del sys.modules["engine.main"]
    (engine / "engine" / "main.py").unlink()
    importlib.invalidate_caches()
    raised(ModuleNotFoundError, load)
    # A namespace package in its place.
    (engine / "engine" / "main").mkdir()
    importlib.invalidate_caches()
    assert load().__name__ == "engine.main"


def test_pth_imports_the_bare_package_until_swift_is_imported(tmp_path: Path) -> None:
    code = f"""
import importlib, sys, types
def report():
    return [type(finder).__name__ for finder in sys.meta_path if hasattr(finder, "lazyshard_swift")]
line = open({str(PTH)!r}).read()
assert line.startswith("import ") and line.count("\\n") == 1
before = set(sys.modules)
# Virtual environments run it twice.
exec(line); exec(line)
assert set(sys.modules) - before == {{"lazyshard_swift"}}, set(sys.modules) - before
assert report() == [type(sys.meta_path[0]).__name__] == ["function"]
import swift
assert set(sys.modules) - before == {{"swift", "lazyshard_swift", "lazyshard_swift.hook"}}, set(sys.modules) - before
assert sys.modules["lazyshard_swift.hook"].active()
# Imported anew, as where the package was replaced, it extends once all the same.
del sys.modules["lazyshard_swift"]
exec(line)
assert report() == ["function"] * 2
extended = []
for name in {sorted(set(hook.EXTENSIONS.values()))}:
    module = sys.modules[name] = types.ModuleType(name)
    module.extend = lambda target, name=name: extended.append((target.__name__, name))
for module in {list(hook.EXTENSIONS)}:
    importlib.import_module(module)
assert extended == {list(hook.EXTENSIONS.items())}, extended
"""
    make_packages(tmp_path, hook.EXTENSIONS)
    done = python(code, tmp_path, package_folder(), LAZYSHARD_SWIFT_WARNED="1", site=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_extensions_load_nothing_that_a_run_without_the_flag_does_not_need() -> None:
    code = f"""
import importlib, sys
for name in {sorted(set(hook.EXTENSIONS.values()))}:
    importlib.import_module(name)
print([name for name in sys.modules if name.startswith("lazyshard.data")])
"""
    done = python(code, package_folder(), ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_failure_and_other_version_are_told_once_on_one_line(engine: Path, monkeypatch: Any, caplog: Any) -> None:
    fails, works = "def extend(module):\n    raise ValueError('one\\n  two')", EXTENSION
    for version, text, value, name, failure in (
        ("4.6.0", fails, 1, "ms-swift 4.6.0", "Could not be extended: engine.main (ValueError: one two)"),
        ("4.7.0", works, 2, "ms-swift 4.7.0 ", ""),
        (None, works, 2, "ms-swift of an unknown version ", ""),
        ("3.12.6", works, 1, "", ""),
    ):
        monkeypatch.setattr(ms_swift, "version", lambda version=version: version)
        monkeypatch.delenv(ms_swift.WARNED, raising=False)
        ms_swift.outcomes.clear()
        caplog.clear()
        extension(engine, text)
        assert importlib.reload(load()).value == value
        if version == "3.12.6":
            # Of one that is too old the launcher alone is touched, which refuses the flag.
            assert (ms_swift.outcomes, caplog.messages) == ({}, [])
            load().__name__ = "swift.cli.main"
            ms_swift.extend(load(), "engine_extension")
            assert (load().value, caplog.messages) == (2, [])
            continue
        ms_swift.warn_once()
        ((logger, level, told),) = caplog.record_tuples
        assert (logger, level) == ("lazyshard", logging.WARNING)
        assert name in told and failure in told and ("Could not be extended" in told) == bool(failure)


def test_first_process_alone_tells(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for variables, told in (
        ({}, True),
        ({"RANK": "0", "NODE_RANK": "0", "GROUP_RANK": ""}, True),
        ({"RANK": "10"}, False),
        # The launcher of a second machine.
        ({"NODE_RANK": "1"}, False),
        ({ms_swift.WARNED: "1"}, False),
    ):
        with monkeypatch.context() as patch:
            patch.delenv(ms_swift.WARNED, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            caplog.clear()
            ms_swift.warn_once()
            assert len(caplog.messages) == told, variables


def test_plain_line_without_logging(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # As in a process that has not set up logging; pytest has.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    ms_swift.warn_once()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lazyshard: warning: ms-swift 4.6.0 ") and shown.err.count("\n") == 1
    # And where nobody hears it.
    monkeypatch.delenv(ms_swift.WARNED)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        ms_swift.warn_once()
        # What is still in its buffer must not fail at close.
        raised(OSError, full.close)


class Base:
    def inherited(self) -> str:
        return "inherited"


@pytest.fixture
def owner() -> Any:
    class Owner(Base):
        value = 3

        def first(self, number: int) -> int:
            """Doc of the first."""
            return number

        def second(self) -> str:
            return "second"

    return Owner


def adding(text: str) -> Callable[..., Any]:
    return lambda original, *arguments: f"{original(*arguments)} {text}"


def test_functions_are_replaced_and_pass_for_the_originals(owner: Any) -> None:
    original = owner.first
    wrap(owner, {"first": adding("a"), "second": adding("b")})
    found = owner.first
    assert (found.__name__, found.__doc__, found.__wrapped__) == ("first", "Doc of the first.", original)
    # Wrapped twice both count.
    wrap(owner, {"second": adding("c")})
    assert (owner().first(1), owner().second()) == ("1 a", "second b c")
    module = types.ModuleType("some.module")
    vars(module)["first"] = lambda: "first"
    wrap(module, {"first": adding("a")})
    assert module.first() == "first a"


def test_nothing_is_replaced_if_one_is_missing_or_takes_something_else(owner: Any) -> None:
    before, own = dict(vars(owner)), adding("a")
    for ours, missing in (
        ({"first": own, "third": own}, "no third"),
        ({"first": own, "value": own}, "no value"),
        # One of its base's would be replaced for all of its other classes too, or hidden for this one.
        ({"first": own, "inherited": own}, "no inherited"),
        ({"second": own, "first self name": own}, r"takes \(self, number\), expected \(self, name"),
    ):
        refusal_of(AttributeError, missing, wrap, owner, ours)
        assert dict(vars(owner)) == before
    wrap(owner, {"first self number": own, "second self": adding("b")})
    assert (owner().first(1), owner().second()) == ("1 a", "second b")
