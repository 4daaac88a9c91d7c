"""The finder on stand-in packages, and what an extension that fails comes to.

That the finder is in place once installed: tests/packaging/test_publishing.py.
"""

from __future__ import annotations

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
from tests.swift.programs import ROOT, python
from tests.swift.stand_ins import PTH, make_packages, package_folder, write

SOURCE: Final = """
value = 1

def double(number):
    return 2 * number
"""
EXTENSION: Final = """
calls = []

def extend(module):
    calls.append(module.__name__)
    module.value += 1
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(ms_swift, "outcomes", {})
    # Set first: what the code under test sets is then taken back as well.
    for name in (ms_swift.WARNED, *ms_swift._RANKS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in {"engine", "engine_extension"}:
            del sys.modules[name]


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(ms_swift, "version", lambda: version)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose module `engine.main` is to be extended, and its extension."""
    make_packages(tmp_path, ["engine.main", "engine.other"], SOURCE)
    write(tmp_path / "engine_extension.py", EXTENSION)
    monkeypatch.syspath_prepend(tmp_path)
    sys.meta_path.insert(0, hook.Finder({"engine.main": "engine_extension"}))
    install(monkeypatch, "4.6.0")
    return tmp_path


def load(name: str = "main") -> Any:
    return importlib.import_module(f"engine.{name}")


def calls() -> list[str]:
    found: list[str] = sys.modules["engine_extension"].calls
    return found


