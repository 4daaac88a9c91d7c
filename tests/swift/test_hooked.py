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
from lazyshard_swift.hooked import wrap
from tests.swift.programs import python
from tests.swift.stand_ins import PTH, make_packages, make_swift, package_folder

UNAFFECTED: Final = "Runs without --sharded_lazy are not affected. `lazyshard doctor swift` shows the details."


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


@contextlib.contextmanager
def no_handlers() -> Iterator[None]:
    """As in a process that has not set up logging; pytest has."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = before


def test_supported_and_extended_is_silent(
    engine: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "4.6.0")
    hooked.extend(engine, "engine_extension")
    assert vars(engine)["value"] == 2
    assert hooked.outcomes() == (hooked.Outcome("engine", "engine_extension", True, ""),)
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


def test_failure_is_told_once(
    engine: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = [point for point in ms_swift.POINTS if point.name != "_show_dataset"]
    install(monkeypatch, "4.6.0", make_swift(tmp_path, lacking))
    del vars(engine)["value"]
    hooked.extend(engine, "engine_extension")
    hooked.extend(engine, "engine_extension")
    hooked.warn_once()
    assert caplog.record_tuples == [
        (
            "lazyshard",
            logging.WARNING,
            "ms-swift 4.6.0 is installed, lazyshard is made for 4.0 to 4.6. Could not be hooked: "
            "swift.pipelines.train.sft.SwiftSft._show_dataset (there is no _show_dataset); "
            f"engine (engine_extension: AttributeError: it has no value). {UNAFFECTED}",
        )
    ]


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
    assert caplog.messages == [
        f"ms-swift {name} is installed, lazyshard is made for 4.0 to 4.6. All hook points are there. {UNAFFECTED}"
    ]


def test_of_an_ms_swift_that_is_too_old_nothing_is_touched_but_to_refuse_the_flag(
    engine: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "3.12.6")
    hooked.extend(engine, "engine_extension")
    assert vars(engine)["value"] == 1
    assert hooked.outcomes() == ()
    for number, name in enumerate(hooked.REFUSING):
        engine.__name__ = name
        hooked.extend(engine, "engine_extension")
        assert vars(engine)["value"] == 2 + number
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
    with no_handlers():
        hooked.warn_once()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lazyshard: warning: ms-swift 4.7.0 is installed, ")
    assert shown.err.count("\n") == 1


def test_warning_that_nobody_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "4.7.0")
    with open("/dev/full", "w") as full, no_handlers():
        monkeypatch.setattr(sys, "stderr", full)
        hooked.warn_once()
        monkeypatch.undo()
        # What is still in its buffer must not fail at close.
        with pytest.raises(OSError):
            full.close()


def test_reason_of_many_lines_is_told_on_one(
    engine: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def extend(module: types.ModuleType) -> None:
        raise ValueError("one\n  two")

    install(monkeypatch, "4.6.0")
    vars(sys.modules["engine_extension"])["extend"] = extend
    hooked.extend(engine, "engine_extension")
    assert "engine (engine_extension: ValueError: one two). " in caplog.messages[0]


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
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*arguments: Any) -> str:
            return f"{original(*arguments)} {text}"

        return replacement

    return make


def failing(original: Callable[..., Any]) -> Callable[..., Any]:
    raise RuntimeError(f"cannot wrap {original.__name__}")


def test_functions_are_replaced_and_pass_for_the_originals() -> None:
    owner = make_owner()
    original = owner.first
    wrap(owner, {"first": adding("a"), "second": adding("b")})
    assert (owner().first(1), owner().second()) == ("1 a", "second b")
    assert (owner.first.__name__, owner.first.__doc__, owner.first.__wrapped__) == (
        "first",
        "Doc of the first.",
        original,
    )


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["first", "third"], "no third"),
        (["third", "first", "fourth"], "no third, no fourth"),
        (["first", "value"], "no value"),
        # One of its base's would be replaced for all of its other classes too, or hidden for this one.
        (["first", "inherited"], "no inherited"),
    ],
)
def test_nothing_is_replaced_if_one_is_missing(names: list[str], missing: str) -> None:
    owner = make_owner()
    before = dict(vars(owner))
    with pytest.raises(AttributeError, match=f"^Owner has {missing}$"):
        wrap(owner, dict.fromkeys(names, adding("a")))
    assert dict(vars(owner)) == before


def test_nothing_is_replaced_if_one_cannot_be_made() -> None:
    owner = make_owner()
    before = dict(vars(owner))
    with pytest.raises(RuntimeError, match="cannot wrap second"):
        wrap(owner, {"first": adding("a"), "second": failing})
    assert dict(vars(owner)) == before


def test_functions_of_a_module_are_replaced_too() -> None:
    module = ModuleType("some.module")
    vars(module)["first"] = lambda: "first"
    wrap(module, {"first": adding("a")})
    assert module.first() == "first a"
    with pytest.raises(AttributeError, match=r"^some\.module has no second$"):
        wrap(module, {"second": adding("a")})


def test_wrapped_twice_both_count() -> None:
    owner = make_owner()
    wrap(owner, {"second": adding("a")})
    wrap(owner, {"second": adding("b")})
    assert owner().second() == "second a b"


def test_nothing_to_wrap_is_no_error() -> None:
    owner = make_owner()
    before = dict(vars(owner))
    wrap(owner, {})
    assert dict(vars(owner)) == before
