from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from lazyshard_swift import hooked, ms_swift
from lazyshard_swift.hooked import within, wrap
from tests.swift.programs import python
from tests.swift.stand_ins import PTH, make_packages, make_swift, package_folder


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hooked, "_outcomes", {})
    # Set first: what the code under test sets is then taken back as well.
    for name in (hooked.WARNED, *hooked._RANKS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    hooked._installed.cache_clear()
    yield
    hooked._installed.cache_clear()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module, and an extension that counts."""

    def extend(target: types.ModuleType) -> None:
        target.value += 1  # type: ignore[attr-defined]

    module = types.ModuleType("engine")
    extension = types.ModuleType("engine_extension")
    vars(module)["value"] = 1
    vars(extension)["extend"] = extend
    monkeypatch.setitem(sys.modules, "engine_extension", extension)
    return module


def install(monkeypatch: pytest.MonkeyPatch, version: str | None, folder: Path | None = None) -> None:
    monkeypatch.setattr(ms_swift, "version", lambda: version)
    monkeypatch.setattr(ms_swift, "folder", lambda: folder)


def test_supported_and_extended_is_silent(
    engine: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "4.6.0")
    hooked.extend(engine, "engine_extension")
    assert vars(engine)["value"] == 2
    assert hooked.outcomes() == (hooked.ModuleOutcome("engine", "engine_extension", True, ""),)
    assert hooked.failures() == ()
    assert caplog.messages == []


def test_last_outcome_counts(engine: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "4.6.0")
    value = vars(engine).pop("value")
    hooked.extend(engine, "engine_extension")
    assert [outcome.reason for outcome in hooked.failures()] == ["AttributeError: it has no value"]
    vars(engine)["value"] = value
    hooked.extend(engine, "engine_extension")
    assert hooked.failures() == ()


def test_failure_is_told_once_on_one_line(
    engine: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def extend(module: types.ModuleType) -> None:
        raise ValueError("one\n  two")

    lacking = [point for point in ms_swift.POINTS if point.name != "_show_dataset"]
    install(monkeypatch, "4.6.0", make_swift(tmp_path, lacking))
    vars(sys.modules["engine_extension"])["extend"] = extend
    hooked.extend(engine, "engine_extension")
    hooked.extend(engine, "engine_extension")
    hooked.warn_once()
    ((name, level, text),) = caplog.record_tuples
    assert (name, level) == ("lazyshard", logging.WARNING)
    missing = "swift.pipelines.train.sft.SwiftSft._show_dataset ("
    assert all(words in text for words in ("ms-swift 4.6.0", missing, "engine (engine_extension: ValueError: one two)"))


@pytest.mark.parametrize(("version", "name"), [("4.7.0", "4.7.0"), ("5.0", "5.0"), (None, "of an unknown version")])
def test_other_version_is_told_once(
    version: str | None,
    name: str,
    engine: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(monkeypatch, version)
    hooked.extend(engine, "engine_extension")
    hooked.extend(engine, "engine_extension")
    assert vars(engine)["value"] == 3
    (text,) = caplog.messages
    assert f"ms-swift {name} " in text and "Could not be hooked" not in text


def test_of_an_ms_swift_that_is_too_old_only_the_launcher_is_touched(
    engine: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "3.12.6")
    hooked.extend(engine, "engine_extension")
    assert (vars(engine)["value"], hooked.outcomes()) == (1, ())
    engine.__name__ = hooked.LAUNCHER
    hooked.extend(engine, "engine_extension")
    assert vars(engine)["value"] == 2
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, True),
        ({"RANK": "0"}, True),
        ({"RANK": ""}, True),
        ({"RANK": "0", "NODE_RANK": "0", "GROUP_RANK": "0"}, True),
        ({"RANK": "1"}, False),
        ({"RANK": "11"}, False),
        # The launcher of a second machine.
        ({"NODE_RANK": "1"}, False),
        ({hooked.WARNED: "1"}, False),
    ],
)
def test_first_process_alone_tells(
    variables: dict[str, str], told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "4.7.0")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    hooked.warn_once()
    assert len(caplog.messages) == told


def test_plain_line_without_logging(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, "4.7.0")
    # As in a process that has not set up logging; pytest has.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    hooked.warn_once()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lazyshard: warning: ms-swift 4.7.0 ") and shown.err.count("\n") == 1
    # And where nobody hears it.
    monkeypatch.delenv(hooked.WARNED)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        hooked.warn_once()
        # What is still in its buffer must not fail at close.
        with pytest.raises(OSError):
            full.close()


JOB: Final = f"""
import os, subprocess, sys
# A job in small: the launcher, an agent, and two ranks of it, each with a worker.
level = int(sys.argv[1]) if len(sys.argv) > 1 else 0
exec(open({str(PTH)!r}).read())
if level == 0:
    import swift.cli.main
elif level >= 2:
    import swift.trainers.mixin
if level < 3:
    for rank in ("0", "1") if level == 1 else (None,):
        variables = dict(os.environ) if rank is None else os.environ | {{"RANK": rank}}
        subprocess.run([sys.executable, "-S", "-c", os.environ["JOB"], str(level + 1)], env=variables, check=True)
"""


@pytest.mark.parametrize("failing", ["cli/main.py", "trainers/mixin.py"])
def test_one_warning_in_a_whole_job(failing: str, tmp_path: Path) -> None:
    """What fails in the launcher already is told there, what fails in the ranks by rank 0."""
    stand_ins = """
import sys, types
for name in ("launcher", "huggingface"):
    module = sys.modules[f"lazyshard_swift.{name}"] = types.ModuleType(name)
    module.extend = lambda target: target.gone if target.__file__.endswith(FAILING) else None
"""
    make_swift(tmp_path, ms_swift.POINTS)
    make_packages(tmp_path, ["elsewhere"], "def __getattr__(name):\n    return print\n")
    done = python(
        f"FAILING = {failing!r}\n{stand_ins}{JOB}",
        tmp_path,
        package_folder(),
        site=False,
        JOB=f"FAILING = {failing!r}\n{stand_ins}{JOB}",
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("\n") == 1, done.stderr
    module = "swift." + failing.removesuffix(".py").replace("/", ".")
    assert f"Could not be hooked: {module} (" in done.stderr
    assert done.stderr.startswith("lazyshard: warning: ms-swift 4.6.0 is installed, ")


def make_owner() -> Any:
    class Base:
        def inherited(self) -> str:
            return "inherited"

    class Owner(Base):
        value = 3

        def first(self, number: int) -> int:
            """Doc of the first."""
            return number

        def second(self) -> str:
            return "second"

    return Owner


def adding(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda original: lambda *arguments: f"{original(*arguments)} {text}"


def failing(original: Callable[..., Any]) -> Callable[..., Any]:
    raise RuntimeError(f"cannot wrap {original.__name__}")


def test_functions_are_replaced_and_pass_for_the_originals() -> None:
    owner = make_owner()
    original = owner.first
    wrap(owner, {"first": adding("a"), "second": adding("b")})
    assert (owner().first(1), owner().second()) == ("1 a", "second b")
    found = owner.first
    assert (found.__name__, found.__doc__, found.__wrapped__) == ("first", "Doc of the first.", original)
    # Wrapped twice both count.
    wrap(owner, {"second": adding("c")})
    assert owner().second() == "second b c"
    module = ModuleType("some.module")
    vars(module)["first"] = lambda: "first"
    wrap(module, {"first": adding("a")})
    assert module.first() == "first a"


@pytest.mark.parametrize(
    ("makers", "missing"),
    [
        (["first", "third"], "no third"),
        (["third", "first", "fourth"], "no third, no fourth"),
        (["first", "value"], "no value"),
        # One of its base's would be replaced for all of its other classes too, or hidden for this one.
        (["first", "inherited"], "no inherited"),
        ({"first": adding("a"), "second": failing}, "cannot wrap second"),
        ({}, None),
    ],
)
def test_nothing_is_replaced_if_one_is_missing_or_cannot_be_made(makers: Any, missing: str | None) -> None:
    owner = make_owner()
    before = dict(vars(owner))
    with pytest.raises((AttributeError, RuntimeError), match=missing) if missing else contextlib.nullcontext():
        wrap(owner, dict.fromkeys(makers, adding("a")) if isinstance(makers, list) else makers)
    assert dict(vars(owner)) == before


def test_method_runs_within_a_context_of_its_object() -> None:
    owner, seen = make_owner(), []

    @contextlib.contextmanager
    def context(instance: Any) -> Iterator[None]:
        seen.append(("before", type(instance)))
        yield
        seen.append(("after", type(instance)))

    wrap(owner, {"first": within(context)})
    assert owner().first(number=1) == 1
    assert seen == [("before", owner), ("after", owner)]
