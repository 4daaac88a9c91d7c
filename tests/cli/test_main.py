"""The command itself: exit codes, usage, what is missing; and amounts and values made short for people."""

import base64
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

import lazyshard as package
from lazyshard.cli import command, exits, main, output, verify
from lazyshard.cli.output import MAX_CHARACTERS, duration, moment, per_second, shorten, size
from lazyshard.errors import (
    AccessRefused,
    ChunkCorrupt,
    LazyShardError,
    RowInvalid,
    StreamInvalid,
    StreamMismatch,
)
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


@pytest.mark.parametrize("name", ["typer", "rich", "rich.console"])
def test_missing_requirement_is_named_in_one_line(name: str) -> None:
    hidden = f"import sys; sys.modules[{name!r}] = None"
    code = f"{hidden}; from lazyshard.cli.main import main; sys.exit(main(['verify', '/']))"
    done = python("-c", code)
    top = name.partition(".")[0]
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"lazyshard needs {top}, which is not installed: pip install 'lazyshard[cli]'\n"


@pytest.mark.parametrize("module", ["torch", "lazyshard.data"])
def test_command_loads_nothing_of_training(module: str) -> None:
    done = python("-c", f"import sys, lazyshard.cli.command; print({module!r} in sys.modules)")
    assert done.stdout == "False\n", done.stderr


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
    with open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", full)
        write("x")
        output.drop_what_nobody_reads()
        # What is still in its buffer must not fail at close.
        with contextlib.suppress(OSError):
            full.close()


def test_messages_are_one_line() -> None:
    assert output.one_line("a\nb\tc\x1b[31m\udcff") == "a\\nb\\tc\\x1b[31m\\udcff"


def rows_per_second(number: float) -> str:
    return per_second(number, "rows")


PAYLOAD = base64.b64encode(bytes(range(256)) * 4).decode()


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (size, {0: "0 bytes", 1: "1 byte", 999: "999 bytes", 1000: "1.0 kB", 12_345_678: "12.3 MB", 2e9: "2.0 GB"}),
        (size, {5e15: "5.0 PB"}),
        (duration, {0.4: "0 s", 59: "59 s", 125: "2 min 5 s", 47 * 3600: "47 h 0 min", 2 * 86400: "2 days 0 h"}),
        (duration, {2 * 86400 + 7200: "2 days 2 h", 3e9: "over a year", float("inf"): "over a year"}),
        (rows_per_second, {1234.56: "1,234.6 rows/s", 1: "1.0 rows/s", 0.25: "0.25 rows/s", 0.001: "3.6 rows/h"}),
        (rows_per_second, {0: "0 rows/s"}),
        (moment, {0.0: "1970-01-01 00:00:00 UTC", 1e18: "1e+18 s after 1970", -1e18: "-1e+18 s after 1970"}),
    ],
)
def test_amounts_in_words(words: Callable[[float], str], numbers: dict[float, str]) -> None:
    assert {number: words(number) for number in numbers} == numbers


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=400),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


@given(value=values)
def test_what_is_short_stays_and_the_rest_gets_short(value: Any) -> None:
    found = shorten(value)
    assert found == value or len(json.dumps(found)) <= len(json.dumps(value)) + 30


@pytest.mark.parametrize(
    ("value", "short"),
    [
        ("x" * MAX_CHARACTERS, "x" * MAX_CHARACTERS),
        ("x" * 201, "x" * 200 + "... (201 characters)"),
        ("ab " * 500, ("ab " * 67)[:200] + "... (1,500 characters)"),
        (PAYLOAD, "AAECAwQFBgcICQoL... (1,368 characters, base64 of 1,024 bytes)"),
        (
            f"data:image/png;base64,{PAYLOAD}",
            "data:image/png;base64,AAECAwQFBgcICQoL... (1,390 characters, base64 of 1,024 bytes)",
        ),
        # One that is cut, or broken into lines, is shown like any other text.
        (PAYLOAD + " .", PAYLOAD[:200] + "... (1,370 characters)"),
        (list(range(20)), list(range(20))),
        ([[0] * 21], [[*([0] * 20), "... (21 items)"]]),
        ({"a": {"b": "y" * 300}}, {"a": {"b": "y" * 200 + "... (300 characters)"}}),
        ({"k" * 300: 1}, {"k" * 200 + "... (300 characters)": 1}),
        ({str(n): n for n in range(100)}, {str(n): n for n in range(100)}),
        ({str(n): n for n in range(1234)}, {**{str(n): n for n in range(100)}, "...": "(1,234 keys)"}),
        (1234567890123456789, 1234567890123456789),
        ([], []),
    ],
)
def test_long_values(value: Any, short: Any) -> None:
    assert shorten(value) == short


def test_nesting_deeper_than_python_may_recurse() -> None:
    value: Any = [1, 2]
    for _ in range(5000):
        value = {"a": value, "b": 1}
    text = json.dumps(shorten(value))
    assert text.count("{") == 40
    assert '"... (2 keys)"' in text
