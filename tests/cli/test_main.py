"""The command itself: exit codes, usage, what is missing; and amounts and values made short for people."""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

import lazyshard as package
from lazyshard.cli import command, exits, main, output, verify
from lazyshard.cli.output import MAX_CHARACTERS, duration, moment, shorten, size
from lazyshard.errors import AccessRefused, ChunkCorrupt, LazyShardError, RowInvalid, StreamInvalid, StreamMismatch
from tests.cli.commands import lazyshard, python


def test_exit_codes_are_the_producers_where_both_have_one() -> None:
    producer = pytest.importorskip("lazyshard_producer.errors")
    ours = [kind("x") for kind in (RowInvalid, AccessRefused, StreamMismatch, ChunkCorrupt)]
    full, memory = OSError(28, "No space left on device"), OSError(12, "Cannot allocate memory")
    for error in (*ours, LazyShardError("x"), full, KeyError("x"), MemoryError("x"), memory):
        assert exits.exit_code(error) == producer.exit_code(error)
    for name in ("NO_EXTRA", "USAGE", "UNEXPECTED", "OUT_OF_MEMORY", "INTERRUPTED"):
        assert getattr(exits, name) == getattr(producer, name)
    assert exits.exit_code(StreamInvalid("x")) == exits.REFUSED


def test_version_and_no_command() -> None:
    done = lazyshard("--version")
    assert (done.returncode, done.stdout) == (0, f"lazyshard {package.__version__}\n")
    done = lazyshard()
    assert (done.returncode, "Usage: lazyshard" in done.stdout) == (2, True)


@pytest.mark.parametrize("name", ["typer", "rich.console"])
def test_missing_requirement_is_named_in_one_line(name: str) -> None:
    hidden = f"import sys; sys.modules[{name!r}] = None"
    code = f"{hidden}; from lazyshard.cli.main import main; sys.exit(main(['verify', '/']))"
    done = python("-c", code)
    top = name.partition(".")[0]
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"lazyshard needs {top}, which is not installed: pip install 'lazyshard[cli]'\n"


def test_command_loads_nothing_of_training(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('{"version": 1, "datasets": [{"path": "a"}]}')
    check = f"execute(['check-config', {str(tmp_path / 'train.json')!r}])"
    done = python("-c", f"import sys; from lazyshard.cli.command import execute; print({check}, *sys.modules)")
    code, *loaded = done.stdout.splitlines()[-1].split()
    assert (code, {"torch", "lazyshard.data"} & set(loaded)) == ("0", set())


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (OSError(28, "No space left on device", "/a/b"), 7, "lazyshard: error: /a/b: No space left on device; "),
        (KeyboardInterrupt(), 130, "lazyshard: interrupted"),
        (KeyError("x"), 70, "lazyshard: error: unexpected KeyError: 'x'; "),
    ],
)
def test_errors_that_end_a_command(error: BaseException, code: int, told: str) -> None:
    with mock.patch.object(verify, "verify", side_effect=error):
        done = lazyshard("verify", "/")
    assert (done.returncode, done.stderr.splitlines()[-1].startswith(told)) == (code, True)
    assert ("Traceback" in done.stderr) is (code == 70)


def test_interrupt_while_typer_is_at_work_and_a_module_that_is_missing() -> None:
    with mock.patch.object(command, "app", side_effect=typer.Abort):
        assert main.main(["verify", "/"]) == 130
    # One that is none of the requirements is not hidden.
    with mock.patch.dict(sys.modules, {"lazyshard.cli.command": None}), pytest.raises(ModuleNotFoundError):
        main.main(["verify", "/"])


@pytest.mark.parametrize("write", [output.explain, output.complain])
def test_messages_that_go_nowhere_are_no_failure(write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert output.one_line("a\nb\tc\x1b[31m\udcff") == "a\\nb\\tc\\x1b[31m\\udcff"
    with open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", full)
        write("x")
        output.detach_broken_streams()
        # What is still in its buffer must not fail at close.
        with contextlib.suppress(OSError):
            full.close()


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (size, {0: "0 bytes", 1: "1 byte", 2e9: "2.0 GB", 5e15: "5.0 PB"}),
        (duration, {0.4: "0 s", 47 * 3600: "47 h 0 min", 2 * 86400: "2 days 0 h", float("inf"): "over a year"}),
        (moment, {0.0: "1970-01-01 00:00:00 UTC", 1e18: "1e+18 s after 1970", -1e18: "-1e+18 s after 1970"}),
    ],
)
def test_amounts_in_words(words: Callable[[float], str], numbers: dict[float, str]) -> None:
    assert {number: words(number) for number in numbers} == numbers


@pytest.mark.parametrize(
    ("value", "short"),
    [
        ("x" * MAX_CHARACTERS, "x" * MAX_CHARACTERS),
        ("x" * 201, "x" * 200 + "... (201 characters)"),
        ("ab " * 500, ("ab " * 67)[:200] + "... (1,500 characters)"),
        ([[0] * 21], [[*([0] * 20), "... (21 items)"]]),
        ({"a": {"b": "y" * 300}}, {"a": {"b": "y" * 200 + "... (300 characters)"}}),
        ({"k" * 300: 1}, {"k" * 200 + "... (300 characters)": 1}),
        ({str(n): n for n in range(100)}, {str(n): n for n in range(100)}),
        ({str(n): n for n in range(1234)}, {**{str(n): n for n in range(100)}, "...": "(1,234 keys)"}),
    ],
)
def test_long_values(value: Any, short: Any) -> None:
    assert shorten(value) == short


BAD = "version: 1\ndatasets:\n  - path: chat\n    wieght: 1\ndataloader:\n  batch_size: 0\n"
STEPS = "version: 1\ndatasets:\n  - path: a\n    steps: [{{filter_fn: '{}'}}]\n  - path: b\n"


def test_check_config(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(STEPS.format("os.path:isdir"))
    done = lazyshard("check-config", file)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file}: no mistakes: 2 data sets, 1 step\n", "")
    file.write_text(STEPS.format("no_such_module:keep"))
    assert lazyshard("check-config", file, "--no-imports").returncode == 0
    done = lazyshard("check-config", file)
    assert (done.returncode, "no_such_module" in done.stdout) == (3, True)
    file.write_text(BAD)
    done = lazyshard("check-config", file)
    first, second, last = done.stdout.splitlines()
    assert first.startswith(f"{file}:4: datasets[0].wieght: ")
    assert second.startswith(f"{file}:6: dataloader.batch_size: ")
    assert (done.returncode, done.stderr, last) == (3, "", f"{file}: 2 mistakes")
    done = lazyshard("check-config", file, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["file"], found["ok"]) == (3, str(file), False)
    text = first.partition("wieght: ")[2]
    assert found["mistakes"][0] == {"path": "datasets[0].wieght", "line": 4, "text": text}
