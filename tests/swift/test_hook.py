"""The finder on stand-in packages; that it is in place once installed: tests/packaging/test_publishing.py."""

import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.resources
import importlib.util
import inspect
import pickle
import runpy
import sys
import threading
import types
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard_swift import hook, hooked
from tests.swift.programs import ROOT, python
from tests.swift.stand_ins import EXTEND, PTH, STAND_IN_EXTENSIONS, make_packages, package_folder, write

SOURCE: Final = """
value = 1

def double(number):
    return 2 * number
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(hooked, "_outcomes", {})
    # Nobody is to be warned of what fails here.
    monkeypatch.setenv(hooked.WARNED, "1")
    yield
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in {"engine", "engine_extension"}:
            del sys.modules[name]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose module `engine.main` is to be extended, and its extension."""
    make_packages(tmp_path, ["engine.main", "engine.other"], SOURCE)
    write(tmp_path / "engine_extension.py", EXTEND)
    monkeypatch.syspath_prepend(tmp_path)
    sys.meta_path.insert(0, hook.Finder({"engine.main": "engine_extension"}))
    return tmp_path


def calls() -> list[str]:
    found: list[str] = sys.modules["engine_extension"].calls
    return found


def test_module_is_extended_after_its_own_code(engine: Path) -> None:
    assert importlib.import_module("engine.main").value == 2
    assert importlib.import_module("engine.other").value == 1
    assert calls() == ["engine.main"]
    assert hooked.outcomes() == (hooked.ModuleOutcome("engine.main", "engine_extension", True),)


def test_extended_module_looks_like_any_other(engine: Path) -> None:
    module = importlib.import_module("engine.main")
    other = importlib.import_module("engine.other")
    assert module.__spec__ is not None
    assert type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert module.__loader__ is module.__spec__.loader
    assert vars(module).keys() == vars(other).keys()
    assert module.__file__ == str(engine / "engine" / "main.py")
    assert inspect.getsource(module) == SOURCE
    assert inspect.getsource(module.double).startswith("def double")
    assert pickle.loads(pickle.dumps(module.double)) is module.double
    assert importlib.resources.files("engine").joinpath("main.py").is_file()
    assert importlib.util.find_spec("engine.main") is module.__spec__


def test_specification_before_the_import(engine: Path) -> None:
    spec = importlib.util.find_spec("engine.main")
    assert spec is not None
    loader: Any = spec.loader
    assert spec.origin == loader.get_filename("engine.main") == str(engine / "engine" / "main.py")
    assert loader.get_source("engine.main") == SOURCE
    assert copy.copy(loader).get_source("engine.main") == SOURCE
    assert not hasattr(loader, "no_such_thing")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert (module.value, type(spec.loader)) == (2, importlib.machinery.SourceFileLoader)


def test_each_run_of_the_code_is_extended_once(engine: Path) -> None:
    module = importlib.import_module("engine.main")
    importlib.import_module("engine.main")
    assert calls() == ["engine.main"]
    assert importlib.reload(module).value == 2
    assert calls() == ["engine.main"] * 2
    assert module.__spec__ is not None
    assert type(module.__spec__.loader) is type(module.__loader__) is importlib.machinery.SourceFileLoader
    del sys.modules["engine.main"]
    assert importlib.import_module("engine.main").value == 2
    assert calls() == ["engine.main"] * 3


def test_module_run_as_main_is_left_alone(engine: Path) -> None:
    assert runpy.run_module("engine.main")["value"] == 1
    assert "engine_extension" not in sys.modules


def test_threads_that_import_at_once(engine: Path) -> None:
    count = 16
    write(engine / "engine" / "main.py", f"import engine.other\n{SOURCE}")
    start, seen = threading.Barrier(count), []

    def run(number: int) -> None:
        start.wait()
        # Half of them meet on another module first.
        if number % 2:
            importlib.import_module("engine.other")
        seen.append(importlib.import_module("engine.main").value)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [2] * count
    assert calls() == ["engine.main"]


def test_error_of_the_module_is_its_own(engine: Path) -> None:
    source = engine / "engine" / "main.py"
    write(source, "raise LookupError('its own')")
    with pytest.raises(LookupError, match="its own"):
        importlib.import_module("engine.main")
    assert "engine.main" not in sys.modules
    assert hooked.outcomes() == ()
    write(source, SOURCE * 2)
    importlib.invalidate_caches()
    assert importlib.import_module("engine.main").value == 2


@pytest.mark.parametrize(
    ("extension", "reason"),
    [
        ("def extend(module):\n    raise KeyError('gone')", "KeyError: 'gone'"),
        ("def extend(module):\n    module.gone", "AttributeError: it has no gone"),
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("extent = 1", "AttributeError: module 'engine_extension' has no attribute 'extend'"),
        ("def extend(", "SyntaxError: '(' was never closed (engine_extension.py, line 1)"),
    ],
)
def test_extension_that_fails_harms_nothing(extension: str, reason: str, engine: Path) -> None:
    write(engine / "engine_extension.py", extension)
    assert importlib.import_module("engine.main").value == 1
    assert hooked.failures() == (hooked.ModuleOutcome("engine.main", "engine_extension", False, reason),)


