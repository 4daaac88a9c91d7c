"""`lazyshard_swift.help`: when the full help is shown, and that nothing else changes."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from lazyshard_swift import help as shown


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("/site-packages/swift/cli/sft.py", ["--help"], True),
        ("/site-packages/swift/cli/sft.py", ["--model", "m", "-h"], True),
        ("/site-packages/swift/cli/sft.py", ["--model", "m"], False),
        ("/site-packages/swift/cli/pt.py", ["--help"], False),
        ("/home/user/sft.py", ["--help"], False),
        (None, ["--help"], False),
    ],
)
def test_help_is_asked_for_by_the_script_of_swift_sft_only(
    script: str | None, arguments: list[str], expected: bool
) -> None:
    assert shown.asks_for_help(script, arguments) is expected


class Asked(Exception):
    """Raised by the stand-in for ms-swift's parser."""


def extended(monkeypatch: pytest.MonkeyPatch, arguments: list[str], *, full_parser: bool = True) -> ModuleType:
    """Returns `swift.cli.utils` after the extension, in a process that looks like that of `swift sft`."""
    module = ModuleType("swift.cli.utils")
    module.try_use_single_device_mode = lambda: "stock"  # type: ignore[attr-defined]
    shown.extend(module)

    def sft_main() -> None:
        raise Asked

    pipelines = ModuleType("swift.pipelines")
    if full_parser:
        pipelines.sft_main = sft_main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swift.pipelines", pipelines)
    main = ModuleType("__main__")
    main.__file__ = "/site-packages/swift/cli/sft.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["sft.py", *arguments])
    return module


def test_the_full_parser_answers_help(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Asked):
        extended(monkeypatch, ["--help"]).try_use_single_device_mode()


def test_a_training_run_goes_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extended(monkeypatch, ["--model", "m"]).try_use_single_device_mode() == "stock"


def test_help_without_a_full_parser_is_left_to_the_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extended(monkeypatch, ["--help"], full_parser=False).try_use_single_device_mode() == "stock"