def test_extended_module_looks_like_any_other(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, other = load(), load("other")
    assert (module.value, other.value, calls()) == (2, 1, ["engine.main"])
    assert ms_swift.outcomes == {"engine.main": ""}
    assert caplog.messages == []
    assert type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert module.__loader__ is module.__spec__.loader
    assert vars(module).keys() == vars(other).keys()
    assert module.__file__ == str(engine / "engine" / "main.py")
    assert inspect.getsource(module) == SOURCE
    assert pickle.loads(pickle.dumps(module.double)) is module.double
    assert importlib.util.find_spec("engine.main") is module.__spec__


def test_each_run_of_the_code_is_extended_once(engine: Path) -> None:
    module = load()
    assert (load(), calls()) == (module, ["engine.main"])
    assert importlib.reload(module).value == 2
    assert type(module.__spec__.loader) is type(module.__loader__) is importlib.machinery.SourceFileLoader
    del sys.modules["engine.main"]
    assert (load().value, len(calls())) == (2, 3)


def test_module_run_as_main_is_left_alone(engine: Path) -> None:
    assert runpy.run_module("engine.main")["value"] == 1
    assert "engine_extension" not in sys.modules


def test_error_of_the_module_is_its_own(engine: Path) -> None:
    source = engine / "engine" / "main.py"
    write(source, "raise LookupError('its own')")
    with pytest.raises(LookupError):
        load()
    assert "engine.main" not in sys.modules
    assert ms_swift.outcomes == {}
    write(source, SOURCE * 2)
    importlib.invalidate_caches()
    assert load().value == 2


@pytest.mark.parametrize(
    ("extension", "reason"),
    [
        ("def extend(module):\n    raise KeyError('gone')", "KeyError: 'gone'"),
        ("def extend(module):\n    module.gone", "AttributeError: it has no gone"),
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("extent = 1", "AttributeError: module 'engine_extension' has no attribute 'extend'"),
        ("def extend(", "SyntaxError: '(' was never closed (engine_extension.py, line 1)"),
        (None, "ModuleNotFoundError: No module named 'engine_extension'"),
    ],
)
def test_extension_that_fails_harms_nothing(extension: str | None, reason: str, engine: Path) -> None:
    if extension is None:
        (engine / "engine_extension.py").unlink()
    else:
        write(engine / "engine_extension.py", extension)
    assert load().value == 1
    assert ms_swift.outcomes == {"engine.main": reason}
    # The last outcome counts.
    write(engine / "engine_extension.py", EXTENSION * 2)
    importlib.invalidate_caches()
    sys.modules.pop("engine_extension", None)
    importlib.reload(load())
    assert ms_swift.outcomes == {"engine.main": ""}


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


def test_package_that_goes_while_it_is_used_and_module_that_is_not_there(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lazyshard_swift.ms_swift", None)
    assert load().value == 1
    del sys.modules["engine.main"]
    (engine / "engine" / "main.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError):
        load()
    # A namespace package in its place.
    (engine / "engine" / "main").mkdir()
    importlib.invalidate_caches()
    assert load().__name__ == "engine.main"


def test_install_is_first_and_once() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, hook.MARK)]
    assert not hook.active()
    hook.install()
    hook.install()
    assert hook.active()
    assert [type(finder) for finder in sys.meta_path if hasattr(finder, hook.MARK)] == [hook.Finder]
    assert isinstance(sys.meta_path[0], hook.Finder)


def test_pth_imports_the_bare_package_until_swift_is_imported_whose_modules_go_to_their_extensions(
    tmp_path: Path,
) -> None:
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
assert (report(), sys.meta_path[0].__class__.__name__) == (["function"], "function")
import swift
assert set(sys.modules) - before == {{"swift", "lazyshard_swift", "lazyshard_swift.hook"}}, set(sys.modules) - before
assert report() == ["Finder"] and sys.meta_path[0].__class__.__name__ == "Finder"
exec(line)
assert report() == ["Finder"]
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


def test_failure_is_told_once_on_one_line(
    engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "4.6.0")
    write(engine / "engine_extension.py", "def extend(module):\n    raise ValueError('one\\n  two')")
    importlib.reload(load())
    ms_swift.warn_once()
    ((name, level, text),) = caplog.record_tuples
    assert (name, level) == ("lazyshard", logging.WARNING)
    assert all(words in text for words in ("ms-swift 4.6.0", "engine.main (ValueError: one two)"))


@pytest.mark.parametrize(("version", "name"), [("4.7.0", "4.7.0"), (None, "of an unknown version")])
def test_other_version_is_extended_and_told_once(
    version: str | None, name: str, engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, version)
    assert importlib.reload(load()).value == 2
    (text,) = caplog.messages
    assert f"ms-swift {name} " in text and "Could not be extended" not in text


def test_of_an_ms_swift_that_is_too_old_only_the_launcher_is_touched(
    engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "3.12.6")
    module = load()
    assert (module.value, ms_swift.outcomes) == (1, {})
    module.__name__ = ms_swift.LAUNCHER
    ms_swift.extend(module, "engine_extension")
    assert (module.value, caplog.messages) == (2, [])


def test_first_process_alone_tells(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    install(monkeypatch, "4.7.0")
    for variables, told in (
        ({}, True),
        ({"RANK": "0", "NODE_RANK": "0", "GROUP_RANK": ""}, True),
        ({"RANK": "1"}, False),
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
    install(monkeypatch, "4.7.0")
    # As in a process that has not set up logging; pytest has.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    ms_swift.warn_once()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lazyshard: warning: ms-swift 4.7.0 ") and shown.err.count("\n") == 1
    # And where nobody hears it.
    monkeypatch.delenv(ms_swift.WARNED)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        ms_swift.warn_once()
        # What is still in its buffer must not fail at close.
        with pytest.raises(OSError):
            full.close()


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


@pytest.mark.parametrize(
    ("ours", "missing"),
    [
        ({"first": adding("a"), "third": adding("a")}, "no third"),
        ({"first": adding("a"), "value": adding("a")}, "no value"),
        # One of its base's would be replaced for all of its other classes too, or hidden for this one.
        ({"first": adding("a"), "inherited": adding("a")}, "no inherited"),
        ({"second": adding("a"), "first self name": adding("a")}, r"takes \(self, number\), expected \(self, name"),
    ],
)
def test_nothing_is_replaced_if_one_is_missing_or_takes_something_else(owner: Any, ours: Any, missing: str) -> None:
    before = dict(vars(owner))
    with pytest.raises(AttributeError, match=missing):
        wrap(owner, ours)
    assert dict(vars(owner)) == before
    wrap(owner, {"first self number": adding("a"), "second self": adding("b")})
    assert (owner().first(1), owner().second()) == ("1 a", "second b")