def test_extension_or_its_package_that_is_missing(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (engine / "engine_extension.py").unlink()
    assert importlib.import_module("engine.main").value == 1
    (failure,) = hooked.failures()
    assert failure.reason == "ModuleNotFoundError: No module named 'engine_extension'"
    # The package goes while it is used.
    del sys.modules["engine.main"]
    monkeypatch.setitem(sys.modules, "lazyshard_swift.hooked", None)
    assert importlib.import_module("engine.main").value == 1


class Asking(importlib.abc.MetaPathFinder):
    """Finds nothing by itself, but asks all finders, as other post-import hooks do."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        self.asked.append(fullname)
        if self.asked.count(fullname) > 1:
            return None
        return importlib.util.find_spec(fullname)


@pytest.mark.parametrize("place", [0, 1])
def test_other_finder_that_asks_all_finders(place: int, engine: Path) -> None:
    sys.meta_path.insert(place, Asking())
    module = importlib.import_module("engine.main")
    assert (module.value, calls()) == (2, ["engine.main"])


def test_finders_that_are_odd(engine: Path) -> None:
    # Before Python 3.12 a finder without find_spec was no error; and the finder itself must not ask itself.
    sys.meta_path.insert(0, types.SimpleNamespace())
    finder = sys.meta_path[1]
    assert isinstance(finder, hook.Finder)
    spec = finder.find_spec("engine.main", [str(engine / "engine")])
    assert spec is not None
    assert isinstance(spec.loader, hook.Loader)


def test_other_modules_are_none_of_its_business(engine: Path) -> None:
    asking = Asking()
    finder = hook.Finder({"engine.main": "engine_extension"})
    sys.meta_path[:] = [asking]
    assert finder.find_spec("engine.other") is None
    assert asking.asked == []


def test_module_that_is_not_there_or_a_namespace_package_in_its_place(engine: Path) -> None:
    (engine / "engine" / "main.py").unlink()
    with pytest.raises(ModuleNotFoundError, match=r"engine\.main"):
        importlib.import_module("engine.main")
    (engine / "engine" / "main").mkdir()
    importlib.invalidate_caches()
    assert importlib.import_module("engine.main").__name__ == "engine.main"


def test_zip_file_whose_modules_share_a_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_packages(tmp_path, ["engine.main", "engine.other"], SOURCE)
    write(tmp_path / "engine_extension.py", EXTEND)
    archive = tmp_path / "engine.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in (tmp_path / "engine").glob("*.py"):
            file.write(path, f"engine/{path.name}")
        file.write(tmp_path / "engine_extension.py", "engine_extension.py")
    monkeypatch.syspath_prepend(archive)
    sys.meta_path.insert(0, hook.Finder({"engine.main": "engine_extension"}))
    assert [importlib.import_module(f"engine.{name}").value for name in ("main", "other")] == [2, 1]
    assert calls() == ["engine.main"]


def finders() -> list[Any]:
    return [finder for finder in sys.meta_path if getattr(finder, hook.MARK, None) is True]


def test_install_is_first_and_once() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in finders()]
    assert not hook.active()
    hook.install()
    hook.install()
    assert hook.active()
    assert [type(finder) for finder in finders()] == [hook.Finder]
    assert isinstance(sys.meta_path[0], hook.Finder)


def test_pth_is_one_line_that_site_executes() -> None:
    (line,) = PTH.read_text(encoding="ascii").splitlines()
    assert line.startswith("import ")


REPORT: Final = """
def report():
    import sys
    return [type(finder).__name__ for finder in sys.meta_path if hasattr(finder, "lazyshard_swift")]
"""


def test_pth_imports_the_bare_package_until_swift_is_imported(tmp_path: Path) -> None:
    code = f"""
import sys
{REPORT}
line = open({str(PTH)!r}).read()
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
"""
    make_packages(tmp_path, ["swift.version"])
    done = python(code, tmp_path, package_folder(), site=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("module", hook.EXTENSIONS)
def test_each_module_of_ms_swift_goes_to_its_extension(module: str, tmp_path: Path) -> None:
    code = f"""
{STAND_IN_EXTENSIONS}
exec(open({str(PTH)!r}).read())
import {module}
print([extension.__name__ for extension in extensions for name in extension.extended if name == {module!r}])
"""
    make_packages(tmp_path, hook.EXTENSIONS)
    done = python(code, tmp_path, package_folder(), LAZYSHARD_SWIFT_WARNED="1", site=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{[hook.EXTENSIONS[module]]}\n", "")


def test_extensions_load_nothing_that_a_run_without_the_flag_does_not_need() -> None:
    code = f"""
import importlib, sys
for name in {sorted(set(hook.EXTENSIONS.values()))}:
    importlib.import_module(name)
print([name for name in sys.modules if name.startswith("lazyshard.data")])
"""
    done = python(code, package_folder(), ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
